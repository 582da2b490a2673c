"""What a timeline shows: what each rank does when, and who waits for whom.

Chrome trace events, which ui.perfetto.dev and chrome://tracing open, say it as well.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from gemsc.base.units import show_ranks
from gemsc.plan import Plan
from gemsc.plan_tables import PlannedStage
from gemsc.planner.explain import task_of, timeline_of
from gemsc.schedules import Action, Kind, Task, Timed, Timeline, held_bytes
from gemsc.schedules.paths import skipping

BINS = 220  # of a step, where there are too many spans to draw each

NAMES = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.WEIGHT: "weight"}
KINDS = {name: kind for kind, name in NAMES.items()}

# kind, stage, replica, micro-batch, start, end: what a rank writes down of itself
Mark = tuple[str, int, int, int, float, float]
Json = dict[str, Any]
INSIDE = 1e-3  # microseconds: arrows begin just before the end of a span


@dataclass(frozen=True, slots=True)
class Span:
    """What a rank does from `start` to `end`, in seconds from the step's begin.

    An action is `forward`, `backward` or `weight`; `wait`, `send`, `reduction` and
    `update` have none.
    """

    kind: str
    start: float
    end: float
    action: Action | None = None

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Arrow:
    """A message: from the end of what makes it to the start of what needs it."""

    source: int
    dest: int
    start: float
    end: float
    skip: bool


@dataclass(frozen=True, slots=True)
class Row:
    """One rank, or one grid: its spans, and the bytes it holds from each time on."""

    spans: tuple[Span, ...]
    lanes: tuple[tuple[int, int], ...]
    name: str
    memory: tuple[tuple[float, int], ...] = ()
    resident_bytes: int = 0
    peak_bytes: int = 0

    def seconds(self, *kinds: str) -> float:
        """Return the time that spans of some kinds take together."""
        return sum(span.seconds for span in self.spans if span.kind in kinds)

    @property
    def lanes_text(self) -> str:
        """The stages, those of a mirrored replica with a prime."""
        return ", ".join(f"{stage}{chr(39) * r}" for r, stage in self.lanes)

    @property
    def busy(self) -> float:
        """The seconds of all actions."""
        return self.seconds(*KINDS)


@dataclass(frozen=True, slots=True)
class Branches:
    """What one of a row's ranks computes between a fork and its join; "": it waits.

    `start` and `end` are parts of a forward, 0 to 1; a backward goes the other way.
    `place` is the rank's among those of the row.
    """

    place: int
    start: float
    end: float
    names: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One step of all ranks, or of those whose numbers are given.

    `branches` are those of each stage whose ranks share branches, `sums` the begin and
    end of the sums of each stage's gradients.
    """

    name: str
    rows: tuple[Row, ...]
    arrows: tuple[Arrow, ...]
    makespan: float
    numbers: tuple[int, ...] = ()
    branches: Mapping[int, tuple[Branches, ...]] = field(default_factory=dict)
    sums: Mapping[int, tuple[float, float]] = field(default_factory=dict)

    def number(self, row: int) -> int:
        """Return the rank that a row shows."""
        return self.numbers[row] if self.numbers else row

    def only(self, numbers: Sequence[int]) -> Panel:
        """Return the rows of some ranks, with the messages between those."""
        place = {rank: row for row, rank in enumerate(numbers)}
        arrows = (
            replace(arrow, source=place[arrow.source], dest=place[arrow.dest])
            for arrow in self.arrows
            if arrow.source in place and arrow.dest in place
        )
        rows = tuple(self.rows[rank] for rank in numbers)
        return replace(self, rows=rows, arrows=tuple(arrows), numbers=tuple(numbers))

    def coarse(self) -> Panel:
        """Return as few spans as can be seen: what is done for most of a short time."""
        length = self.makespan / BINS
        rows = (replace(row, spans=_coarse(row.spans, length)) for row in self.rows)
        return replace(self, rows=tuple(rows))

    @property
    def length(self) -> float:
        """The seconds until all actions and sums are done."""
        return max((self.makespan, *(end for _, end in self.sums.values())))

    @property
    def bubble(self) -> float:
        """The share of the ranks' time, 0 to 1, in which they do no action."""
        total = self.makespan * len(self.rows)
        return 1.0 - sum(row.busy for row in self.rows) / total if total else 0.0


