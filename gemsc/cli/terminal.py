"""What the commands print on: the terminal, stderr, a bar of progress."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

__all__ = ["Directory", "console", "pass_line", "progress_bar", "say"]

UNCUT = 10_000  # characters of a line where no terminal's width cuts it
QUIET_SECONDS = 30.0  # where nobody watches, what ends sooner needs no lines

console = Console()
if not console.is_terminal and "COLUMNS" not in os.environ:
    console.width = UNCUT
Directory = Annotated[Path, typer.Argument(help="what `gemsc compile -o` wrote")]


def say(text: str) -> None:
    """Print a line to stderr."""
    print(text, file=sys.stderr)  # noqa: T201


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """Show a bar while something is measured; give what is to be told how far it is."""
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)


@contextmanager
def pass_line() -> Iterator[Callable[[str], None]]:
    """Show which pass has ended and the time so far; give what is to be told of it.

    On a terminal it is one line that goes away; elsewhere, one line for each pass that
    ends after the first half minute.
    """
    terminal, start = Console(stderr=True), perf_counter()
    if not terminal.is_terminal:

        def tell(name: str) -> None:
            if (seconds := perf_counter() - start) > QUIET_SECONDS:
                say(f"{seconds:5.0f} s  {name}")

        yield tell
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=terminal, transient=True) as line:
        task = line.add_task("trace", total=None)
        yield lambda name: line.update(task, description=f"{name}: done")
