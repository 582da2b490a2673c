"""Pictures that are too large for memory: read and written in parts."""
