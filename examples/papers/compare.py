"""Simulate set-ups of the literature; print what was published beside it.

python examples/papers/compare.py       all headlines, with the reasons of differences
python examples/papers/gems.py          one paper: every run, and every assumption
python examples/papers/gems.py curves   the same, and curves/gems-1.svg, -2.svg, ...

A paper is a .toml file with its machine, its runs and every assumption, beside a .py
file with the models. Nothing is fitted to what was published. Backwards are whole: the
papers' systems defer no weight gradients.
"""

import os
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gemsc.base.units import show_bytes, show_seconds
from gemsc.costs.hardware import Hardware, read_hardware
from gemsc.options import CompileOptions
from gemsc.passes.share_device import share
from gemsc.simulate.show import ASSUMPTIONS, draw_curve
from gemsc.simulate.simulation import Simulation, simulate, trace_unfilled
from gemsc.user_model import load_user_model

HERE = Path(__file__).parent
KNOWN = ("schedule", "micro_batches", "times", "branches", "trunk", "device_memory")
LISTS = ("tiles", "recompute", "offload")


@dataclass(frozen=True)
class Line:
    """A run as it is printed; `reason` says why its two figures differ."""

    name: str
    published: str
    simulated: str
    details: dict[str, str]
    reason: str


@dataclass(frozen=True)
class Paper:
    """A .toml file that has been read."""

    title: str
    source: str
    assumptions: list[str]
    hardware: str  # a shipped machine, or a path
    model: str  # a path
    run: list[dict[str, Any]]

    @property
    def machine(self) -> Hardware:
        return read_hardware(self.hardware)

    @property
    def shares(self) -> bool:
        """Whether its runs are processes that share a device."""
        return "per_device" in self.run[0]


def read_paper(path: Path) -> Paper:
    paper = tomllib.loads(path.read_text(encoding="utf-8"))
    for name in ("model", "hardware"):
        if Path(paper[name]).suffix:
            paper[name] = str(path.parent / paper[name])
    return Paper(**paper)


def trace_run(paper: Paper, run: dict[str, Any]) -> Any:
    os.environ.update(run.get("environment", {}))
    return trace_unfilled(load_user_model(paper.model), paper.machine)


def simulate_runs(
    paper: Paper, runs: list[dict[str, Any]], *, curves: bool = False
) -> dict[str, Simulation]:
    """Return some runs of a paper, simulated, by their names."""
    traced, environment, simulated = None, None, {}
    for run in runs:
        if traced is None or run.get("environment") != environment:
            environment = run.get("environment")
            traced = trace_run(paper, run)
        options = CompileOptions(
            ranks=run["ranks"],
            data=run["data"],
            hardware=paper.hardware,
            **{name: run[name] for name in KNOWN if name in run},
            **{name: tuple(run[name]) for name in LISTS if name in run},
        )
        copies = () if curves else (1,)
        simulated[run["name"]] = simulate(traced, options, copies, defers=False)
    return simulated


def simulated_lines(
    runs: list[dict[str, Any]], simulated: dict[str, Simulation]
) -> list[Line]:
    return [
        Line(
            run["name"],
            *figures(run, runs, simulated),
            details={
                "step": show_seconds(simulated[run["name"]].last.step_seconds),
                "samples/s": f"{simulated[run['name']].last.throughput:,.1f}",
                "peak GPU": peak(simulated[run["name"]]),
            },
            reason=run.get("reason", ""),
        )
        for run in runs
    ]


def figures(
    run: dict[str, Any], runs: list[dict[str, Any]], simulated: dict[str, Simulation]
) -> tuple[str, str]:
    """Return what was published of a run, and what it comes to here."""
    result = simulated[run["name"]]
    if "published_efficiency" in run:
        return f"{run['published_efficiency']:.2%}", f"{result.efficiency:.2%}"
    over = run.get("over", run["name"])
    base = next(other for other in runs if other["name"] == over)
    faster = result.last.throughput / simulated[over].last.throughput
    if "published_hours" in base:
        hours = run.get("published_hours")
        taken = f"{base['published_hours'] / faster:.2f} h"
        return "-" if hours is None else f"{hours} h", taken
    most = run.get("published_speedup", "-")
    return most if isinstance(most, str) else f"{most}x", f"{faster:.2f}x"


