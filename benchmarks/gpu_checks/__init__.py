"""The checks of gpu.py, each a function that gives lines of a report."""
