"""How the ranks spent a measured step, beside what was predicted, as a table."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from gemsc.base.cores import num_cores
from gemsc.base.units import show_seconds
from gemsc.viz.panel import Panel

__all__ = ["show_shares"]


def show_shares(predicted: Panel, measured: Panel, console: Console) -> None:
    """Print step times, and what share of the step each rank computed and waited."""
    ratio = measured.makespan / predicted.makespan if predicted.makespan else 0.0
    console.print(
        f"step: predicted {show_seconds(predicted.makespan)}, measured "
        f"{show_seconds(measured.makespan)} ({ratio:.2f} times as long)",
        highlight=False,
    )
    num_ranks, cores = len(measured.rows), num_cores()
    if num_ranks > cores:
        console.print(
            f"note: {num_ranks} ranks share {cores} cores; the prediction gives each "
            "rank one of its own",
            highlight=False,
        )
    table = Table("rank")
    for column in (
        "predicted busy",
        "busy",
        "all-reduce, update",
        "send",
        "wait",
        "idle",
    ):
        table.add_column(column, justify="right")
    for rank, row in enumerate(measured.rows):
        planned = predicted.rows[rank % len(predicted.rows)]
        kinds = (("reduction", "update"), ("send",), ("wait",))
        parts = [row.busy, *(row.seconds(*kind) for kind in kinds)]
        shares = [part / measured.makespan for part in parts]
        shares = [planned.busy / predicted.makespan, *shares, 1 - sum(shares)]
        table.add_row(row.name.partition(" ")[2], *(f"{share:.0%}" for share in shares))
    console.print(table)
