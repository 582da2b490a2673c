"""Threads whose messages have no tags, and whose ranks run one operation at a time.

    rank 0   send X | sum | receive G        the first of each row is what it runs
    rank 1   receive X | receive G ...

A message moves when both ends run it, a sum when all members do; what a rank started
`as_one` is one operation. That is the strictest that an engine without tags may be.
Each call waits for a while first, which the seed decides.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from gemsc.errors import InternalError
from gemsc.runtime.transport.local import LocalTransport, run_local
from gemsc.runtime.transport.local_world import LocalRequest, copy_message
from gemsc.runtime.transport.transport import check_message, shape_text
from gemsc.runtime.transport.waiting import Request

__all__ = ["Lanes", "run_in_lanes"]

CONTROL = ("losses", "")  # groups that are no part of a device's work
LONGEST_DELAY = 5e-4  # seconds


@dataclass(eq=False)
class Part:
    """One end of a message, or one member's part of a sum."""

    request: LocalRequest
    peer: int = -1
    tag: int = -1
    sends: bool = False
    start: Any = None  # of a sum: what brings it to the others
    begun: bool = False


@dataclass(eq=False)
class Operation:
    parts: list[Part] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return all(part.request.complete for part in self.parts)

    def end_with(self, peer: int, *, sends: bool) -> Part | None:
        """Return the first end of a message with a rank that is still to come."""
        for part in self.parts:
            fits = part.start is None and part.peer == peer and part.sends == sends
            if fits and not part.request.complete:
                return part
        return None


_rows: WeakKeyDictionary[Any, list[deque[Operation]]] = WeakKeyDictionary()


class Lanes(LocalTransport):
    """One thread's end."""

    has_lanes = True

    def __init__(self, world: Any, rank: int, *, cuda_aware: bool = False) -> None:
        super().__init__(world, rank, cuda_aware=cuda_aware)
        with world.changed:
            rows = _rows.setdefault(world, [deque() for _ in range(world.size)])
        self._rows = rows
        self._open: Operation | None = None
        self._rng = random.Random(rank)

    @contextmanager
    def as_one(self) -> Iterator[None]:
        assert self._open is None
        self._open = Operation()
        try:
            yield
        finally:
            operation, self._open = self._open, None
        if operation.parts:
            self._start(operation)

    def _post(
        self, tensor: Tensor, peer: int, key: Any, text: str, *, is_send: bool
    ) -> Request:
        tag = key[2]
        check_message(self, tensor, peer, tag)
        text = f"{'send' if is_send else 'receive'} of {shape_text(tensor)}, tag {tag}"
        request = LocalRequest(self._world, text, tensor.detach())
        part = Part(request, peer, tag, is_send)
        if self._open is not None:
            self._open.parts.append(part)
        else:
            self._start(Operation([part]))
        return request

    def start_collective(
        self, kind: str, ranks: Any, value: Any, combine: Any, *, key: str = ""
    ) -> Request:
        if key in CONTROL:
            return super().start_collective(kind, ranks, value, combine, key=key)
        number = self._num_collectives.get((ranks, key), 0)
        self._num_collectives[ranks, key] = number + 1
        request = LocalRequest(self._world, f"{kind} of ranks {ranks}")
        place, share = (ranks, key, number), (self.rank, value)

        def start() -> None:
            self._world.join(place, request, share, kind, combine)

        self._start(Operation([Part(request, start=start)]))
        return request

    def _start(self, operation: Operation) -> None:
        time.sleep(self._rng.random() * LONGEST_DELAY)
        with self._world.changed:
            self._world.check()
            self._rows[self.rank].append(operation)
            while any([self._move(rank) for rank in range(self.size)]):
                pass

    def _move(self, rank: int) -> bool:
        """Let what a rank runs go on; return whether it did."""
        row = self._rows[rank]
        if not row:
            return False
        moved = False
        for part in row[0].parts:
            if part.start is not None:
                if not part.begun:
                    part.begun = True
                    part.start()
                    moved = True
            elif part.sends and not part.request.complete:
                moved |= self._deliver(rank, part, row[0])
        if row[0].is_over:
            row.popleft()
            return True
        return moved

    def _deliver(self, rank: int, part: Part, running: Operation) -> bool:
        row = self._rows[part.peer]
        there = row[0].end_with(rank, sends=False) if row else None
        if there is None or running.end_with(part.peer, sends=True) is not part:
            return False
        if there.tag != part.tag:
            raise InternalError(f"{there.request.text} gets {part.request.text}")
        copy_message(part.request, there.request)
        self._world.moved()
        return True


def run_in_lanes(num_ranks: int, main: Any, timeout: float = 60.0) -> list[Any]:
    """Run `main(transport)` in one thread per rank; return its results by rank."""
    return run_local(num_ranks, main, timeout, kind=Lanes)
