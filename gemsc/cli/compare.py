"""`gemsc compare`: curves and figures of runs, side by side."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from gemsc.base.files import write_text
from gemsc.cli.terminal import console
from gemsc.errors import GemscError
from gemsc.viz.curves import curves
from gemsc.viz.run_log import RunLog

__all__ = ["compare_command", "draw_run"]


def compare_command(
    runs: Annotated[list[Path], typer.Argument(help="folders of runs: PROGRAM/runs/1")],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="the drawing, an .svg file")
    ] = Path("compare.svg"),
) -> None:
    """Draw the curves of runs, and print how far they came and how they differ."""
    if output.suffix != ".svg":
        raise GemscError(
            f"cannot draw {output}", help="give -o a name that ends in .svg"
        )
    logs = [RunLog.read(folder) for folder in runs]
    for log, folder in zip(logs, runs, strict=True):
        log.name = str(folder)
    write_text(output, curves(logs))
    console.print(_table(logs))
    for line in _differences(logs):
        console.print(escape(line), highlight=False)
    console.print(escape(f"wrote {output}"), highlight=False)


def draw_run(folder: Path) -> None:
    """Draw the curves of a run that has ended into its folder, if it logged a step."""
    if not (folder / "log.jsonl").exists():
        return
    log = RunLog.read(folder)
    if log.steps:
        write_text(folder / "curves.svg", curves([log]))


def _table(logs: Sequence[RunLog]) -> Table:
    table = Table(box=None, pad_edge=False)
    names = dict.fromkeys(name for log in logs for name in log.figures)
    table.add_column("run", overflow="fold")
    heads = ["steps", "loss", "least loss", *(f"held-out {name}" for name in names)]
    for head in (*heads, "samples/s"):
        table.add_column(escape(head), justify="right")
    for log in logs:
        losses = [value for _, value in log.loss]
        row = [_number(losses[-1:]), _number([min(losses)] if losses else [])]
        for name in names:
            row.append(_number([value for _, value in log.figures.get(name, [])][-1:]))
        rate = [statistics.median(rate for _, rate in log.rates)] if log.rates else []
        table.add_row(escape(log.name), str(log.steps), *row, _number(rate, ".1f"))
    return table


def _number(found: Sequence[float], form: str = ".4g") -> str:
    return format(found[0], form) if found else "-"


def _differences(logs: Sequence[RunLog]) -> list[str]:
    """Return a line for each option that is not the same in all runs."""
    names = sorted({name for log in logs for name in log.options})
    lines = []
    for name in names:
        values = [log.options.get(name, "default") for log in logs]
        if any(value != values[0] for value in values):
            flag = f"--{name.replace('_', '-')}"
            lines.append(f"{flag}: {', '.join(map(str, values))}")
    return lines
