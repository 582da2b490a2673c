"""`gemsc verify`: the ranks of a program against one process."""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from rich.table import Table

from gemsc.cli.terminal import Directory, console
from gemsc.errors import GemscError
from gemsc.plan import Plan
from gemsc.verify import ALLOWED, TOLERANCE, Comparison, verify_program
from gemsc.viz.tables import show_activations

__all__ = ["verify_command"]

DTYPES = {"float64": torch.float64, "float32": torch.float32}


def verify_command(
    directory: Directory,
    steps: Annotated[int, typer.Option(help="training steps to compare", min=1)] = 2,
    dtype: Annotated[str, typer.Option(help="float64, float32 or both")] = "both",
) -> None:
    """Compare the ranks with one process: loss, gradients, parameters, buffers."""
    names = list(DTYPES) if dtype == "both" else [dtype]
    if not set(names) <= set(DTYPES):
        raise GemscError(f"unknown dtype '{dtype}'", help="float64, float32 or both")
    table = Table(
        title=f"{directory} against one process, {steps} steps: relative error"
    )
    for column in ("dtype", "loss", "gradients", "parameters", "buffers", "equal bits"):
        table.add_column(column)
    worst_of_all = []
    for name in names:
        found = verify_program(directory, dtype=DTYPES[name], num_steps=steps)
        # both runs round: they may be twice as far apart as one is from the truth
        allowed = max(TOLERANCE[DTYPES[name]], ALLOWED * found.rounding)
        worst_of_all.append((found, allowed, name))
        table.add_row(name, *_row(found))
    console.print(table)
    failed = [(f, t, n) for f, t, n in worst_of_all if not f.worst <= t]
    for found, tolerance, name in worst_of_all:
        verdict = "exact" if found.worst <= tolerance else "NOT EXACT"
        console.print(
            f"{name}: worst {found.worst:.1e}, allowed {tolerance:.0e}: {verdict}",
            highlight=False,
        )
        if found.rounding > TOLERANCE[DTYPES[name]]:
            console.print(
                f"{name}: rounding alone carries one process {found.rounding:.1e} from "
                "itself (in float64, or with weights changed in their last bit)",
                highlight=False,
            )
    if "float32" in names:
        measured = worst_of_all[names.index("float32")][0].activation_bytes
        show_activations(Plan.read(directory / "plan.toml"), measured, console)
    raise typer.Exit(1 if failed else 0)


def _row(found: Comparison) -> list[str]:
    def with_name(pair: tuple[float, str]) -> str:
        error, name = pair
        return f"{error:.1e} {name}" if name else f"{error:.1e}"

    return [
        f"{found.loss:.1e}",
        with_name(found.gradient),
        with_name(found.parameter),
        with_name(found.buffer),
        f"{found.equal} of {found.total}",
    ]
