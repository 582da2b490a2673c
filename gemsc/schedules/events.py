"""What happens in a step, each event after others, and the search for a cycle."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import replace

from gemsc.schedules.action import Action, Kind
from gemsc.schedules.rank_step import AllReduce, RankStep

__all__ = ["Event", "Events", "Way", "events_of"]

Event = tuple[str, Hashable]
Way = tuple[int, int, int]  # from a rank to a rank, with a tag


class Events:
    """What must have happened before what."""

    def __init__(self) -> None:
        self._after: dict[Event, list[Event]] = defaultdict(list)
        self._before: dict[Event, list[Event]] = defaultdict(list)

    def add(self, first: Event, then: Event) -> None:
        """Note that `then` waits for `first`."""
        self._after[first].append(then)
        self._before[then].append(first)

    def find_cycle(self) -> list[Event]:
        """Return events that wait for each other in a circle; none if all can happen.

        Each one waits for the next, the last one for the first.
        """
        missing = {event: len(before) for event, before in self._before.items()}
        ready = deque(event for event in self._after if event not in missing)
        while ready:
            for then in self._after.get(ready.popleft(), ()):
                missing[then] -= 1
                if not missing[then]:
                    del missing[then]
                    ready.append(then)
        if not missing:
            return []
        path: dict[Event, int] = {}
        event = next(iter(missing))
        while event not in path:
            path[event] = len(path)
            event = next(e for e in self._before[event] if e in missing)
        return list(path)[path[event] :]


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
            events.add(previous, ("summed", step))
            events.add(summed, ("summed", step))
            summed = ("summed", step)
        else:
            here: Event = ("ends", (rank.rank, step))
            events.add(previous, here)
            events.add(summed, here)
            previous = here
    events.add(previous, ("finish", rank.rank))


def _add_receive(
    events: Events, way: Way, action: Action, previous: Event, taken: dict[Way, Event]
) -> Event:
    """Add a message: it moves once it is sent and wanted, then it is used."""
    wanted: Event = ("wanted", (way, action))
    used: Event = ("used", (way, action))
    moved: Event = ("moved", (way, action.micro_batch))
    events.add(previous, wanted)
    events.add(wanted, used)
    events.add(taken.get(way, wanted), moved)  # posted when the one before was used
    events.add(moved, used)
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
        events.add(previous, together)
        previous = together
    events.add(previous, done)
    events.add(done, end)
    for message in rank.run(action).sends:
        if message.peer != number:
            moved = ("moved", ((number, message.peer, message.tag), action.micro_batch))
            events.add(done, moved)
            if action.kind is not Kind.FORWARD or not waits:
                events.add(moved, ("finish", number))
    if action.kind is Kind.BACKWARD:
        for message in rank.run(replace(action, kind=Kind.FORWARD)).sends:
            if message.peer != number:
                way = number, message.peer, message.tag
                events.add(("moved", (way, action.micro_batch)), end)
    return end
