"""Prediction over whole slides, on the ranks of a program."""
