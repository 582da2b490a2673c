"""Simulate set-ups of the literature; print what was published beside it.

python examples/simulate/compare.py examples/simulate/*.toml

Each file names a model, a machine, its runs and every assumption. Files without runs
are machines and are passed over.
"""

import os
import sys
import tomllib
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gemsc.base.units import show_bytes, show_seconds
from gemsc.costs.hardware import read_hardware
from gemsc.options import CompileOptions
from gemsc.passes.share_device import share
from gemsc.simulate.sharing import ASSUMPTIONS
from gemsc.simulate.simulation import Simulation, simulate, trace_unfilled
from gemsc.user_model import load_user_model

KNOWN = ("schedule", "micro_batches", "times", "branches", "trunk")


def simulate_runs(path: Path) -> tuple[dict[str, Any], list[Simulation]]:
    """Return a scenario and its simulated runs."""
    scenario = tomllib.loads(path.read_text(encoding="utf-8"))
    hardware = str(path.parent / scenario["hardware"])
    traced, environment, found = None, None, []
    for run in scenario["run"]:
        if traced is None or run.get("environment") != environment:
            environment = run.get("environment")
            os.environ.update(environment or {})
            user = load_user_model(str(path.parent / scenario["model"]))
            traced = trace_unfilled(user, read_hardware(hardware))
        options = CompileOptions(
            ranks=run["ranks"] // run["data"],
            data=run["data"],
            hardware=hardware,
            **{name: run[name] for name in KNOWN if name in run},
        )
        found.append(simulate(traced, options))
    return scenario, found


def compare_sharing(path: Path, console: Console) -> None:
    """Print a scenario of processes that share a device, for several batches."""
    scenario = tomllib.loads(path.read_text(encoding="utf-8"))
    table = Table(title=scenario["title"], title_justify="left")
    for title in ("samples", "device used", "published", "simulated", "with sums"):
        table.add_column(title, justify="right")
    table.add_column("one process, larger batch", justify="right")
    machine = read_hardware(shipped_or_beside(path, scenario["hardware"]))
    for run in scenario["run"]:
        os.environ.update(run["environment"])
        user = load_user_model(str(path.parent / scenario["model"]))
        found = share(trace_unfilled(user, machine).program, machine.device)
        count = run["per_device"]
        gains = found.gain(count), found.gain(count, sums=True)
        table.add_row(
            run["name"],
            f"{found.utilisation():.0%}",
            f"up to +{run['published_gain']:.0%}",
            *(f"{gain:+.0%}" for gain in (*gains, found.gain_of_batch(count))),
        )
    console.print(table)
    console.print(f"published: {scenario['source']}", highlight=False)
    for text in (*scenario["assumptions"], *ASSUMPTIONS, *machine.notes):
        console.print(f"- {text}", highlight=False)


def shipped_or_beside(path: Path, name: str) -> str:
    return str(path.parent / name) if name.endswith(".toml") else name


def compare(path: Path, console: Console) -> None:
    """Print one scenario."""
    scenario, found = simulate_runs(path)
    table = Table(title=scenario["title"], title_justify="left")
    for title in ("run", "published", "simulated", "step", "samples/s", "peak GPU"):
        table.add_column(title, justify="left" if title == "run" else "right")
    first, names = scenario["run"][0], [run["name"] for run in scenario["run"]]
    rates = {n: each.last.throughput for n, each in zip(names, found, strict=True)}
    for run, result in zip(scenario["run"], found, strict=True):
        last = result.last
        if "published_efficiency" in run:
            shown = f"{run['published_efficiency']:.2%}", f"{result.efficiency:.2%}"
        elif "published_hours" in first:
            tiles = first["published_hours"] * found[0].last.throughput
            hours = f"{run['published_hours']} h" if "published_hours" in run else "-"
            shown = hours, f"{tiles / last.throughput:.2f} h"
        else:
            base = rates[run.get("over", run["name"])]
            most = f"{run['published_speedup']}x" if "over" in run else "-"
            shown = most, f"{last.throughput / base:.2f}x"
        highest = max(result.timeline.peak_bytes)
        table.add_row(
            run["name"],
            *shown,
            show_seconds(last.step_seconds),
            f"{last.throughput:,.1f}",
            show_bytes(highest),
        )
    console.print(table)
    console.print(f"published: {scenario['source']}", highlight=False)
    for assumption in scenario["assumptions"]:
        console.print(f"- {assumption}", highlight=False)
    for note in found[0].hardware.notes:
        console.print(f"- {note}", highlight=False)


def main() -> None:
    console = Console()
    for name in sys.argv[1:]:
        text = Path(name).read_text(encoding="utf-8")
        if "[[run]]" in text:
            (compare_sharing if "per_device" in text else compare)(Path(name), console)
            console.print()


if __name__ == "__main__":
    main()
