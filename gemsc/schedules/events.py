"""What happens in a step, each event after others, and the search for a cycle."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

from gemsc.schedules.action import Action, Kind
from gemsc.schedules.rank_step import AllReduce, RankStep

Event = tuple[str, Hashable]
Events = TopologicalSorter[Event]  # what must have happened before what
Way = tuple[int, int, int]  # from a rank to a rank, with a tag


def find_cycle(events: Events) -> list[Event]:
    """Return events that wait for each other in a circle; none if all can happen.

    Each one waits for the next, the last one for the first.
    """
    try:
        events.prepare()
    except CycleError as error:
        cycle: list[Event] = error.args[1]
        return cycle[:0:-1]
    return []


def events_of(ranks: Sequence[RankStep], *, waits: bool) -> Events:
    """Return what all ranks do in a step, and what each of it waits for.

    With `waits` a backward waits until what its own forward sent has left.
    """
    events = Events()
    for rank in ranks:
        _add_rank(events, rank, waits=waits)
    return events


def _add_rank(events: Events, rank: RankStep, *, waits: bool) -> None:
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
            previous = _add_action(events, rank, step, previous, waits=waits)
        elif isinstance(step, AllReduce):
            events.add(("summed", step), previous)
            events.add(("summed", step), summed)
            summed = ("summed", step)
        else:
            here: Event = ("ends", (rank.rank, step))
            events.add(here, previous)
            events.add(here, summed)
            previous = here
    events.add(("finish", rank.rank), previous)


def _add_receive(
    events: Events, way: Way, action: Action, previous: Event, taken: dict[Way, Event]
) -> Event:
    """Add a message: it moves once it is sent and wanted, then it is used."""
    wanted: Event = ("wanted", (way, action))
    used: Event = ("used", (way, action))
    moved: Event = ("moved", (way, action.micro_batch))
    events.add(wanted, previous)
    events.add(used, wanted)
    events.add(moved, taken.get(way, wanted))  # posted when the one before was used
    events.add(used, moved)
    taken[way] = used
    return used


def _add_action(
    events: Events,
    rank: RankStep,
    action: Action,
    previous: Event,
    *,
    waits: bool,
) -> Event:
    """Add what a rank computes and sends; return its end."""
    number = rank.rank
    done: Event = ("done", (number, action))
    end: Event = ("end", (number, action))
    if len(rank.tiles) > 1:
        together: Event = ("together", (rank.tiles, action))
        events.add(together, previous)
        previous = together
    events.add(done, previous)
    events.add(end, done)
    for message in rank.run(action).sends:
        if message.peer != number:
            moved = ("moved", ((number, message.peer, message.tag), action.micro_batch))
            events.add(moved, done)
            if action.kind is not Kind.FORWARD or not waits:
                events.add(("finish", number), moved)
    if action.kind is Kind.BACKWARD:
        for message in rank.run(replace(action, kind=Kind.FORWARD)).sends:
            if message.peer != number:
                way = number, message.peer, message.tag
                events.add(end, ("moved", (way, action.micro_batch)))
    return end
