"""The user's source files, as they are loaded."""
