"""Networks that come as files: Keras archives and ONNX graphs become PyTorch source.

A reader turns a file into an `ImportedNetwork`: classes with a readable forward, and
where each weight comes from. It is written as a folder with model.py and its weights;
from there everything goes the one way that a user's own model goes.
"""
