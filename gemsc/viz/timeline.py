"""The schedule as a picture: ranks down, time across, memory under each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gemsc.base.files import write_text
from gemsc.base.units import show_bytes, show_micro_batches, show_seconds
from gemsc.plan import Plan
from gemsc.viz.design import (
    HATCHED,
    NORMAL,
    drawing,
    element,
    legend,
    line,
    n,
    path,
    rect,
    round_step,
    series,
    shade,
    text,
    width_of,
)
from gemsc.viz.panel import Arrow, Branches, Mark, Panel, Row, Span, panels_of

MOST_ARROWS = 400
WORDS = {  # of the legend
    "forward": "forward",
    "backward": "backward",
    "weight": "weight gradients",
    "send": "send",
    "wait": "wait",
    "reduction": "all-reduce",
    "update": "update",
}
ACTIONS = ("forward", "backward", "weight")
LEFT, RIGHT, TOP, GAP, AXIS, LINE = 96, 110, 58, 30, 22, 20
THINNEST = 0.5  # of what is drawn of branches
SUMS = 0.2  # of a box, for the line of sums
NARROWEST, WIDEST = 880, 2400  # of the part where time runs
LEAST = 9  # px, of the number of a micro-batch
STYLE = """
.box { stroke: $sheet }
.thin { stroke-width: 0 }
.branches, .sums { stroke: $sheet; stroke-width: 0.5 }
.dark { text-anchor: middle; fill: $on-light }
.light { text-anchor: middle; fill: $on-dark }
.small { font-size: 9px }
.rank { font-weight: bold; text-anchor: end }
.arrow { stroke-width: 0.8; stroke-opacity: 0.6; fill: none }
.skip { stroke-dasharray: 4 2; stroke-opacity: 0.8 }
"""
HEAD = (
    '<defs><marker id="head" markerWidth="6" markerHeight="6" refX="5" refY="3" '
    'orient="auto" markerUnits="userSpaceOnUse"><path class="fill-soft" '
    'd="M0,0.8 L5,3 L0,5.2"/></marker></defs>'
)


def write_timeline(
    plan: Plan, file: Path, marks: Sequence[Sequence[Mark]] = ()
) -> None:
    """Draw a plan's step, below it a measured one if there are marks of each rank."""
    copies = f" in each of {plan.data} data-parallel replicas" if plan.data > 1 else ""
    heading = (
        f"{plan.model}: {plan.schedule}, {plan.copy_ranks} ranks and "
        f"{show_micro_batches(plan.micro_batches)}{copies}"
    )
    write_text(file, draw_timeline(heading, panels_of(plan, marks)))


