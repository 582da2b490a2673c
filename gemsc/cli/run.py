"""`gemsc run`: start the ranks of a program. It loads no PyTorch, the ranks do."""

from __future__ import annotations

from typing import Annotated

import typer

from gemsc.cli.compare import draw_run
from gemsc.cli.terminal import Directory
from gemsc.launch.start import start

__all__ = ["run_command"]


def run_command(
    directory: Directory,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="--epochs, --steps, --save, ...; --help lists all"),
    ] = None,
) -> None:
    """Train under mpirun, with the right flags for this machine."""
    raise typer.Exit(start(directory, arguments or [], ended=draw_run))
