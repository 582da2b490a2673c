"""Keras 3 archives: read without Keras, layer by layer."""
