"""What one rank does in one step, as plain data; what each event waits for; an order.

Where messages have no tags, what one rank sends another must be received in the order
in which it is sent; and where a device runs one transfer at a time, no two ranks may
begin with different ones. So all ranks follow one order of the whole job (`order_of`),
each its own part of it:

    rank 0   X   X       G   X       G         X, X, ...: micro-batches 0, 1, ...
    rank 1   X   X   Y   G   X   Y   G
    rank 2           Y           Y
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter

from gemsc.base.parts import Part, holder_of
from gemsc.schedules.action import Action, Kind

Event = tuple[str, Hashable]
Events = dict[Event, list[Event]]  # what must have happened before each
Way = tuple[int, int, int]  # from a rank to a rank, with a tag


@dataclass(frozen=True, slots=True)
class MessageEnd:
    """One rank's end of messages: what it sends to a peer, or receives from it.

    The peer is the rank itself where a value goes from one of its stages to another.
    `values` say what travels, such as "x float32[16, 64]"; both ends must agree on it.
    `line` is the user's that computes it, "" where that is not known.
    """

    peer: int
    tag: int
    values: tuple[str, ...] = ()
    line: str = field(default="", compare=False)

    def __str__(self) -> str:
        at = f" of {self.line}" if self.line else ""
        return f"{', '.join(self.values)}{at}, tag {self.tag}"


@dataclass(frozen=True, slots=True)
class GridCall:
    """One call in which the tiles of a stage work together; it returns on all or none.

    `ranks` take part. Messages travel in both directions at once.
    """

    method: str
    ranks: tuple[int, ...]
    sends: tuple[MessageEnd, ...] = ()
    receives: tuple[MessageEnd, ...] = ()
    line: str = field(default="", compare=False)

    def __str__(self) -> str:
        at = f" ({self.line})" if self.line else ""
        return f"{self.method}{at}"


@dataclass(frozen=True, slots=True)
class StageRun:
    """One stage's work on a micro-batch, whichever: receive, compute, send.

    `calls` are those of its grid, in order. `lines` are the user's.
    """

    receives: tuple[MessageEnd, ...] = ()
    sends: tuple[MessageEnd, ...] = ()
    calls: tuple[GridCall, ...] = ()
    lines: str = ""


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Start to add up gradients over ranks: a stage's, its parts', a tied one's."""

    group: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"the all-reduce of '{self.group}'"


@dataclass(frozen=True, slots=True)
class Turn:
    """What a rank begins when all before it has begun.

    That is a message, with its ends at all ranks of another grid, or a `collective`: a
    sum of gradients by its name, or, by (replica, stage), an action in which the tiles
    of its grid exchange something.
    """

    sends: tuple[MessageEnd, ...] = ()
    receives: tuple[MessageEnd, ...] = ()
    collective: str | tuple[int, int] | None = None


class End(StrEnum):
    """What ends a training step: wait for all-reduces, then let the optimizer step."""

    REDUCED = "the wait for all-reduces"
    UPDATED = "the update"


Step = Action | AllReduce | End


@dataclass(frozen=True)
class RankStep:
    """All that one rank does in a step, in order.

    `runs` has for each kind of action, by (kind, replica, stage), what it does. `tiles`
    are the ranks of its grid, the rank alone if its stages are not split. `deferred`
    are the weight gradients that its backwards leave for actions of their own. `parts`
    are the parameters and buffers of which it holds a part only; `placed` says by path
    which tile of the grid alone holds the others that not all hold. `order` is that of
    all communication, where it has one.
    """

    rank: int
    runs: Mapping[tuple[Kind, int, int], StageRun]
    steps: tuple[Step, ...]
    tiles: tuple[int, ...]
    deferred: frozenset[Action] = frozenset()
    parts: Mapping[str, Part] = field(default_factory=dict)
    placed: Mapping[str, int] = field(default_factory=dict)
    order: tuple[Turn, ...] = ()

    @property
    def actions(self) -> list[Action]:
        """What it computes, in order."""
        return [step for step in self.steps if isinstance(step, Action)]

    def apart(self, names: Collection[str]) -> frozenset[tuple[str, Part | None]]:
        """Return which of some tensors it holds in part, or alone, then with None."""
        tile = self.tiles.index(self.rank)
        alone = {n for n in names if holder_of(n, self.placed) == tile}
        parts = {name: part for name, part in self.parts.items() if name in names}
        return frozenset([*parts.items(), *dict.fromkeys(alone).items()])

    def run(self, action: Action) -> StageRun:
        """Return what an action does."""
        return self.runs[action.kind, action.replica, action.stage]


