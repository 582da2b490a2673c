"""Checkpoints: folders on the disk, what is in them, and how any layout reads them."""
