"""An order for the communication of all ranks, with which none waits for ever.

Where messages have no tags, what one rank sends another must be received in the order
in which it is sent; and where a device runs one transfer at a time, no two ranks may
begin with different ones. So all ranks follow one order of the whole job, each its own
part of it:

    rank 0   X   X       G   X       G         X, X, ...: micro-batches 0, 1, ...
    rank 1   X   X   Y   G   X   Y   G
    rank 2           Y           Y

It is the order of a run in which each message moves as soon as it is sent and its
receive is posted, as `events_of` says, with every forward as long as any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from graphlib import TopologicalSorter

from gemsc.schedules.action import Action, Kind
from gemsc.schedules.rank_step import AllReduce, Event, RankStep, events_of

TIMES = {
    Kind.FORWARD: 1000,
    Kind.BACKWARD: 2000,
    Kind.WEIGHT: 1000,
}  # a message takes 1


def order_of(ranks: Sequence[RankStep], *, waits: bool) -> list[list[Event]]:
    """Return for each rank its messages, sums, and actions together, in order.

    They are those events of `events_of` that are called moved, summed and together.
    """
    events = events_of(ranks, waits=waits)
    end: dict[Event, int] = {}
    for event in TopologicalSorter(events).static_order():
        begin = max((end[each] for each in events[event]), default=0)
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
