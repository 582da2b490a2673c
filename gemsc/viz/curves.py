"""Curves of runs over their steps: the loss, and below it what evaluations found."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from gemsc.viz.run_log import Curve, RunLog
from gemsc.viz.svg import LINES, drawing, n, text

__all__ = ["curves"]

WIDTH, LEFT, RIGHT = 860, 78, 24
PLOT = WIDTH - LEFT - RIGHT
HEIGHT, GAP, TOP = 210, 72, 46
MOST_POINTS = PLOT // 2  # of a curve; of what falls together, the mean is drawn
LOG_FROM = 20.0  # largest over smallest value, for a logarithmic axis
MOST_MARKS = 10  # of an axis
ROW = 18  # of the legend
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #333; }
text.head { font-size: 14px; font-weight: 600; }
text.y { text-anchor: end; }
text.x { text-anchor: middle; }
line.grid { stroke: #e4e4e4; }
line.axis { stroke: #888; }
path { fill: none; stroke-linejoin: round; }
path.train { stroke-width: 1.2; opacity: 0.65; }
path.eval { stroke-width: 2.2; }
path.band { stroke: none; opacity: 0.15; }
"""


def curves(runs: Sequence[RunLog]) -> str:
    """Return a drawing of the curves of runs, each run in its colour."""
    names = list(dict.fromkeys(name for run in runs for name in run.figures))
    panels = ["loss", *(name for name in names if name != "loss")]
    steps = max([run.steps for run in runs] or [1]) or 1
    legend = list(_legend(runs))
    top = TOP + ROW * len(runs)
    parts = [text(LEFT, 24, "loss and held-out figures by step", "head"), *legend]
    for index, name in enumerate(panels):
        parts += _panel(name, runs, steps, top + index * (HEIGHT + GAP) + 20)
    height = top + len(panels) * (HEIGHT + GAP) + 6
    title = "curves of " + ", ".join(run.name for run in runs)
    return drawing("curves", WIDTH, height, title, STYLE, parts)


def _colour(index: int) -> str:
    return LINES[index % len(LINES)]


def _legend(runs: Sequence[RunLog]) -> Iterator[str]:
    for index, run in enumerate(runs):
        y = 44 + ROW * index
        path = f'd="M{LEFT} {y - 4}h26" stroke="{_colour(index)}"'
        yield f'<path class="train" {path}/>'
        has_eval = "loss" in run.figures
        if has_eval:
            path = path.replace(f"M{LEFT}", f"M{LEFT + 34}")
            yield f'<path class="eval" {path}/>'
        name = run.name if len(run.name) <= 60 else f"{run.name[:59]}…"
        kinds = "training and held-out" if has_eval else "training"
        yield text(LEFT + 70, y, f"{name}: {kinds}", "key")


def _panel(name: str, runs: Sequence[RunLog], steps: int, top: float) -> Iterator[str]:
    drawn: list[tuple[int, str, Curve]] = []
    for index, run in enumerate(runs):
        if name == "loss":
            drawn.append((index, "train", run.loss))
        drawn.append((index, "eval", run.figures.get(name, [])))
    values = [value for _, _, curve in drawn for _, value in curve]
    label = name if name == "loss" else f"held-out {name}"
    yield text(LEFT, top - 8, label, "head")
    if not values:
        yield text(LEFT + 8, top + 24, "nothing was logged yet", "key")
        return
    low, high, height_of, marks = _axis(min(values), max(values))

    def x_of(step: float) -> float:
        return LEFT + PLOT * step / steps

    def y_of(value: float) -> float:
        share = (height_of(value) - height_of(low)) / (height_of(high) - height_of(low))
        return top + HEIGHT * (1 - min(max(share, 0.0), 1.0))

    for mark in marks:
        y = n(y_of(mark))
        yield _line("grid", LEFT, y, LEFT + PLOT, y)
        yield text(LEFT - 8, y_of(mark) + 4, f"{mark:.4g}", "y")
    for step in _round_numbers(0, steps, 8):
        if step == int(step):
            yield _line(
                "axis", n(x_of(step)), top + HEIGHT, n(x_of(step)), top + HEIGHT + 5
            )
            yield text(x_of(step), top + HEIGHT + 19, f"{step:,.0f}", "x")
    yield text(LEFT + PLOT / 2, top + HEIGHT + 35, "step", "x")
    yield _line("axis", LEFT, top + HEIGHT, LEFT + PLOT, top + HEIGHT)
    yield _line("axis", LEFT, top, LEFT, top + HEIGHT)
    for index, kind, curve in drawn:
        yield from _curve(curve, kind, _colour(index), x_of, y_of)


def _curve(
    curve: Curve,
    kind: str,
    colour: str,
    x_of: Callable[[float], float],
    y_of: Callable[[float], float],
) -> Iterator[str]:
    if not curve:
        return
    size = -(-len(curve) // MOST_POINTS)
    groups = [curve[at : at + size] for at in range(0, len(curve), size)]
    columns = [tuple(zip(*group, strict=True)) for group in groups]
    means = [(sum(x) / len(x), sum(y) / len(y)) for x, y in columns]
    if size > 1:  # how far apart the values are that fall together
        highs = [(sum(x) / len(x), max(y)) for x, y in columns]
        lows = [(sum(x) / len(x), min(y)) for x, y in columns]
        path = _path([*highs, *reversed(lows)], x_of, y_of)
        yield f'<path class="band" style="fill:{colour}" d="{path}Z"/>'
    yield f'<path class="{kind}" stroke="{colour}" d="{_path(means, x_of, y_of)}"/>'
    if kind == "eval" or len(means) == 1:
        for x, y in means:
            if len(means) <= 60:
                dot = f'cx="{n(x_of(x))}" cy="{n(y_of(y))}" r="3" fill="{colour}"'
                yield f"<circle {dot}><title>step {x:.0f}: {y:.5g}</title></circle>"


def _path(
    points: Sequence[Sequence[float]],
    x_of: Callable[[float], float],
    y_of: Callable[[float], float],
) -> str:
    return "M" + "L".join(f"{n(x_of(x))} {n(y_of(y))}" for x, y in points)


def _line(kind: str, x1: object, y1: object, x2: object, y2: object) -> str:
    return f'<line class="{kind}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>'


def _axis(
    low: float, high: float
) -> tuple[float, float, Callable[[float], float], list[float]]:
    """Return the ends of an axis, the height of a value on it, and its marks."""
    if low > 0 and high / low > LOG_FROM:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        found = [k * 10.0**e for e in range(first, last + 1) for k in (1, 2, 5)]
        low = max(k for k in found if k <= low)
        high = min(k for k in found if k >= high)
        marks = [mark for mark in found if low <= mark <= high]
        if len(marks) > MOST_MARKS:  # powers of ten alone
            marks = found[:: 3 * -(-(last - first + 1) // MOST_MARKS)]
        return low, high, math.log10, [mark for mark in marks if low <= mark <= high]
    if low == high:
        spread = abs(low) / 2 or 1.0
        low, high = low - spread, high + spread
    marks = _round_numbers(low, high, 5)
    step = marks[1] - marks[0] if len(marks) > 1 else high - low
    low, high = (
        math.floor(low / step + 1e-9) * step,
        math.ceil(high / step - 1e-9) * step,
    )
    return low, high, float, _round_numbers(low, high, 5)


def _round_numbers(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers from `low` to `high`."""
    rough = (high - low) / count or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(k * power for k in (1, 2, 5, 10) if k * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]
