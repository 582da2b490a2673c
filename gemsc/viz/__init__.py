"""Pictures and tables of a compiled program."""
