"""What the commands print on: the terminal, stderr, a bar of progress, or as JSON."""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

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

from gemsc.base.files import in_json
from gemsc.errors import GemscError

UNCUT = 10_000  # characters of a line where no terminal's width cuts it
QUIET_SECONDS = 30.0  # where nobody watches, what ends sooner needs no lines

console = Console()
if not console.is_terminal and "COLUMNS" not in os.environ:
    console.width = UNCUT
Directory = Annotated[
    Path, typer.Argument(help="program directory, as `gemsc compile -o` wrote it")
]
Answer = tuple[dict[str, Any], int]  # what was found, and the exit code
JSON = typer.Option("--json", help="print one JSON document instead")


def tell(text: str) -> None:
    """Print a line to stdout as it is, unless an answer in JSON is wanted."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def check_svg(output: Path) -> None:
    """Refuse to draw into a file that is no .svg file."""
    if output.suffix != ".svg":
        raise GemscError(
            f"cannot draw {output}", help="give -o a name that ends in .svg"
        )


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
def pass_line(
    quiet: float = QUIET_SECONDS, between: float = 0.0
) -> Iterator[Callable[[str], None]]:
    """Show what has ended and the time so far; give what is to be told of it.

    On a terminal it is one line that goes away; elsewhere, one line for each that ends
    after `quiet` seconds, and `between` after the one before.
    """
    terminal, start = Console(stderr=True), perf_counter()
    if not terminal.is_terminal:
        following = quiet

        def tell(name: str) -> None:
            nonlocal following
            if (seconds := perf_counter() - start) > following:
                following = seconds + between
                say(f"{seconds:5.0f} s  {name}")

        yield tell
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=terminal, transient=True) as line:
        task = line.add_task("trace", total=None)
        yield lambda name: line.update(task, description=f"{name}: done")


def gives_json(command: Callable[..., Answer | None]) -> Callable[..., None]:
    """Give a command --json: then its answer is printed, and nothing else on stdout.

    Its tables are left out; what others print, the ranks or the user's model, goes to
    stderr. A command that returns None has nothing to answer to the flags given.
    """
    signature = inspect.signature(command, eval_str=True)
    flag = inspect.Parameter(
        "as_json",
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=False,
        annotation=Annotated[bool, JSON],
    )

    @functools.wraps(command)
    def with_json(*, as_json: bool, **others: Any) -> None:
        if not as_json:
            answer = command(**others)
        else:
            with _quiet():
                answer = command(**others)
            if answer is not None:
                typer.echo(json.dumps(in_json(answer[0]), indent=2, allow_nan=False))
        if answer is not None and answer[1]:
            raise typer.Exit(answer[1])

    shown = [*signature.parameters.values(), flag]
    with_json.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    with_json.__annotations__ = {p.name: p.annotation for p in shown}
    return with_json


@contextmanager
def _quiet() -> Iterator[None]:
    """Print no tables, and let all else that is printed go to stderr."""
    sys.stdout.flush()
    held = os.dup(1)
    os.dup2(2, 1)  # for processes that are started meanwhile
    console.quiet = True
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        console.quiet = False
        os.dup2(held, 1)
        os.close(held)
