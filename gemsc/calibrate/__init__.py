"""Measure this machine and write a hardware file: `gemsc profile`."""
