"""A rank as a process: its device, its progress, its failures."""
