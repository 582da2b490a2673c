"""Turns: messages and sums begin in the order that has been proved.

Where messages have tags, only receives keep an order, that of their source, and all
else begins at once. Where they have none, everything has one order:

    order    X   Y   G   X        Y waits for X: not until that is sent can it be
    offered  Y .......... X
    begun                 X Y     then the receive of G may be posted
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable

from gemsc.errors import InternalError


class Turns:
    """Begins what it is offered when all before it in its lane have begun.

    `lane` says which one an entry of the order is in; None is in no order.
    """

    def __init__(self, lane: Callable[[Hashable], Hashable | None]) -> None:
        self._lane = lane
        self._to_come: dict[Hashable, deque[Hashable]] = {}
        self._offered: dict[Hashable, deque[Callable[[], None]]] = {}

    def begin(self, order: Iterable[Hashable]) -> None:
        """Expect these entries, each as often as it is there."""
        self._to_come, self._offered = defaultdict(deque), defaultdict(deque)
        for entry in order:
            lane = self._lane(entry)
            if lane is not None:
                self._to_come[lane].append(entry)

    def offer(self, entry: Hashable, start: Callable[[], None]) -> None:
        """Begin an entry, now or when its turn comes."""
        lane = self._lane(entry)
        if lane is None:
            start()
            return
        self._offered[entry].append(start)
        to_come = self._to_come[lane]
        while to_come and self._offered[to_come[0]]:
            self._offered[to_come.popleft()].popleft()()

    def expect(self, entry: Hashable) -> None:
        """Raise an InternalError unless it is the turn of this entry."""
        lane = self._lane(entry)
        if lane is None:
            return
        if (first := self.next(lane)) != entry:
            first = first or "nothing"
            raise InternalError(f"it is the turn of {first}, not of {entry}")

    def next(self, lane: Hashable) -> Hashable | None:
        """Return what a lane waits for; None if all of it has begun."""
        to_come = self._to_come[lane]
        return to_come[0] if to_come else None

    def end(self) -> None:
        """Raise an InternalError unless all has begun."""
        left = [entry for to_come in self._to_come.values() for entry in to_come]
        if left:
            raise InternalError(f"{len(left)} turns have not come: {left[0]} is first")
