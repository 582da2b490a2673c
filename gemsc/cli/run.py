"""`gemsc run`: start the ranks of a program. It loads no PyTorch, the ranks do."""

from __future__ import annotations

from typing import Annotated

import typer

from gemsc.cli.compare import draw_run
from gemsc.cli.settings import read_settings
from gemsc.cli.terminal import Directory
from gemsc.launch.arguments import run_parser
from gemsc.launch.start import start


def _show_help(wanted: bool) -> None:
    if wanted:
        run_parser().print_help()
        raise typer.Exit


HELP = typer.Option("--help", "-h", is_eager=True, callback=_show_help, hidden=True)


def run_command(
    directory: Directory,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="--epochs, --steps, --save, ...; --help lists them all"),
    ] = None,
    help: Annotated[bool, HELP] = False,
) -> None:
    """Train under mpirun, with the right flags for this machine."""
    settings = []
    for name, value in read_settings("run", run_parser().names).items():
        words = [] if isinstance(value, bool) else value
        if value is not False:
            settings += [text for word in words or [""] for text in (f"--{name}", word)]
    typed = [*filter(None, settings), *(arguments or [])]
    raise typer.Exit(start(directory, typed, ended=draw_run))