def _coarse(spans: Sequence[Span], length: float) -> tuple[Span, ...]:
    used: list[dict[str, float]] = [defaultdict(float) for _ in range(BINS + 1)]
    for span in spans:
        for index in range(int(span.start / length), int(span.end / length) + 1):
            start = max(span.start, index * length)
            used[index][span.kind] += min(span.end, (index + 1) * length) - start
    most = [
        max(t, key=t.__getitem__) if 2 * sum(t.values()) > length else "" for t in used
    ]
    shown, end = [], 0
    for kind, run in groupby(most):
        begin, end = end, end + len(list(run))
        if kind:
            shown.append(Span(kind, begin * length, end * length))
    return tuple(shown)


def panels_of(plan: Plan, marks: Sequence[Sequence[Mark]] = ()) -> tuple[Panel, ...]:
    """Return the predicted step, and the measured one if there are marks.

    The tiles of a grid run in lockstep: its row is what the first one does.
    """
    task = task_of(plan)
    copies = [
        [[rank + copy * plan.copy_ranks for rank in ranks] for ranks in plan.members]
        for copy in range(plan.data)
    ]
    predicted = predicted_panel(
        task, timeline_of(plan), list(map(show_ranks, copies[0]))
    )
    branches = {stage.index: tuple(_branches(stage)) for stage in plan.stages}
    sums = {entry["stage"]: (entry["start"], entry["end"]) for entry in plan.sums}
    predicted = replace(predicted, branches=branches, sums=sums)
    if not marks:
        return (predicted,)
    groups = [ranks for copy in copies for ranks in copy]
    rows = [marks[ranks[0]] for ranks in groups]
    return predicted, measured_panel(task, rows, list(map(show_ranks, groups)))


def predicted_panel(task: Task, timeline: Timeline, names: Sequence[str] = ()) -> Panel:
    """Return a step of one copy of the model, as predicted.

    `names` are those of the rows, where they are not rank 0, rank 1, ...
    """
    names = names or _ranks(timeline.ranks)
    rows = tuple(
        Row(
            tuple(
                Span(NAMES[timed.action.kind], timed.start, timed.end, timed.action)
                for timed in actions
            ),
            task.lanes[rank],
            names[rank],
            tuple(_memory(task, rank, actions)),
            task.resident_bytes(rank),
            timeline.peak_bytes[rank],
        )
        for rank, actions in enumerate(timeline.ranks)
    )
    return Panel("predicted", rows, tuple(_arrows(task, rows)), timeline.makespan)


def measured_panel(
    task: Task, marks: Sequence[Sequence[Mark]], names: Sequence[str] = ()
) -> Panel:
    """Return a step of all copies of the model, from what each row wrote down."""
    names = names or _ranks(marks)
    rows = tuple(
        Row(tuple(map(_span, row)), task.lanes[rank % task.num_ranks], names[rank])
        for rank, row in enumerate(marks)
    )
    arrows = tuple(_arrows(task, rows))
    makespan = max((span.end for row in rows for span in row.spans), default=0.0)
    return Panel("measured", rows, arrows, makespan)


def _branches(stage: PlannedStage) -> Iterator[Branches]:
    """Yield what each rank computes of each fork; messages take no time here.

    What shards take of the trunk counts as on one rank: all is then shown shorter.
    """
    parts, start = [], 0.0
    for fork in stage.forks:
        seconds = dict(zip(fork.branches, fork.seconds, strict=True))
        loads = [sum(map(seconds.__getitem__, names)) for names in fork.placed]
        start += fork.trunk_seconds
        end = start + max(loads, default=0.0)
        for place, (names, load) in enumerate(zip(fork.placed, loads, strict=True)):
            parts.append(Branches(place, start, start + load, ", ".join(names)))
            parts.append(Branches(place, start + load, end, ""))
        start = end
    total = max(stage.seconds - stage.talking_seconds, start)
    for part in parts:
        yield replace(part, start=part.start / total, end=part.end / total)


