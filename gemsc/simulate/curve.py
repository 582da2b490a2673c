"""A scaling curve as a picture: throughput beside the ideal, and where a step goes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gemsc.base.units import show_seconds
from gemsc.simulate.scaling import Point
from gemsc.viz.svg import drawing, legend, line, n, rect, text

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
    parts.append(f'<path class="ideal stroke-soft" d="{_path(ideal)}"/>')
    real = [place(p.ranks, p.throughput) for p in points]
    parts.append(f'<path class="curve stroke-series0" d="{_path(real)}"/>')
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


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{n(x)},{n(y)}" for x, y in places)
