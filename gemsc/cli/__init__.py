"""The `gemsc` command: arguments and exit codes, nothing else."""

from gemsc.cli.command import main, make_app

__all__ = ["main", "make_app"]
