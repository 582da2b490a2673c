"""The `gemsc` command: arguments and exit codes, nothing else."""

from gemsc.cli.command import app, main

__all__ = ["app", "main"]