def peak(result: Simulation) -> str:
    needed = show_bytes(max(result.timeline.peak_bytes))
    return needed if result.fits else f"{needed}, too much"


def sharing_lines(paper: Paper, runs: list[dict[str, Any]]) -> list[Line]:
    """Return the figures of processes that share a device, for several batches."""
    lines = []
    for run in runs:
        count, device = run["per_device"], paper.machine.device
        sharing = share(trace_run(paper, run).program, device)
        lines.append(
            Line(
                run["name"],
                f"up to +{run['published_gain']:.0%}",
                f"{sharing.gain(count):+.0%}",
                details={
                    "with sums": f"{sharing.gain(count, sums=True):+.0%}",
                    "device used": f"{sharing.utilisation():.0%}",
                    "one process, larger batch": f"{sharing.gain_of_batch(count):+.0%}",
                },
                reason=run.get("reason", ""),
            )
        )
    return lines


def show(path: Path, console: Console, folder: str = "") -> None:
    """Print all runs of a paper and what they assume; draw their curves."""
    paper = read_paper(path)
    if paper.shares:
        lines, assumptions = sharing_lines(paper, paper.run), ASSUMPTIONS
    else:
        simulated = simulate_runs(paper, paper.run, curves=bool(folder))
        lines, assumptions = simulated_lines(paper.run, simulated), ()
        if folder:
            draw(simulated, Path(folder), path.stem)
    table = Table(title=paper.title, title_justify="left")
    table.add_column("run")
    for title in ("published", "simulated", *lines[0].details):
        table.add_column(title, justify="right")
    for line in lines:
        cells = line.published, line.simulated, *line.details.values()
        table.add_row(line.name, *cells)
    console.print(table)
    console.print(f"published: {paper.source}", highlight=False)
    for text in (*paper.assumptions, *assumptions, *paper.machine.notes):
        console.print(f"- {text}", highlight=False)


def draw(simulated: dict[str, Simulation], folder: Path, stem: str) -> None:
    """Draw the curve of every run that has one."""
    folder.mkdir(parents=True, exist_ok=True)
    curves = {name: sim.points for name, sim in simulated.items() if sim.points[1:]}
    for number, (name, points) in enumerate(curves.items(), 1):
        text = draw_curve(name, points)
        (folder / f"{stem}-{number}.svg").write_text(text, encoding="utf-8")


def headlines(paper: Paper) -> list[Line]:
    """Return the runs that say why they differ from what was published."""
    told = [run for run in paper.run if "reason" in run]
    needed = {name for run in told for name in (run["name"], run.get("over"))}
    runs = [run for run in paper.run if run["name"] in needed]
    if paper.shares:
        return sharing_lines(paper, runs)
    simulated = simulate_runs(paper, runs)
    return [line for line in simulated_lines(runs, simulated) if line.reason]


def show_headlines(paths: list[Path], console: Console) -> None:
    """Print the headlines of several papers."""
    table = Table(show_lines=True)
    for title in ("paper", "run", "published", "simulated", "why they differ"):
        table.add_column(title, justify="right" if title.endswith("ed") else "left")
    for path in paths:
        for line in headlines(read_paper(path)):
            cells = line.name, line.published, line.simulated, line.reason
            table.add_row(path.stem, *cells)
    console.print(table)


def papers() -> list[Path]:
    """Return the papers' files; those of machines have no runs."""
    files = sorted(HERE.glob("*.toml"))
    return [file for file in files if "[[run]]" in file.read_text(encoding="utf-8")]


def main(script: str) -> None:
    """Print the paper whose models a script has."""
    show(Path(script).with_suffix(".toml"), Console(), *sys.argv[1:2])


if __name__ == "__main__":
    show_headlines(papers(), Console())
