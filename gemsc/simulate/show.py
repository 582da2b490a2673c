"""What was simulated, as tables for the terminal and as a picture of scaling."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console

from gemsc.base.units import show_seconds
from gemsc.costs.sharing import SharedDevice
from gemsc.simulate.scaling import Point
from gemsc.simulate.simulation import powers_of_two
from gemsc.viz.design import drawing, legend, line, n, path, rect, text
from gemsc.viz.listings import column, fitted

WIDTH, HEIGHT = 940, 420
PLOT_WIDTH, PLOT_HEIGHT = 350, 260
LEFT, SECOND, TOP = 76, 540, 86
PARTS = (
    ("busy_seconds", "computes", "fill-backward0"),
    ("idle_seconds", "waits in the pipeline", "hatch-wait"),
    ("sum_seconds", "sums gradients", "hatch-reduction"),
    ("update_seconds", "updates", "hatch-update"),
)
STYLE = """
.ideal { stroke-dasharray: 5 4; fill: none }
.curve { stroke-width: 2; fill: none }
.part { stroke: $sheet; stroke-width: 0.6 }
"""
ASSUMPTIONS = (
    "every process has a CPU core of its own; kernels of several processes overlap "
    "without loss, as MPS lets them",
    "a kernel of f operations takes as long as f + half_flops would on a full device",
    "a step takes the longer of launching its kernels and running them",
    "neither the update nor reading the data is counted; with sums by the host, each "
    "process copies its gradients there and the sum back, once a step, one after the "
    "other",
)


def draw_curve(heading: str, points: Sequence[Point]) -> str:
    """Return the SVG text of one or more simulated points, fewest ranks first."""
    parts = [
        text(24, 32, heading, "title"),
        *_throughput(points),
        *_shares(points),
    ]
    return drawing("curve", WIDTH, HEIGHT, heading, STYLE, parts)


def _throughput(points: Sequence[Point]) -> list[str]:
    """Draw samples per second over ranks, both axes logarithmic."""
    base = points[0]
    per_rank = base.throughput / base.ranks
    tops = [max(point.throughput, per_rank * point.ranks) for point in points]
    low, high = math.log2(base.ranks), math.log2(points[-1].ranks)
    bottom, top = _decades(min(p.throughput for p in points), max(tops))

    def place(ranks: float, rate: float) -> tuple[float, float]:
        across = (math.log2(ranks) - low) / (high - low) if high > low else 0.5
        up = (math.log10(rate) - bottom) / (top - bottom)
        return LEFT + PLOT_WIDTH * across, TOP + PLOT_HEIGHT * (1 - up)

    share = f"{points[-1].efficiency(base):.1%}"
    title = f"samples per second over ranks, at the end {share} of ideal"
    parts = [text(LEFT, TOP - 18, title, "name")]
    for power in range(bottom, top + 1):
        _, y = place(base.ranks, 10.0**power)
        parts.append(line("grid", LEFT, y, LEFT + PLOT_WIDTH, y))
        parts.append(text(LEFT - 8, y + 4, f"{10.0**power:,g}", "note end"))
    for point in _spread(points):
        x, _ = place(point.ranks, 10.0**bottom)
        label = f"{point.ranks:,}"
        parts.append(text(x, TOP + PLOT_HEIGHT + 18, label, "note middle"))
    ideal = [place(p.ranks, per_rank * p.ranks) for p in (base, points[-1])]
    parts.append(path("ideal stroke-soft", _points(ideal)))
    real = [place(p.ranks, p.throughput) for p in points]
    parts.append(path("curve stroke-series0", _points(real)))
    for point, (x, y) in zip(points, real, strict=True):
        efficiency = point.efficiency(base)
        parts.append(
            f'<circle class="fill-series0" cx="{n(x)}" cy="{n(y)}" r="3.5"><title>'
            f"{point.ranks:,} ranks: {point.throughput:,.1f} samples/s, efficiency "
            f"{efficiency:.2%}</title></circle>"
        )
    return parts


def _shares(points: Sequence[Point]) -> list[str]:
    """Draw what each step consists of, for the rank that is done last."""
    longest = max(point.step_seconds for point in points)
    parts = [text(SECOND, TOP - 18, "one step of the slowest rank", "name")]
    for share in (0.0, 0.5, 1.0):
        y = TOP + PLOT_HEIGHT * (1 - share)
        parts.append(line("grid", SECOND, y, SECOND + PLOT_WIDTH, y))
        label = show_seconds(share * longest)
        parts.append(text(SECOND - 8, y + 4, label, "note end"))
    pitch = PLOT_WIDTH / len(points)
    labelled = _spread(points)
    for index, point in enumerate(points):
        x, y = SECOND + (index + 0.12) * pitch, float(TOP + PLOT_HEIGHT)
        for name, words, fill in PARTS:
            seconds = getattr(point, name)
            height = PLOT_HEIGHT * seconds / longest
            y -= height
            title = f"{point.ranks:,} ranks: {words} {show_seconds(seconds)}"
            parts.append(rect(f"part {fill}", x, y, 0.76 * pitch, height, title))
        if point in labelled:
            middle = x + 0.38 * pitch
            label = f"{point.ranks:,}"
            parts.append(text(middle, TOP + PLOT_HEIGHT + 18, label, "note middle"))
    entries = [(fill, words) for _, words, fill in PARTS]
    bottom = TOP + PLOT_HEIGHT + 44
    return parts + legend(entries, SECOND, bottom, SECOND + PLOT_WIDTH)[0]


def _decades(low: float, high: float) -> tuple[int, int]:
    """Return the powers of ten around two rates."""
    bottom, top = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return bottom, max(top, bottom + 1)


def _spread(points: Sequence[Point]) -> list[Point]:
    """Return at most seven points, with the first and the last, to be labelled."""
    step = -(-len(points) // 7)
    return [p for i, p in enumerate(reversed(points)) if i % step == 0][::-1]


def _points(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{n(x)},{n(y)}" for x, y in places)


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


def show_sharing(
    device: SharedDevice, samples: int, most: int, console: Console
) -> None:
    """Print 1, 2, 4, ... up to `most` processes with a batch of so many samples."""
    counts = powers_of_two(most)
    rates = (count * samples / device.seconds(count) for count in counts)
    with_sums = (device.gain(count, sums=True) for count in counts)
    larger, more = map(device.gain_of_batch, counts), "{:+z.0%}".format
    columns = (
        column("processes", counts),
        column("step", map(device.seconds, counts), show_seconds),
        column("samples/s", rates, "{:,.1f}".format),
        column("device used", map(device.utilisation, counts), "{:.0%}".format),
        column("gain", map(device.gain, counts), more),
        column("with sums by the host", with_sums, more),
        column("one process, larger batch", larger, more),
    )
    title = f"processes that share a device, a step of {samples} samples each"
    console.print(fitted(title, columns, console.width))
    for assumption in ASSUMPTIONS:
        console.print(f"- {assumption}", highlight=False)
