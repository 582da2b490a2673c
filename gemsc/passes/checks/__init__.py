"""Passes that change nothing: they refuse what could not be right."""
