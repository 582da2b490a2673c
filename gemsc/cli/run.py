"""`gemsc run`: start the ranks of a program; `gemsc compare`: runs side by side.

Neither loads PyTorch: the ranks do.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from gemsc.base.files import write_text
from gemsc.cli.command import read_settings
from gemsc.cli.terminal import Answer, Directory, check_svg, console, gives_json, tell
from gemsc.errors import warn
from gemsc.launch.start import run_parser, start
from gemsc.viz.curves import RunLog, curves


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


@gives_json
def compare_command(
    runs: Annotated[
        list[Path], typer.Argument(help="run folders, for example PROGRAM/runs/1")
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help=".svg file for the plot")
    ] = Path("compare.svg"),
) -> Answer:
    """Plot runs side by side; print their last figures and how their options differ."""
    check_svg(output)
    logs = [RunLog.read(folder) for folder in runs]
    for log, folder in zip(logs, runs, strict=True):
        log.name = str(folder)
    write_text(output, curves(logs))
    console.print(_table(logs))
    differ = _differences(logs)
    for name, values in differ.items():
        tell(f"--{name.replace('_', '-')}: {', '.join(map(str, values))}")
    tell(f"wrote {output}")
    answer = {"runs": [_as_data(log) for log in logs], "options": differ}
    return answer | {"drawing": str(output)}, 0


def draw_run(folder: Path) -> None:
    """Draw the curves of a run that has ended into its folder, if it logged a step."""
    if not (folder / "log.jsonl").exists():
        return
    log = RunLog.read(folder)
    if log.steps:
        try:
            write_text(folder / "curves.svg", curves([log]))
        except OSError as error:  # the run ends as it does without a drawing
            warn(f"no curves.svg in {folder}: {error.strerror}")


def _as_data(log: RunLog) -> dict[str, Any]:
    """Return how far a run came: its last figures, and its least loss."""
    losses = [value for _, value in log.loss]
    rates = [rate for _, rate in log.rates]
    return {
        "run": log.name,
        "steps": log.steps,
        "loss": losses[-1] if losses else None,
        "least_loss": min(losses, default=None),
        "held_out": {name: curve[-1][1] for name, curve in log.figures.items()},
        "samples_per_second": statistics.median(rates) if rates else None,
    }


def _table(logs: Sequence[RunLog]) -> Table:
    table = Table(box=None, pad_edge=False)
    names = dict.fromkeys(name for log in logs for name in log.figures)
    table.add_column("run", overflow="fold")
    heads = ["steps", "loss", "least loss", *(f"held-out {name}" for name in names)]
    for head in (*heads, "samples/s"):
        table.add_column(escape(head), justify="right")
    for facts in map(_as_data, logs):
        figures = [facts["held_out"].get(name) for name in names]
        row = map(_number, (facts["loss"], facts["least_loss"], *figures))
        rate = _number(facts["samples_per_second"], ".1f")
        table.add_row(escape(facts["run"]), str(facts["steps"]), *row, rate)
    return table


def _number(figure: float | None, form: str = ".4g") -> str:
    return "-" if figure is None else format(figure, form)


def _differences(logs: Sequence[RunLog]) -> dict[str, list[Any]]:
    """Return the values of each option that is not the same in all runs."""
    names = sorted({name for log in logs for name in log.options})
    all_values = {n: [log.options.get(n, "default") for log in logs] for n in names}
    return {n: v for n, v in all_values.items() if any(one != v[0] for one in v)}
