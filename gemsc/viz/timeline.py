"""The schedule as a picture: ranks down, time across, memory under each rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from colorsys import hls_to_rgb
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

from gemsc.base.files import write_text
from gemsc.base.units import show_bytes, show_micro_batches, show_seconds
from gemsc.plan import Plan
from gemsc.planner.from_plan import task_of, timeline_of
from gemsc.viz.panel import (
    Arrow,
    Mark,
    Panel,
    Row,
    Span,
    measured_panel,
    predicted_panel,
)
from gemsc.viz.timeline_style import HEAD, STYLE

__all__ = ["draw", "draw_inside", "grid", "panels_of", "write_timeline"]

MOST_ARROWS = 400
MOST_COLUMNS = 240  # of the text grid
HUES = (0.575, 0.075, 0.33, 0.86)  # replica 0 is blue, its mirror orange
# lightness of the first and the last stage of a rank, and saturation
SHADES = {
    "forward": (0.80, 0.67, 0.62),
    "backward": (0.50, 0.34, 0.50),
    "weight": (0.74, 0.60, 0.40),
}
OTHERS = {
    "wait": "#f6d5d0",
    "send": "#b9bfc7",
    "reduction": "#b7a1d9",
    "update": "#8fc79f",
}
LEFT, RIGHT, TOP, GAP, AXIS, LINE = 96, 110, 58, 30, 22, 20
NARROWEST, WIDEST = 880, 2400  # of the part where time runs


def write_timeline(
    plan: Plan, path: Path, marks: Sequence[Sequence[Mark]] = ()
) -> None:
    """Draw a plan's step, below it a measured one if there are marks of each rank."""
    panels = panels_of(plan, marks)
    copies = f" in each of {plan.data} data-parallel replicas" if plan.data > 1 else ""
    heading = (
        f"{plan.model}: {plan.schedule}, {plan.copy_ranks} ranks and "
        f"{show_micro_batches(plan.micro_batches)}{copies}"
    )
    write_text(path, draw(heading, panels))


def panels_of(plan: Plan, marks: Sequence[Sequence[Mark]] = ()) -> tuple[Panel, ...]:
    """Return the predicted step, and the measured one if there are marks.

    The tiles of a grid run in lockstep: its row is what the first one does.
    """
    task = task_of(plan)
    copies = [
        [[rank + copy * plan.copy_ranks for rank in ranks] for ranks in plan.members]
        for copy in range(plan.data)
    ]
    predicted = predicted_panel(task, timeline_of(plan), list(map(_name, copies[0])))
    if not marks:
        return (predicted,)
    groups = [ranks for copy in copies for ranks in copy]
    rows = [marks[ranks[0]] for ranks in groups]
    return predicted, measured_panel(task, rows, list(map(_name, groups)))


