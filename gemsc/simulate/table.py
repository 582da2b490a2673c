"""`gemsc simulate`: the points of a scaling curve as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from gemsc.base.units import show_seconds
from gemsc.simulate.scaling import Point
from gemsc.viz.columns import column, fitted


def show_points(points: Sequence[Point], console: Console) -> None:
    """Print throughput, efficiency and what a step consists of, for each point."""
    base = points[0]

    def share(name: str) -> list[str]:
        return [f"{getattr(p, name) / p.step_seconds:.1%}" for p in points]

    columns = (
        column("ranks", (f"{p.ranks:,}" for p in points)),
        column("replicas", (f"{p.copies:,}" for p in points), drop=7),
        column("nodes", (f"{p.nodes:,}" for p in points), drop=8),
        column("batch", (f"{p.samples:,}" for p in points), drop=6),
        column("step", (show_seconds(p.step_seconds) for p in points)),
        column("samples/s", (f"{p.throughput:,.1f}" for p in points)),
        column("efficiency", (f"{p.efficiency(base):.2%}" for p in points)),
        column("computes", share("busy_seconds"), drop=3),
        column("waits", share("idle_seconds"), drop=2),
        column("sums", share("sum_seconds"), drop=1),
        column("updates", share("update_seconds"), drop=5),
        column("sum by", (", ".join(p.algorithms) for p in points), drop=9, left=True),
    )
    console.print(fitted("one step, as simulated", columns, console.width))