def find_cycle(events: Events) -> list[Event]:
    """Return events that wait for each other in a circle; none if all can happen.

    Each one waits for the next, the last one for the first.
    """
    try:
        TopologicalSorter(events).prepare()
    except CycleError as error:
        cycle: list[Event] = error.args[1]
        return cycle[:0:-1]
    return []


def _after(events: Events, event: Event, *before: Event) -> None:
    events.setdefault(event, []).extend(before)
    for earlier in before:
        events.setdefault(earlier, [])


def events_of(ranks: Sequence[RankStep]) -> Events:
    """Return what all ranks do in a step, and what each of it waits for."""
    events: Events = {}
    for rank in ranks:
        _add_rank(events, rank)
    return events


def _add_rank(events: Events, rank: RankStep) -> None:
    """Add what a rank waits for, in its order."""
    previous: Event = ("begin", rank.rank)
    summed: Event = previous
    taken: dict[Way, Event] = {}
    for step in rank.steps:
        if isinstance(step, Action):
            for message in rank.run(step).receives:
                way = message.peer, rank.rank, message.tag
                if message.peer != rank.rank:
                    previous = _add_receive(events, way, step, previous, taken)
            previous = _add_action(events, rank, step, previous)
        elif isinstance(step, AllReduce):
            _after(events, ("summed", step), previous, summed)
            summed = ("summed", step)
        else:
            here: Event = ("ends", (rank.rank, step))
            _after(events, here, previous, summed)
            previous = here


def _add_receive(
    events: Events, way: Way, action: Action, previous: Event, taken: dict[Way, Event]
) -> Event:
    """Add a message: it moves once it is sent and wanted, then it is used."""
    wanted: Event = ("wanted", (way, action))
    used: Event = ("used", (way, action))
    moved: Event = ("moved", (way, action.micro_batch))
    _after(events, wanted, previous)
    _after(events, used, wanted, moved)
    _after(events, moved, taken.get(way, wanted))  # posted when the one before was used
    taken[way] = used
    return used


def _add_action(
    events: Events, rank: RankStep, action: Action, previous: Event
) -> Event:
    """Add what a rank computes and sends; return its end."""
    number = rank.rank
    done: Event = ("done", (number, action))
    end: Event = ("end", (number, action))
    if len(rank.tiles) > 1:
        joint: Event = ("together", (rank.tiles, action))
        _after(events, joint, previous)
        previous = joint
    _after(events, done, previous)
    _after(events, end, done)
    for message in rank.run(action).sends:
        if message.peer != number:
            moved = ("moved", ((number, message.peer, message.tag), action.micro_batch))
            _after(events, moved, done)
    if action.kind is Kind.BACKWARD:
        for message in rank.run(replace(action, kind=Kind.FORWARD)).sends:
            if message.peer != number:
                way = number, message.peer, message.tag
                _after(events, end, ("moved", (way, action.micro_batch)))
    return end


# a message takes 1
TIMES = {Kind.FORWARD: 1000, Kind.BACKWARD: 2000, Kind.WEIGHT: 1000}


def order_of(ranks: Sequence[RankStep]) -> list[list[Event]]:
    """Return for each rank its messages, sums, and actions together, in order.

    They are those events of `events_of` that are called moved, summed and together, in
    the order of a run in which each message moves as soon as it is sent and its receive
    is posted, with every forward as long as any other.
    """
    events = events_of(ranks)
    end: dict[Event, int] = {}
    for event in TopologicalSorter(events).static_order():
        begin = max((end[earlier] for earlier in events[event]), default=0)
        end[event] = begin + _time(event)
    ordered = sorted(
        filter(_is_begun, end), key=lambda event: (end[event], *_key(event))
    )
    return [[e for e in ordered if _takes_part(rank, e)] for rank in ranks]


def _time(event: Event) -> int:
    name, what = event
    if name == "done":
        assert isinstance(what, tuple)
        return TIMES[what[1].kind]
    return int(_is_begun(event))  # so that no two that depend have the same time


def _is_begun(event: Event) -> bool:
    return event[0] in ("moved", "together", "summed")


def _key(event: Event) -> tuple[str, int, int, str]:
    """Return what decides between events of the same time, on all ranks alike."""
    name, what = event
    if isinstance(what, AllReduce):
        return name, 0, 0, what.group
    assert isinstance(what, tuple)
    place, which = what
    if isinstance(which, Action):
        return name, *place[:1], 0, str(which)
    return name, place[2], which, ""


def _takes_part(rank: RankStep, event: Event) -> bool:
    _, what = event
    if isinstance(what, AllReduce):
        return rank.rank in what.ranks
    assert isinstance(what, tuple)
    place, which = what
    is_together = isinstance(which, Action)
    return place == rank.tiles if is_together else rank.rank in place[:2]
