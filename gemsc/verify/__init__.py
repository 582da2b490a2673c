"""Compare N ranks with one process: `gemsc verify`."""
