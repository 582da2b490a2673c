"""What the ranks of one grid compute together: halos, norms, losses, windows."""
