"""Weights on disk: safetensors files, written and read one tensor at a time."""