def _name(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {ranks[0]}-{ranks[-1]}"


def grid(plan: Plan) -> str:
    """Return the predicted step as text, see `Timeline.grid`."""
    timeline = timeline_of(plan)
    shortest = min(timed.end - timed.start for row in timeline.ranks for timed in row)
    return timeline.grid(max(shortest, timeline.makespan / MOST_COLUMNS) or None)


def draw(heading: str, panels: Sequence[Panel]) -> str:
    """Return the SVG text of panels, each with a time axis of its own."""
    return _Picture(heading, tuple(panels)).text()


def draw_inside(heading: str, panels: Sequence[Panel]) -> str:
    """Return it as a part of a page, whose style sheet may change the colours."""
    return _Picture(heading, tuple(panels)).inside()


@dataclass(frozen=True, slots=True)
class _Size:
    """Heights in pixels: of boxes, of the memory under them, of the space between."""

    box: int
    memory: int
    space: int

    @classmethod
    def of(cls, num_rows: int) -> _Size:
        if num_rows <= 12:
            return cls(26, 16, 12)
        return cls(19, 11, 7) if num_rows <= 32 else cls(13, 7, 4)

    def row(self, panel: Panel) -> int:
        """Return the height of a row with the space below it."""
        return self.box + self.space + (self.memory if _has_memory(panel) else 0)


@dataclass
class _Picture:
    heading: str
    panels: tuple[Panel, ...]
    parts: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)  # over everything else
    fills: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.seconds = 1.0
        self.size = _Size.of(max((len(panel.rows) for panel in self.panels), default=0))
        self.width = max(map(_width, self.panels), default=NARROWEST)

    def x(self, seconds: float) -> float:
        """Return where a time of the panel that is being drawn is."""
        return LEFT + self.width * seconds / self.seconds

    def add(self, part: str) -> None:
        self.parts.append(part)

    def text(self) -> str:
        """Return the whole file."""
        self.add(_text(16, 28, self.heading, "title"))
        width, height = self._draw(TOP)
        return "\n".join(
            [
                '<?xml version="1.0" encoding="UTF-8"?>',
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" '
                f'height="{height}" viewBox="0 0 {width} {height}">',
                f"<title>{escape(self.heading)}</title>",
                f"<style>{self._rules()}</style>",
                HEAD.format(id="head"),
                '<rect width="100%" height="100%" fill="#ffffff"/>',
                *self.parts,
                "</svg>\n",
            ]
        )

    def inside(self) -> str:
        """Return an element whose rules and names touch nothing else of a page."""
        width, height = self._draw(TOP - 30)
        rules = self._rules().strip().splitlines()
        return "\n".join(
            [
                f'<svg class="timeline" role="img" width="{width}" height="{height}" '
                f'viewBox="0 0 {width} {height}">',
                f"<title>{escape(self.heading)}</title>",
                "<style>" + "\n".join(f"svg.timeline {rule}" for rule in rules),
                f"</style>{HEAD.format(id='timeline-head')}",
                *(part.replace("#head", "#timeline-head") for part in self.parts),
                "</svg>",
            ]
        )

    def _draw(self, y: int) -> tuple[int, int]:
        """Draw everything from `y` on; return width and height."""
        for panel in self.panels:
            y = self._panel(panel, y) + GAP
        return LEFT + self.width + RIGHT, self._legend(y)

    def _rules(self) -> str:
        fills = (
            f".{name} {{ fill: {colour} }}\n" for name, colour in self.fills.items()
        )
        return STYLE + "".join(fills)

    def _panel(self, panel: Panel, top: int) -> int:
        """Draw one step; return where it ends."""
        self.seconds = panel.makespan or 1.0
        facts = f"{show_seconds(panel.makespan)} a step, bubble {panel.bubble:.0%}"
        other = self.panels[0]
        if panel is not other and other.makespan:
            factor = panel.makespan / other.makespan
            facts += f", {factor:.2g} times the {other.name} step"
            facts += " (each half has its own time axis)"
        shown = len(panel.arrows) <= MOST_ARROWS
        if not shown:
            facts += f"; {len(panel.arrows)} messages are not drawn"
        self.add(_text(16, top, f"{panel.name}: {facts}", "name"))
        first = top + 14
        step = self.size.row(panel)
        end = first + step * len(panel.rows)
        self._axis(first, end)
        most = max((row.peak_bytes for row in panel.rows), default=0)
        for rank, row in enumerate(panel.rows):
            self._row(panel, rank, row, first + rank * step, most)
        if shown:
            for arrow in panel.arrows:
                self._arrow(arrow, first, step)
        self.parts += self.labels
        self.labels.clear()
        return end + AXIS

    def _axis(self, top: int, end: int) -> None:
        """Draw lines at round numbers of milliseconds."""
        step = _round_step(self.seconds * 1e3 / (self.width / 90))
        for index in range(int(self.seconds * 1e3 / step * (1 + 1e-9)) + 1):
            x = _n(self.x(index * step / 1e3))
            self.add(f'<path class="line" d="M{x},{top - 4}V{end}"/>')
            label = f"{index * step:g}" + (" ms" if index == 0 else "")
            self.add(_text(x, end + 12, label, "tick"))

    def _row(self, panel: Panel, rank: int, row: Row, y: int, most: int) -> None:
        size = self.size
        width = _n(self.x(panel.makespan) - LEFT)
        self.add(f'<g class="row" data-rank="{panel.number(rank)}">')
        self.add(
            f'<rect class="idle" x="{LEFT}" y="{y}" width="{width}" '
            f'height="{size.box}"/>'
        )
        for span in row.spans:
            self._span(row, span, y)
        middle = y + size.box / 2
        self.add(_text(LEFT - 8, middle + 4, row.name, "rank"))
        idle = 1 - row.busy / panel.makespan if panel.makespan else 0
        right = _n(self.x(panel.makespan) + 8)
        self.add(_text(right, middle + 4, f"{idle:.0%} idle", "note"))
        if _has_memory(panel):
            self._memory(panel, row, y + size.box, most)
        self.add("</g>")

    def _span(self, row: Row, span: Span, y: int) -> None:
        """Draw a box; what is too narrow to be seen is left out unless an action."""
        width = self.width * span.seconds / self.seconds
        if span.action is None and width < 0.4:
            return
        name, colour = _fill(row, span)
        self.fills[name] = colour
        x, height = self.x(span.start), self.size.box
        thin = ' stroke-width="0"' if width < 3 else ""
        kind = "box action" if span.action is not None else "box"
        what = f"{span.action} " if span.action is not None else ""
        self.add(
            f'<rect class="{kind} {name}" x="{_n(x)}" y="{y}" '
            f'width="{_n(max(width, 0.5))}" height="{height}"{thin}><title>{what}'
            f"{span.kind} {_ms(span.start)} to {_ms(span.end)} ms</title></rect>"
        )
        if span.action is None:
            return
        label = str(span.action.micro_batch)
        font = min(11, height - 4)
        if width >= 0.58 * font * len(label) + 1.5:
            tone = "light" if span.kind == "backward" else "dark"
            middle = _n(x + width / 2), _n(y + height / 2 + 0.36 * font)
            self.labels.append(
                f'<text class="{tone}" x="{middle[0]}" y="{middle[1]}"'
                + (f' style="font-size:{font}px">' if font < 11 else ">")
                + f"{label}</text>"
            )

    def _memory(self, panel: Panel, row: Row, top: int, most: int) -> None:
        """Draw the bytes held over time; all ranks of a panel share the scale."""
        size = self.size.memory
        bottom = top + size

        def y(held: int) -> str:
            return _n(bottom - (size - 2) * held / (most or 1))

        path = f"M{LEFT},{bottom}"
        for seconds, held in row.memory:
            path += f"H{_n(self.x(seconds))}V{y(held)}"
        end = _n(self.x(panel.makespan))
        self.add(
            f'<path class="memory" data-peak="{row.peak_bytes}" '
            f'd="{path}H{end}V{bottom}Z"><title>at most {row.peak_bytes:,} bytes, '
            f"{row.resident_bytes:,} of them all the time</title></path>"
        )
        base = float(y(row.resident_bytes))
        self.add(
            f'<path class="resident" d="M{LEFT},{bottom}V{_n(base)}H{end}V{bottom}Z"/>'
        )
        below = bottom - (1 if size > 10 else 0)
        lanes = ", ".join(f"{stage}{chr(39) * r}" for r, stage in row.lanes)
        if len(lanes) < 16:
            word = "stage" if len(row.lanes) == 1 else "stages"
            self.add(_text(LEFT - 8, below, f"{word} {lanes}", "lanes"))
        right = _n(self.x(panel.makespan) + 8)
        self.add(_text(right, below, f"peak {show_bytes(row.peak_bytes)}", "note"))

    def _arrow(self, arrow: Arrow, first: int, step: int) -> None:
        """Draw a message from the lower or upper edge of a box to that of another."""
        down = arrow.dest > arrow.source
        tail, head = (self.size.box, 0) if down else (0, self.size.box)
        start = f"{_n(self.x(arrow.start))},{first + arrow.source * step + tail}"
        end = f"{_n(self.x(arrow.end))},{first + arrow.dest * step + head}"
        kind = "arrow skip" if arrow.skip else "arrow"
        self.add(f'<path class="{kind}" d="M{start}L{end}" marker-end="url(#head)"/>')

    def _legend(self, y: int) -> int:
        """Draw what the colours mean; return where the picture ends."""
        x = float(LEFT)
        for name, colour, words in self._entries():
            if x + 23 + 5.2 * len(words) > LEFT + self.width + RIGHT:
                x, y = float(LEFT), y + LINE
            if name == "skip":
                self.add(f'<path class="arrow skip" d="M{_n(x)},{y - 4}h18"/>')
            else:
                self.fills[name] = colour
                box = f'x="{_n(x)}" y="{y - 9}" width="18" height="11"'
                self.add(f'<rect class="{name}" {box}/>')
            self.add(_text(_n(x + 23), y, words, "note"))
            x += 42 + 5.2 * len(words)
        return y + LINE

    def _entries(self) -> Iterator[tuple[str, str, str]]:
        rows = [row for panel in self.panels for row in panel.rows]
        spans = [span for row in rows for span in row.spans]
        replicas = sorted({s.action.replica for s in spans if s.action is not None})
        for replica in replicas:
            for kind in SHADES:
                if any(
                    s.kind == kind and s.action and s.action.replica == replica
                    for s in spans
                ):
                    mark = f" of replica {replica}" if len(replicas) > 1 else ""
                    colour = _colour(kind, replica, 0.0)
                    yield f"{kind}-{replica}-0", colour, kind + mark
        for kind, colour in OTHERS.items():
            if any(span.kind == kind for span in spans):
                yield kind, colour, kind
        yield "idle", "#eef0f3", "idle"
        if any(row.memory for row in rows):
            yield "memory", "#a9cdb4", "saved for backward"
            yield "resident", "#dfe4ea", "weights, gradients"
        if any(arrow.skip for panel in self.panels for arrow in panel.arrows):
            yield "skip", "", "skip over a stage"


