"""Start ranks from a process that is no rank: `gemsc run`."""