def _ranks(rows: Sequence[object]) -> list[str]:
    return [f"rank {rank}" for rank in range(len(rows))]


def _span(mark: Mark) -> Span:
    kind, stage, replica, micro_batch, start, end = mark
    action = None
    if kind in KINDS:
        action = Action(KINDS[kind], stage, micro_batch, replica)
    return Span(kind, start, end, action)


def _memory(
    task: Task, rank: int, actions: Sequence[Timed]
) -> Iterator[tuple[float, int]]:
    """Yield times, and the bytes that a rank holds from then on.

    At the end of the step the gradients go.
    """
    resident = task.resident_bytes(rank)
    yield 0.0, resident
    for held in held_bytes(task, rank, actions):
        yield held.time, resident + held.total
    if actions:
        yield actions[-1].end, resident


def _arrows(task: Task, rows: Sequence[Row]) -> Iterator[Arrow]:
    """Yield the messages between ranks, those of each copy of the model apart."""
    skips = skipping((e.source, e.dest) for e in task.edges)
    gradients = {(e.source, e.dest) for e in task.edges if e.gradient}
    for first in range(0, len(rows), task.num_ranks):
        spans = {
            span.action: (rank, span)
            for rank, row in enumerate(rows[first : first + task.num_ranks], first)
            for span in row.spans
            if span.action is not None
        }
        for action, (source, span) in spans.items():
            forward = action.kind is Kind.FORWARD
            if action.kind is Kind.WEIGHT:
                continue
            edges = task.outputs[action.stage] if forward else task.inputs[action.stage]
            for stage in sorted({e.dest if forward else e.source for e in edges}):
                if not forward and (stage, action.stage) not in gradients:
                    continue
                needs = Action(action.kind, stage, action.micro_batch, action.replica)
                if needs not in spans or spans[needs][0] == source:
                    continue
                dest, use = spans[needs]
                ends = min(stage, action.stage), max(stage, action.stage)
                yield Arrow(source, dest, span.end, use.start, ends in skips)


def trace_text(panels: Sequence[Panel]) -> str:
    """Return Chrome's JSON text: a process for each panel, a thread for each rank."""
    events = [
        event for pid, panel in enumerate(panels, 1) for event in _events(pid, panel)
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _events(pid: int, panel: Panel) -> Iterator[Json]:
    """Yield a process; no thread of another one has a number of its threads."""
    first = 10_000 * pid

    def about(tid: int, what: str, **arguments: object) -> Json:
        return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": arguments}

    yield about(0, "process_name", name=panel.name)
    yield about(0, "process_sort_index", sort_index=pid)
    for rank, row in enumerate(panel.rows):
        yield about(first + rank, "thread_name", name=row.name)
        yield about(first + rank, "thread_sort_index", sort_index=rank)
        for span in row.spans:
            yield {"ph": "X", "pid": pid, "tid": first + rank, **_span_entries(span)}
        for seconds, held in row.memory:
            counter = {"name": f"{row.name} bytes", "args": {"bytes": held}}
            yield {"ph": "C", "pid": pid, "ts": _us(seconds), **counter}
    for number, arrow in enumerate(panel.arrows):
        shared = {"name": "message", "cat": "message", "id": f"{pid}.{number}"}
        start = {"tid": first + arrow.source, "ts": max(0.0, _us(arrow.start) - INSIDE)}
        end = {"tid": first + arrow.dest, "ts": _us(arrow.end)}
        yield {**shared, "ph": "s", "pid": pid, **start}
        yield {**shared, "ph": "f", "bp": "e", "pid": pid, **end}


def _span_entries(span: Span) -> Json:
    names = "stage", "micro_batch", "replica"
    return {
        "name": span.kind if span.action is None else str(span.action),
        "cat": span.kind,
        "ts": _us(span.start),
        "dur": _us(span.seconds),
        "args": {n: getattr(span.action, n) for n in names} if span.action else {},
    }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