def _width(panel: Panel) -> int:
    """Return pixels for time: enough for a number in the usual forward."""
    lengths = sorted(
        span.seconds
        for row in panel.rows
        for span in row.spans
        if span.kind == "forward" and span.seconds > 0
    )
    if not lengths:
        return NARROWEST
    wanted = 20 * panel.makespan / lengths[len(lengths) // 2]
    return round(min(max(wanted, NARROWEST), WIDEST))


def _has_memory(panel: Panel) -> bool:
    return any(row.memory for row in panel.rows)


def _fill(row: Row, span: Span) -> tuple[str, str]:
    """Return the class and colour of a box: hue by replica, shade by stage."""
    if span.action is None:
        return span.kind, OTHERS.get(span.kind, "#dddddd")
    replica = span.action.replica
    stages = [stage for r, stage in row.lanes if r == replica]
    chunk = stages.index(span.action.stage) if span.action.stage in stages else 0
    share = chunk / (len(stages) - 1) if len(stages) > 1 else 0.0
    name = f"{span.kind}-{replica}-{round(100 * share)}"
    return name, _colour(span.kind, replica, share)


def _colour(kind: str, replica: int, share: float) -> str:
    first, last, saturation = SHADES[kind]
    lightness = first + (last - first) * share
    hue = HUES[replica % len(HUES)] - (0.11 if kind == "weight" else 0.0)
    rgb = hls_to_rgb(hue % 1.0, lightness, saturation)
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20, ... that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    steps = (factor * power for factor in (1, 2, 5))
    return float(next((step for step in steps if step >= least), 10 * power))


def _text(x: float | str, y: float, words: str, kind: str) -> str:
    where = x if isinstance(x, str) else _n(x)
    return f'<text class="{kind}" x="{where}" y="{_n(y)}">{escape(words)}</text>'


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g}"


def _n(number: float) -> str:
    """Return a short coordinate."""
    return f"{number:.2f}".rstrip("0").rstrip(".")
