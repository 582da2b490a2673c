"""Pictures and volumes that are read, computed and written in windows."""
