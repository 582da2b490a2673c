"""The samples that a rank reads."""