def draw_timeline(heading: str, panels: Sequence[Panel], widest: int = WIDEST) -> str:
    """Return the SVG text of panels, each with a time axis of its own."""
    width = max((_width(panel, widest) for panel in panels), default=NARROWEST)
    most_rows = max((len(panel.rows) for panel in panels), default=0)
    height = 26 if most_rows <= 12 else 19 if most_rows <= 32 else 13
    parts, y = [HEAD], float(TOP if heading else LINE)
    if heading:
        parts.append(text(16, 28, heading, "title"))
    for panel in panels:
        drawn = _Drawn(panel, round(y) + 14, width, height)
        parts.append(text(16, y, f"{panel.name}: {_facts(panel, panels[0])}", "name"))
        parts += drawn.parts()
        y = drawn.end + AXIS + GAP
    key, y = legend([*_entries(panels)], LEFT, y, LEFT + width + RIGHT)
    title = heading or ", ".join(panel.name for panel in panels)
    return drawing("timeline", LEFT + width + RIGHT, y, title, STYLE, parts + key)


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
        yield from map(self._arrow, _drawn(self.panel))
        for index, row in enumerate(self.panel.rows):  # over everything else
            for kind in ACTIONS:
                spans = [span for span in row.spans if span.kind == kind]
                yield from self._labels(spans, self.top + index * self.pitch)

    def _axis(self) -> Iterator[str]:
        """Draw lines at round numbers of milliseconds."""
        total = 1e3 * (self.panel.length or 1.0)
        step = round_step(total / (self.width / 90))
        for index in range(int(total / step * (1 + 1e-9)) + 1):
            x = self.x(index * step / 1e3)
            yield line("grid", x, self.top - 4, x, self.end)
            label = f"{index * step:g}" + (" ms" if index == 0 else "")
            yield text(x, self.end + 12, label, "note middle")

    def _row(self, row: Row, y: int) -> Iterator[str]:
        makespan, right = self.panel.makespan, self.x(self.panel.length)
        yield rect("idle fill-idle", LEFT, y, right - LEFT, self.box)
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
        kind = f"{kind} {_colour(row, span)}"
        yield rect(kind, self.x(span.start), y, max(width, 0.5), self.box, title)
        yield from self._branches(span, y)

    def _branches(self, span: Span, y: int) -> Iterator[str]:
        """Draw a line for each rank of a row: when it computes which branches."""
        branches = _branches_of(self.panel, span)
        count = 1 + max((part.place for part in branches), default=0)
        height = 0.4 * self.box / count
        if branches:
            x, width = self.x(span.start), self.x(span.seconds) - LEFT
            yield rect("fill-sheet", x, y + 0.6 * self.box, width, 0.4 * self.box)
        for part in branches:
            start, end = part.start, part.end
            if span.kind == "backward":
                start, end = 1 - end, 1 - start
            width = self.width * (end - start) * span.seconds / self.panel.length
            if width >= THINNEST:
                x = self.x(span.start + start * span.seconds)
                top = y + self.box - height * (count - part.place)
                fill = f"fill-{series(part.place)}" if part.names else "hatch-wait"
                title = part.names or "waits for branches of others"
                yield rect(f"branches {fill}", x, top, width, height, title)

    def _sums(self, row: Row, y: int) -> Iterator[str]:
        """Draw a line at the top of a row while it adds up gradients with others."""
        for stage in sorted({stage for _, stage in row.lanes} & self.panel.sums.keys()):
            start, end = self.panel.sums[stage]
            title = f"sums of stage {stage} {start * 1e3:.4g} to {end * 1e3:.4g} ms"
            x, width = self.x(start), self.x(end) - self.x(start)
            kind, height = "sums hatch-reduction", SUMS * self.box
            yield rect(kind, x, y, max(width, 0.5), height, title)

    def _labels(self, spans: Sequence[Span], y: int) -> Iterator[str]:
        """Write the numbers of micro-batches into boxes, into all of them or none."""
        shown = [(str(s.action.micro_batch), s) for s in spans if s.action is not None]
        spare = [
            (self.x(span.seconds) - LEFT - 1.5) / width_of(label, 1)
            for label, span in shown
        ]
        size = min(spare, default=0)
        if size < LEAST:
            return
        for label, span in shown:
            tone = "light" if span.kind == "backward" else "dark"
            tone += " small" if size < NORMAL else ""
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
        title = (
            f"at most {row.peak_bytes:,} bytes, {row.resident_bytes:,} of them all the "
            "time"
        )
        outline = f"M{LEFT},{bottom}{steps}H{n(right)}V{bottom}Z"
        kinds = f'class="memory fill-saved" data-peak="{row.peak_bytes}"'
        yield element("path", f'{kinds} d="{outline}"', title)
        outline = f"M{LEFT},{bottom}V{y(row.resident_bytes)}H{n(right)}V{bottom}Z"
        yield path("fill-resident", outline)
        lanes = row.lanes_text
        if len(lanes) < 16:
            word = "stage" if len(row.lanes) == 1 else "stages"
            yield text(LEFT - 8, bottom - 1, f"{word} {lanes}", "note end")
        yield text(right + 8, bottom - 1, f"peak {show_bytes(row.peak_bytes)}", "note")

    def _arrow(self, arrow: Arrow) -> str:
        """Draw a message from the lower or upper edge of a box to that of another."""
        down = arrow.dest > arrow.source
        tail, head = (self.box, 0) if down else (0, self.box)
        start = n(self.x(arrow.start)), self.top + arrow.source * self.pitch + tail
        end = n(self.x(arrow.end)), self.top + arrow.dest * self.pitch + head
        outline = f"M{start[0]},{start[1]}L{end[0]},{end[1]}"
        kind = "arrow skip stroke-skip" if arrow.skip else "arrow stroke-soft"
        return path(kind, outline, more=' marker-end="url(#head)"')


def _branches_of(panel: Panel, span: Span) -> tuple[Branches, ...]:
    if span.action is None or span.kind == "weight":
        return ()
    return panel.branches.get(span.action.stage, ())


def _entries(panels: Sequence[Panel]) -> Iterator[tuple[str, str]]:
    """Yield class and meaning of all that is drawn."""
    rows = [row for panel in panels for row in panel.rows]
    drawn = {
        (span.kind, span.action.replica if span.action else 0)
        for row in rows
        for span in row.spans
    } | {("reduction", 0) for panel in panels if panel.sums}
    replicas = sorted({replica for _, replica in drawn})
    for replica in replicas:
        mark = f" of replica {replica}" if len(replicas) > 1 else ""
        for kind in ACTIONS:
            if (kind, replica) in drawn:
                yield f"fill-{shade(kind, replica, 0.0)}", WORDS[kind] + mark
    for kind, words in WORDS.items():
        if kind not in ACTIONS and (kind, 0) in drawn:
            yield f"{'hatch' if kind in HATCHED else 'fill'}-{kind}", words
    places = {b.place for p in panels for s in p.branches.values() for b in s}
    for place in sorted(places):
        yield f"fill-{series(place)}", f"branches of rank {place} of a stage"
    yield "fill-idle", "idle"
    if any(row.memory for row in rows):
        yield "fill-saved", "memory saved for backward"
        yield "fill-resident", "memory of weights, gradients"
    skips = {arrow.skip for panel in panels for arrow in _drawn(panel)}
    if False in skips:
        yield "key stroke-soft", "message"
    if True in skips:
        yield "key skip stroke-skip", "message over a stage"


def _drawn(panel: Panel) -> tuple[Arrow, ...]:
    """Return the arrows, unless there are too many to be drawn."""
    return panel.arrows if len(panel.arrows) <= MOST_ARROWS else ()


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


def _colour(row: Row, span: Span) -> str:
    """Return the class of a box: hue by replica, shade by stage."""
    if span.kind not in ACTIONS:
        return f"{'hatch' if span.kind in HATCHED else 'fill'}-{span.kind}"
    replica, share = 0, 0.0
    if span.action is not None:
        replica = span.action.replica
        stages = [stage for r, stage in row.lanes if r == replica]
        chunk = stages.index(span.action.stage) if span.action.stage in stages else 0
        share = chunk / max(1, len(stages) - 1)
    return f"fill-{shade(span.kind, replica, share)}"
