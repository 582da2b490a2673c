"""The schedule as a picture: ranks down, time across, memory under each rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from colorsys import hls_to_rgb
from dataclasses import dataclass
from pathlib import Path

from gemsc.base.files import write_text
from gemsc.base.units import show_bytes, show_micro_batches, show_seconds
from gemsc.plan import Plan
from gemsc.viz.panel import Arrow, Branches, Mark, Panel, Row, Span, panels_of
from gemsc.viz.svg import LINES, drawing, n, rect, text

__all__ = ["draw_timeline", "write_timeline"]

MOST_ARROWS = 400
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
THINNEST = 0.5  # of what is drawn of branches
SUMS = 0.2  # of a box, for the line of sums
NARROWEST, WIDEST = 880, 2400  # of the part where time runs
STYLE = """
text { font: 11px Helvetica, Arial, sans-serif; fill: #1d2733 }
.title { font-size: 16px; font-weight: bold }
.name { font-size: 12px; font-weight: bold }
.note { font-size: 10px; fill: #66707c }
.rank { font-weight: bold; text-anchor: end }
.lanes { font-size: 9px; fill: #66707c; text-anchor: end }
.tick { font-size: 10px; fill: #66707c; text-anchor: middle }
.idle { fill: #eef0f3 }
.line { stroke: #d5dae0; stroke-width: 0.6 }
.box { stroke: #ffffff }
.thin { stroke-width: 0 }
.branches { stroke: #ffffff; stroke-width: 0.3 }
.sums { stroke: #ffffff; stroke-width: 0.5 }
.dark { text-anchor: middle }
.light { text-anchor: middle; fill: #ffffff }
.resident { fill: #dfe4ea }
.memory { fill: #a9cdb4 }
.arrow { stroke: #3a4653; stroke-width: 0.8; stroke-opacity: 0.5; fill: none }
.skip { stroke: #b3382c; stroke-dasharray: 3 2; stroke-opacity: 0.4 }
"""
HEAD = (
    '<defs><marker id="head" markerWidth="6" markerHeight="6" refX="5" refY="3" '
    'orient="auto" markerUnits="userSpaceOnUse"><path d="M0,0.8 L5,3 L0,5.2" '
    'fill="#3a4653" fill-opacity="0.7"/></marker></defs>'
)


def write_timeline(
    plan: Plan, path: Path, marks: Sequence[Sequence[Mark]] = ()
) -> None:
    """Draw a plan's step, below it a measured one if there are marks of each rank."""
    copies = f" in each of {plan.data} data-parallel replicas" if plan.data > 1 else ""
    heading = (
        f"{plan.model}: {plan.schedule}, {plan.copy_ranks} ranks and "
        f"{show_micro_batches(plan.micro_batches)}{copies}"
    )
    write_text(path, draw_timeline(heading, panels_of(plan, marks)))


def draw_timeline(heading: str, panels: Sequence[Panel], widest: int = WIDEST) -> str:
    """Return the SVG text of panels, each with a time axis of its own."""
    width = max((_width(panel, widest) for panel in panels), default=NARROWEST)
    most_rows = max((len(panel.rows) for panel in panels), default=0)
    height = 26 if most_rows <= 12 else 19 if most_rows <= 32 else 13
    parts, y = [HEAD], TOP if heading else LINE
    if heading:
        parts.append(text(16, 28, heading, "title"))
    for panel in panels:
        drawn = _Drawn(panel, y + 14, width, height)
        parts.append(text(16, y, f"{panel.name}: {_facts(panel, panels[0])}", "name"))
        parts += drawn.parts()
        y = drawn.end + AXIS + GAP
    legend, y = _legend(panels, y, width)
    title = heading or ", ".join(panel.name for panel in panels)
    return drawing("timeline", LEFT + width + RIGHT, y, title, STYLE, parts + legend)


def _facts(panel: Panel, first: Panel) -> str:
    facts = f"{show_seconds(panel.makespan)} a step, bubble {panel.bubble:.0%}"
    if panel is not first and first.makespan:
        factor = panel.makespan / first.makespan
        facts += f", {factor:.2g} times the {first.name} step"
        facts += " (each half has its own time axis)"
    if len(panel.arrows) > MOST_ARROWS:
        facts += f"; {len(panel.arrows)} messages are not drawn"
    return facts


@dataclass(frozen=True)
class _Drawn:
    """One step from `top` on, in boxes of some height."""

    panel: Panel
    top: int
    width: int
    box: int

    @property
    def memory(self) -> int:
        """The height of the memory below a row, if it is known."""
        known = any(row.memory for row in self.panel.rows)
        return round(0.6 * self.box) if known else 0

    @property
    def pitch(self) -> int:
        """The height of a row with the space below it."""
        return self.box + self.memory + self.box // 2 - 1

    @property
    def end(self) -> int:
        """Where the last row ends."""
        return self.top + self.pitch * len(self.panel.rows)

    def x(self, seconds: float) -> float:
        return LEFT + self.width * seconds / (self.panel.length or 1.0)

    def parts(self) -> Iterator[str]:
        yield from self._axis()
        for index, row in enumerate(self.panel.rows):
            yield f'<g class="row" data-rank="{self.panel.number(index)}">'
            yield from self._row(row, self.top + index * self.pitch)
            yield "</g>"
        if len(self.panel.arrows) <= MOST_ARROWS:
            yield from map(self._arrow, self.panel.arrows)
        for index, row in enumerate(self.panel.rows):  # over everything else
            for span in row.spans:
                yield from self._label(span, self.top + index * self.pitch)

    def _axis(self) -> Iterator[str]:
        """Draw lines at round numbers of milliseconds."""
        total = 1e3 * (self.panel.length or 1.0)
        step = _round_step(total / (self.width / 90))
        for index in range(int(total / step * (1 + 1e-9)) + 1):
            x = self.x(index * step / 1e3)
            yield f'<path class="line" d="M{n(x)},{self.top - 4}V{self.end}"/>'
            label = f"{index * step:g}" + (" ms" if index == 0 else "")
            yield text(x, self.end + 12, label, "tick")

    def _row(self, row: Row, y: int) -> Iterator[str]:
        makespan, right = self.panel.makespan, self.x(self.panel.length)
        yield rect("idle", LEFT, y, right - LEFT, self.box)
        for span in row.spans:
            yield from self._span(row, span, y)
        yield from self._sums(row, y)
        middle = y + self.box / 2 + 4
        idle = 1 - row.busy / makespan if makespan else 0
        yield text(LEFT - 8, middle, row.name, "rank")
        yield text(right + 8, middle, f"{idle:.0%} idle", "note")
        if self.memory:
            yield from self._memory(row, y + self.box + self.memory)

    def _span(self, row: Row, span: Span, y: int) -> Iterator[str]:
        """Draw a box; what is too narrow to be seen is left out unless an action."""
        width = self.x(span.seconds) - LEFT
        if span.action is None and width < 0.4:
            return
        kind, what = "box thin" if width < 3 else "box", span.kind
        if span.action is not None:
            kind, what = f"{kind} action", f"{span.action} {span.kind}"
        title = f"{what} {span.start * 1e3:.4g} to {span.end * 1e3:.4g} ms"
        x, fill = self.x(span.start), _fill(row, span)
        yield rect(kind, x, y, max(width, 0.5), self.box, fill, title)
        yield from self._branches(span, y)

    def _branches(self, span: Span, y: int) -> Iterator[str]:
        """Draw a line for each rank of a row: when it computes which branches."""
        found = _branches_of(self.panel, span)
        count = 1 + max((each.place for each in found), default=0)
        height = 0.4 * self.box / count
        for each in found:
            start, end = each.start, each.end
            if span.kind == "backward":
                start, end = 1 - end, 1 - start
            width = self.width * (end - start) * span.seconds / self.panel.length
            if width >= THINNEST:
                x = self.x(span.start + start * span.seconds)
                top = y + self.box - height * (count - each.place)
                colour = LINES[each.place % len(LINES)] if each.names else "#ffffff"
                title = each.names or "waits for branches of others"
                yield rect("branches", x, top, width, height, colour, title)

    def _sums(self, row: Row, y: int) -> Iterator[str]:
        """Draw a line at the top of a row while it adds up gradients with others."""
        for stage in sorted({stage for _, stage in row.lanes} & self.panel.sums.keys()):
            start, end = self.panel.sums[stage]
            title = f"sums of stage {stage} {start * 1e3:.4g} to {end * 1e3:.4g} ms"
            x, width = self.x(start), self.x(end) - self.x(start)
            height = SUMS * self.box
            yield rect(
                "sums", x, y, max(width, 0.5), height, OTHERS["reduction"], title
            )

    def _label(self, span: Span, y: int) -> Iterator[str]:
        """Write the number of an action's micro-batch, if there is room."""
        if span.action is None:
            return
        label = str(span.action.micro_batch)
        if self.x(span.seconds) - LEFT >= 6.4 * len(label) + 1.5:
            tone = "light" if span.kind == "backward" else "dark"
            middle = self.x((span.start + span.end) / 2)
            height = 0.3 if _branches_of(self.panel, span) else 0.5
            yield text(middle, y + height * self.box + 4, label, tone)

    def _memory(self, row: Row, bottom: int) -> Iterator[str]:
        """Draw the bytes held over time; all ranks of a panel share the scale."""
        most = max(row.peak_bytes for row in self.panel.rows) or 1
        right = self.x(self.panel.length)

        def y(held: int) -> str:
            return n(bottom - (self.memory - 2) * held / most)

        steps = "".join(f"H{n(self.x(at))}V{y(held)}" for at, held in row.memory)
        yield (
            f'<path class="memory" data-peak="{row.peak_bytes}" d="M{LEFT},{bottom}'
            f'{steps}H{n(right)}V{bottom}Z"><title>at most {row.peak_bytes:,} bytes, '
            f"{row.resident_bytes:,} of them all the time</title></path>"
        )
        outline = f"M{LEFT},{bottom}V{y(row.resident_bytes)}H{n(right)}V{bottom}Z"
        yield f'<path class="resident" d="{outline}"/>'
        lanes = row.lanes_text
        if len(lanes) < 16:
            word = "stage" if len(row.lanes) == 1 else "stages"
            yield text(LEFT - 8, bottom - 1, f"{word} {lanes}", "lanes")
        yield text(right + 8, bottom - 1, f"peak {show_bytes(row.peak_bytes)}", "note")

    def _arrow(self, arrow: Arrow) -> str:
        """Draw a message from the lower or upper edge of a box to that of another."""
        down = arrow.dest > arrow.source
        tail, head = (self.box, 0) if down else (0, self.box)
        start = n(self.x(arrow.start)), self.top + arrow.source * self.pitch + tail
        end = n(self.x(arrow.end)), self.top + arrow.dest * self.pitch + head
        line = f"M{start[0]},{start[1]}L{end[0]},{end[1]}"
        kind = "arrow skip" if arrow.skip else "arrow"
        return f'<path class="{kind}" d="{line}" marker-end="url(#head)"/>'


def _branches_of(panel: Panel, span: Span) -> tuple[Branches, ...]:
    if span.action is None or span.kind == "weight":
        return ()
    return panel.branches.get(span.action.stage, ())


def _legend(panels: Sequence[Panel], y: int, width: int) -> tuple[list[str], int]:
    """Return what the colours mean, and where the picture ends."""
    x, parts = float(LEFT), []
    for kind, colour, words in _entries(panels):
        if x + 23 + 5.2 * len(words) > LEFT + width + RIGHT:
            x, y = float(LEFT), y + LINE
        if kind == "skip":
            parts.append(f'<path class="arrow skip" d="M{n(x)},{y - 4}h18"/>')
        else:
            parts.append(rect(kind, x, y - 9, 18, 11, colour))
        parts.append(text(x + 23, y, words, "note"))
        x += 42 + 5.2 * len(words)
    return parts, y + LINE


def _entries(panels: Sequence[Panel]) -> Iterator[tuple[str, str, str]]:
    """Yield class, colour and meaning of all that is drawn."""
    rows = [row for panel in panels for row in panel.rows]
    found = {
        (span.kind, span.action.replica if span.action else 0)
        for row in rows
        for span in row.spans
    }
    replicas = sorted({replica for _, replica in found})
    for replica in replicas:
        mark = f" of replica {replica}" if len(replicas) > 1 else ""
        for kind in SHADES:
            if (kind, replica) in found:
                yield "", _colour(kind, replica, 0.0), kind + mark
    for kind, colour in OTHERS.items():
        if (kind, 0) in found or (kind == "reduction" and any(p.sums for p in panels)):
            yield "", colour, kind
    places = {b.place for p in panels for s in p.branches.values() for b in s}
    for place in sorted(places):
        yield "", LINES[place % len(LINES)], f"branches of rank {place} of a stage"
    yield "idle", "", "idle"
    if any(row.memory for row in rows):
        yield "memory", "", "saved for backward"
        yield "resident", "", "weights, gradients"
    if any(arrow.skip for panel in panels for arrow in panel.arrows):
        yield "skip", "", "skip over a stage"


def _width(panel: Panel, widest: int) -> int:
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
    return round(min(max(wanted, NARROWEST), widest))


def _fill(row: Row, span: Span) -> str:
    """Return the colour of a box: hue by replica, shade by stage."""
    if span.kind not in SHADES:
        return OTHERS.get(span.kind, "#dddddd")
    if span.action is None:
        return _colour(span.kind, 0, 0.0)
    replica = span.action.replica
    stages = [stage for r, stage in row.lanes if r == replica]
    chunk = stages.index(span.action.stage) if span.action.stage in stages else 0
    return _colour(span.kind, replica, chunk / max(1, len(stages) - 1))


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
