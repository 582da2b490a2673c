"""A graph of events, each after others, and the search for a cycle in it."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable

__all__ = ["Event", "Events"]

Event = tuple[str, Hashable]


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
