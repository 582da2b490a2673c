"""Small pictures for report.html: memory over time, and who is busy when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

import numpy as np
import numpy.typing as npt

from gemsc.base.units import show_bytes, show_seconds
from gemsc.viz.columns import sample
from gemsc.viz.panel import Panel, Row

__all__ = ["busy_map", "memory_curves", "memory_quantiles"]

LEFT, RIGHT, WIDTH = 96, 110, 880
ROW, SPACE = 44, 10
BANDS, BINS, LEVELS = 64, 220, 8
QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
TIMES = 240

Array = npt.NDArray[np.float64]


def memory_curves(panel: Panel, cap: int | None = None) -> str:
    """Return the bytes over time of each row, all on one scale; a line for the cap."""
    most = max([row.peak_bytes for row in panel.rows] + ([cap] if cap else [])) or 1
    parts = []
    for index, row in enumerate(panel.rows):
        top = 6 + index * (ROW + SPACE)
        bottom = top + ROW
        base = bottom - ROW * row.resident_bytes / most
        label = f"rank {panel.number(index)}"
        parts += [
            f'<rect class="back" x="{LEFT}" y="{top}" width="{WIDTH}" height="{ROW}"/>',
            f'<path class="held" d="{_steps(row, panel.makespan, bottom, ROW / most)}">'
            f"<title>{label}: at most {show_bytes(row.peak_bytes)}</title></path>",
            f'<path class="base" d="M{LEFT},{bottom}V{_n(base)}h{WIDTH}V{bottom}Z">'
            f"<title>{label}: {show_bytes(row.resident_bytes)} all the time</title>"
            "</path>",
            _text(LEFT - 8, bottom - ROW / 2 + 4, label, "end"),
            _text(
                LEFT + WIDTH + 8, bottom - ROW / 2 + 4, show_bytes(row.peak_bytes), ""
            ),
        ]
        if cap:
            y = bottom - ROW * cap / most
            parts.append(f'<path class="cap" d="M{LEFT},{_n(y)}h{WIDTH}"/>')
    bottom = 6 + len(panel.rows) * (ROW + SPACE)
    parts += _time_axis(bottom + 8, panel.makespan)
    return _svg(parts, bottom + 20, "memory over time of each rank")


def memory_quantiles(panel: Panel) -> str:
    """Return the bytes over time of many ranks: least, quarters, median, most."""
    times = np.linspace(0.0, panel.makespan, TIMES)
    held = np.stack([_held(row, times) for row in panel.rows])
    curves = np.quantile(held, QUANTILES, axis=0)
    most, height, top = float(curves.max()) or 1.0, 220, 10

    def points(curve: Array) -> list[str]:
        return [
            f"{_n(LEFT + WIDTH * i / (TIMES - 1))},{_n(top + height * (1 - y / most))}"
            for i, y in enumerate(curve)
        ]

    def band(low: int, high: int, kind: str) -> str:
        outline = points(curves[low]) + points(curves[high])[::-1]
        return f'<path class="{kind}" d="M{"L".join(outline)}Z"/>'

    parts = [
        band(0, 4, "wide"),
        band(1, 3, "narrow"),
        f'<path class="median" d="M{"L".join(points(curves[2]))}"/>',
    ]
    for share in (0.0, 0.5, 1.0):
        y = top + height * (1 - share)
        parts.append(f'<path class="line" d="M{LEFT},{_n(y)}h{WIDTH}"/>')
        parts.append(_text(LEFT - 8, y + 4, show_bytes(share * most), "end"))
    parts += _time_axis(top + height + 16, panel.makespan)
    return _svg(parts, top + height + 26, "memory over time, quantiles over the ranks")


def busy_map(panel: Panel) -> str:
    """Return a map of all ranks: rows are ranks or groups of them, time runs across.

    The stronger a colour, the larger the share of the time that is used; its hue tells
    whether that is rather forward or backward.
    """
    groups = np.array_split(np.arange(len(panel.rows)), min(BANDS, len(panel.rows)))
    height = max(4, min(16, 520 // len(groups)))
    parts = [
        f'<rect class="back" x="{LEFT}" y="6" width="{WIDTH}" '
        f'height="{height * len(groups)}"/>'
    ]
    labelled = set(sample(len(groups), max(2, height * len(groups) // 16)))
    for index, group in enumerate(groups):
        y = 6 + index * height
        rows = [panel.rows[rank] for rank in group]
        forward, backward = (
            np.mean([_used(row, panel.makespan, kinds) for row in rows], axis=0)
            for kinds in (("forward",), ("backward", "weight"))
        )
        parts += _heat(forward, backward, y, height)
        if index in labelled:
            first, last = panel.number(int(group[0])), panel.number(int(group[-1]))
            label = f"{first} to {last}" if last > first else f"{first}"
            parts.append(_text(LEFT - 8, y + height / 2 + 4, label, "end"))
    bottom = 6 + height * len(groups)
    parts += _time_axis(bottom + 14, panel.makespan)
    return _svg(parts, bottom + 26, "share of the time that ranks are busy")


def _heat(forward: Array, backward: Array, y: int, height: int) -> Iterator[str]:
    """Draw one row; neighbours of one colour are one box."""
    colours = [
        (min(LEVELS, round(LEVELS * float(f + b))), bool(b > f))
        for f, b in zip(forward, backward, strict=True)
    ]
    at = 0
    for (level, back), run in groupby(colours):
        width = len(list(run))
        if level:
            kind = "backward-heat" if back else "forward-heat"
            x = LEFT + WIDTH * at / BINS
            yield (
                f'<rect class="{kind}" x="{_n(x)}" y="{y}" '
                f'width="{_n(WIDTH * width / BINS)}" height="{height}" '
                f'fill-opacity="{_n(level / LEVELS)}"/>'
            )
        at += width


def _used(row: Row, seconds: float, kinds: tuple[str, ...]) -> Array:
    """Return the share of each bin of time that spans of some kinds take."""
    used = np.zeros(BINS + 1)
    for span in row.spans:
        if span.kind not in kinds or not seconds:
            continue
        start, end = (BINS * t / seconds for t in (span.start, span.end))
        first, last = int(start), min(int(end), BINS - 1)
        if first == last:
            used[first] += end - start
            continue
        used[first] += first + 1 - start
        used[first + 1 : last] += 1.0
        used[last] += end - last
    return np.minimum(used[:BINS], 1.0)


def _held(row: Row, times: Array) -> Array:
    """Return the bytes that a rank holds at some times."""
    changes = np.array([t for t, _ in row.memory])
    sizes = np.array([size for _, size in row.memory], dtype=np.float64)
    place = np.searchsorted(changes, times, side="right") - 1
    return sizes[np.maximum(place, 0)]


def _steps(row: Row, seconds: float, bottom: float, scale: float) -> str:
    """Return the outline of what a rank holds."""
    path = f"M{LEFT},{bottom}"
    for time, held in row.memory:
        x = LEFT + WIDTH * time / (seconds or 1.0)
        path += f"H{_n(x)}V{_n(bottom - scale * held)}"
    return f"{path}H{LEFT + WIDTH}V{bottom}Z"


def _time_axis(y: float, seconds: float) -> list[str]:
    return [
        _text(LEFT + WIDTH * share, y, show_seconds(share * seconds), "note middle")
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]


def _svg(parts: Sequence[str], height: float, title: str) -> str:
    width = LEFT + WIDTH + RIGHT
    return (
        f'<svg class="plot" role="img" width="{width}" height="{_n(height)}" '
        f'viewBox="0 0 {width} {_n(height)}"><title>{escape(title)}</title>'
        + "\n".join(parts)
        + "</svg>"
    )


def _text(x: float, y: float, words: str, kind: str) -> str:
    anchor = {"end": "end", "note middle": "middle"}.get(kind, "start")
    return (
        f'<text class="{kind}" x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}">'
        f"{escape(words)}</text>"
    )


def _n(number: float) -> str:
    """Return a short coordinate."""
    return f"{number:.2f}".rstrip("0").rstrip(".")
