"""What the commands print on: the terminal, stderr, a bar of progress."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

__all__ = ["Directory", "console", "progress_bar", "say"]

console = Console()
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
