"""What the threads of a local transport share: their messages, sums and failures."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gemsc.errors import InternalError

Key = tuple[int, int, int]  # source, destination, tag
CallSite = tuple[tuple[int, ...], str, int]  # ranks, key of the group, its sum
Combine = Callable[[dict[int, object]], None]


class RankStoppedError(Exception):
    """Another rank failed; this one was woken to end."""


@dataclass(eq=False)
class LocalRequest:
    """One send, receive or collective of one rank."""

    world: World
    text: str
    tensor: Tensor | None = None
    complete: bool = False

    def done(self) -> bool:
        """Whether it is complete; an error if another rank has failed meanwhile."""
        with self.world.changed:
            if not self.complete:
                self.world.check()
            return self.complete


@dataclass(eq=False)
class Collective:
    """What the ranks brought so far to one barrier, sum or exchange."""

    kind: str
    values: dict[int, object] = field(default_factory=dict)
    requests: list[LocalRequest] = field(default_factory=list)


class World:
    """All that the threads share; `changed` guards it."""

    def __init__(self, size: int) -> None:
        self.size = size
        lock = threading.RLock()
        self.changed = threading.Condition(lock)  # a rank has ended, or the job failed
        self.ranks = [threading.Condition(lock) for _ in range(size)]
        self.moves = 0  # messages and collectives that are complete
        self.sends: dict[Key, deque[LocalRequest]] = {}
        self.receives: dict[Key, deque[LocalRequest]] = {}
        self.collectives: dict[CallSite, Collective] = {}
        self.waiting: dict[int, tuple[LocalRequest, ...]] = {}
        self.finished: set[int] = set()
        self.failure: tuple[int | None, BaseException] | None = None

    def check(self) -> None:
        """Raise an error if a rank has failed."""
        if self.failure is not None:
            rank, error = self.failure
            where = "the job" if rank is None else f"rank {rank}"
            raise RankStoppedError(f"{where} failed: {error}")

    def fail(self, error: BaseException, rank: int | None = None) -> None:
        """Let all ranks hear of a failure; the first one counts."""
        with self.changed:
            if self.failure is None:
                self.failure = (rank, error)
            for condition in (self.changed, *self.ranks):
                condition.notify()

    def finish(self, rank: int) -> None:
        """Note that a rank has ended."""
        with self.changed:
            self.finished.add(rank)
            self.look_for_deadlock()
            self.changed.notify_all()

    def moved(self) -> None:
        """Wake the ranks that have all that they wait for."""
        self.moves += 1
        for rank, requests in self.waiting.items():
            if all(request.complete for request in requests):
                self.ranks[rank].notify()

    def post(self, request: LocalRequest, key: Key, *, is_send: bool) -> None:
        """Start one end of a message; the second end copies it."""
        queues = self.sends, self.receives
        mine, others = queues if is_send else reversed(queues)
        with self.changed:
            self.check()
            queue = others.get(key)
            if not queue:
                mine.setdefault(key, deque()).append(request)
                return
            partner = queue.popleft()
            send, receive = (request, partner) if is_send else (partner, request)
            copy_message(send, receive)
            self.moved()

    def join(
        self,
        key: CallSite,
        request: LocalRequest,
        contribution: tuple[int, object],
        kind: str,
        combine: Combine | None,
    ) -> None:
        """Bring one rank's value; the last to come combines them, in rank order."""
        ranks, *_ = key
        with self.changed:
            self.check()
            operation = self.collectives.setdefault(key, Collective(kind))
            if operation.kind != kind:
                raise InternalError(
                    f"{kind} here, but {operation.kind} on other ranks of {ranks}"
                )
            rank, value = contribution
            operation.values[rank] = value
            operation.requests.append(request)
            if len(operation.values) < len(ranks):
                return
            del self.collectives[key]
            if combine is not None:
                combine({rank: operation.values[rank] for rank in ranks})
            operation.values.clear()  # what others go on with is theirs alone
            for member in operation.requests:
                member.complete = True
            self.moved()

    def look_for_deadlock(self) -> None:
        """Fail if every rank that still runs waits for something that cannot come."""
        if self.failure is not None or len(self.finished) == self.size:
            return
        for rank in {*range(self.size)} - self.finished:
            if all(request.complete for request in self.waiting.get(rank, ())):
                return
        self.fail(InternalError(f"deadlock: {self.who_waits()}"))

    def who_waits(self) -> str:
        """Say of each rank what it waits for."""
        lines = []
        for rank in range(self.size):
            texts = [r.text for r in self.waiting.get(rank, ()) if not r.complete]
            if rank in self.finished:
                texts = ["nothing, it has finished"]
            lines.append(f"rank {rank} waits for {' and '.join(texts) or 'nothing'}")
        return "; ".join(lines)


def copy_message(send: LocalRequest, receive: LocalRequest) -> None:
    """Copy a message to where it is received; both ends are then complete."""
    source, target = send.tensor, receive.tensor
    assert source is not None
    assert target is not None
    if source.dtype != target.dtype or source.numel() != target.numel():
        raise InternalError(
            f"a message does not fit: {send.text}, but {receive.text} at the other end"
        )
    with torch.no_grad():
        target.view(-1).copy_(source.view(-1))
        if target.is_cuda:
            torch.cuda.current_stream(target.device).synchronize()
    send.complete = receive.complete = True
    send.tensor = receive.tensor = None
