"""A transport whose ranks are threads of one process: for checks of a program.

It is stricter than MPI. A send is complete only when the matching receive was posted;
ranks that wait for each other are told so at once; messages that nobody received are an
error at the end.
"""

from __future__ import annotations

import os
import pickle
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from gemsc.errors import InternalError
from gemsc.runtime.transport.local_world import (
    Combine,
    Key,
    LocalRequest,
    RankStoppedError,
    World,
)
from gemsc.runtime.transport.streams import Streams
from gemsc.runtime.transport.transport import (
    add_in_order,
    check_memory,
    check_message,
    check_sum,
    members,
    shape_text,
)
from gemsc.runtime.transport.waiting import Request, wait

T = TypeVar("T")

GRACE_SECONDS = 5.0  # for threads to end after a failure


def _add_up(tensors: dict[int, object]) -> None:
    """Put the sum into every tensor, added in ascending rank order."""
    parts = [tensor for tensor in tensors.values() if isinstance(tensor, Tensor)]
    kinds = {shape_text(part) for part in parts}
    if len(kinds) != 1:
        raise InternalError(
            f"an all-reduce of different tensors: {', '.join(sorted(kinds))}"
        )
    with torch.no_grad():
        add_in_order(parts, parts[0])
        for part in parts[1:]:
            part.copy_(parts[0])


Share = tuple[Tensor, list[int], Tensor]  # brought, the members' sizes, the result


def _share(tensor: Tensor, sizes: Sequence[int], result: Tensor) -> Share:
    """Return what a member brings, if its memory can be read."""
    for buffer in (tensor, result):
        check_memory(buffer, cuda_aware=False)
    return tensor.detach(), list(sizes), result.detach()


def _shares(values: dict[int, object]) -> list[Share]:
    """Return what the members brought, if it fits."""
    shares = [value for value in values.values() if isinstance(value, tuple)]
    if len({tuple(sizes) for _, sizes, _ in shares}) != 1:
        raise InternalError("members of a group disagree on their sizes")
    return shares


def _scatter_sums(values: dict[int, object]) -> None:
    shares = _shares(values)
    with torch.no_grad():
        for member, (_, sizes, result) in enumerate(shares):
            add_in_order([torch.split(t, sizes)[member] for t, _, _ in shares], result)


def _gather(values: dict[int, object]) -> None:
    shares = _shares(values)
    with torch.no_grad():
        for _, sizes, result in shares:
            parts = torch.split(result, sizes)
            for part, (tensor, _, _) in zip(parts, shares, strict=True):
                part.copy_(tensor)


def _hand_out(values: dict[int, object]) -> None:
    """Give each rank's box what all ranks brought."""
    pairs = [value for value in values.values() if isinstance(value, tuple)]
    for box, _ in pairs:
        box += [data for _, data in pairs]


@dataclass(frozen=True, eq=False)
class LocalGroup:
    """Some of the threads."""

    _transport: LocalTransport
    ranks: tuple[int, ...]
    _key: str

    def connect(self) -> None:
        """There is nothing to make."""

    def all_reduce(self, tensor: Tensor) -> Request:
        """Start the sum, added in ascending rank order."""
        check_sum(tensor)
        return self._start("all_reduce", tensor.detach(), _add_up)

    def reduce_scatter(
        self, tensor: Tensor, sizes: Sequence[int], result: Tensor
    ) -> Request:
        """Start the sum of which each member gets its part."""
        assert tensor.numel() == sum(sizes)
        assert result.numel() == sizes[self.ranks.index(self._transport.rank)]
        share = _share(tensor, sizes, result)
        return self._start("reduce_scatter", share, _scatter_sums)

    def all_gather(
        self, tensor: Tensor, sizes: Sequence[int], result: Tensor
    ) -> Request:
        """Start to bring all members' tensors together."""
        assert result.numel() == sum(sizes)
        assert tensor.numel() == sizes[self.ranks.index(self._transport.rank)]
        return self._start("all_gather", _share(tensor, sizes, result), _gather)

    def _start(self, name: str, value: object, combine: Combine) -> Request:
        kind = f"{name} {self._key}".rstrip()
        return self._transport.start_collective(
            kind, self.ranks, value, combine, key=self._key
        )


class LocalTransport:
    """One thread's end of the messages."""

    sums_on_device = False

    def __init__(self, world: World, rank: int, *, cuda_aware: bool) -> None:
        self.rank = rank
        self.size = world.size
        self.local_rank = rank
        self.cuda_aware = cuda_aware
        self._world = world
        self._groups: dict[tuple[tuple[int, ...], str], LocalGroup] = {}
        self._num_collectives: dict[tuple[tuple[int, ...], str], int] = {}

    def try_device(self, streams: Streams) -> None:
        """There is nothing to find out."""

    def send(self, tensor: Tensor, dest: int, tag: int) -> Request:
        """Start to send; complete when the receive was posted and the data copied."""
        text = f"send of {shape_text(tensor)} to rank {dest} with tag {tag}"
        return self._post(tensor, dest, (self.rank, dest, tag), text, is_send=True)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Request:
        """Start to receive into a tensor of the message's size and dtype."""
        text = f"receive of {shape_text(tensor)} from rank {source} with tag {tag}"
        return self._post(tensor, source, (source, self.rank, tag), text, is_send=False)

    def _post(
        self, tensor: Tensor, peer: int, key: Key, text: str, *, is_send: bool
    ) -> Request:
        check_message(self, tensor, peer, key[2])
        request = LocalRequest(self._world, text, tensor.detach())
        self._world.post(request, key, is_send=is_send)
        return request

    def wait(self, *requests: Request) -> None:
        """Sleep until all requests are complete; a deadlock is an InternalError."""
        world = self._world
        local = [r for r in requests if isinstance(r, LocalRequest)]
        if len(local) < len(requests):
            wait(*requests)
            return
        with world.changed:
            try:
                while pending := tuple(r for r in local if not r.complete):
                    world.check()
                    world.waiting[self.rank] = pending
                    world.look_for_deadlock()
                    world.check()
                    world.ranks[self.rank].wait()
            finally:
                world.waiting.pop(self.rank, None)

    def progress(self) -> None:
        """Do nothing but hear of failures: copies happen as both ends are posted."""
        with self._world.changed:
            self._world.check()

    def group(self, ranks: tuple[int, ...], key: str = "") -> LocalGroup:
        """Return the group of these ranks."""
        ranks = members(ranks, self.rank)
        return self._groups.setdefault((ranks, key), LocalGroup(self, ranks, key))

    def start_collective(
        self,
        kind: str,
        ranks: tuple[int, ...],
        value: object,
        combine: Combine | None,
        *,
        key: str = "",
    ) -> Request:
        """Start a collective operation of these ranks."""
        number = self._num_collectives.get((ranks, key), 0)
        self._num_collectives[ranks, key] = number + 1
        request = LocalRequest(self._world, f"{kind} of ranks {ranks}")
        place = (ranks, key, number)
        self._world.join(place, request, (self.rank, value), kind, combine)
        return request

    def all_gather_object(self, value: T) -> list[T]:
        """Return every rank's value, by rank; each rank gets its own copies."""
        box: list[bytes] = []
        share, ranks = (box, pickle.dumps(value)), tuple(range(self.size))
        self.wait(self.start_collective("exchange of objects", ranks, share, _hand_out))
        return [pickle.loads(data) for data in box]

    def barrier(self) -> None:
        """Return when all ranks have come here."""
        self.wait(self.start_collective("barrier", tuple(range(self.size)), None, None))

    def abort(self, code: int) -> NoReturn:
        """Wake all ranks with an error."""
        error = RankStoppedError(f"rank {self.rank} aborted with exit code {code}")
        self._world.fail(error, self.rank)
        raise error

    def close(self) -> None:
        """Wait for the others."""
        self.barrier()


@cache
def look_up_operators() -> None:
    """Make the objects that stand for torch's operators, before threads need them.

    Of two threads that are the first to call one in a `TorchDispatchMode`, each makes
    an object. One of them is freed, and torch may go on to use that one: it calls what
    lies there now, or crashes.
    """
    for name in torch._C._dispatch_get_all_op_names():
        space, _, tail = name.partition("::")
        operator, _, overload = tail.partition(".")
        packet = getattr(getattr(torch.ops, space), operator, None)
        getattr(packet, overload or "default", None)


def run_local(
    num_ranks: int,
    main: Callable[[LocalTransport], T],
    timeout: float = 60.0,
    *,
    cuda_aware: bool = False,
    kind: Callable[..., LocalTransport] = LocalTransport,
) -> list[T]:
    """Run `main(transport)` in one thread per rank; return its results by rank.

    `kind` makes a rank's transport.

    Raises:
        BaseException: the first error of any rank, with a note that names the rank.
        InternalError: a deadlock, messages that nobody received, or `timeout` seconds
            in which nothing moved: how long all takes is a matter of the machine.
    """
    look_up_operators()
    world = World(num_ranks)
    results: dict[int, T] = {}
    cores = [*os.sched_getaffinity(0)] if hasattr(os, "sched_setaffinity") else []
    core = {random.SystemRandom().choice(cores)} if cores else set()

    def run(rank: int) -> None:
        if core:  # ranks that wait for each other need a fifth less time on one
            os.sched_setaffinity(0, core)
        try:
            transport = kind(world, rank, cuda_aware=cuda_aware)
            results[rank] = main(transport)
        except BaseException as error:
            world.fail(error, rank)
        finally:
            world.finish(rank)

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(num_ranks)
    ]
    for thread in threads:
        thread.start()
    _join(world, threads, timeout)
    if world.failure is not None:
        failed, error = world.failure
        if failed is not None:
            error.add_note(f"on rank {failed}")
        raise error
    queues = *world.sends.values(), *world.receives.values()
    if left := [request.text for queue in queues for request in queue]:
        raise InternalError(f"messages without a partner: {'; '.join(left)}")
    return [results[rank] for rank in range(num_ranks)]


def _join(world: World, threads: list[threading.Thread], timeout: float) -> None:
    """Wait for the threads; after a failure only for a few seconds more."""
    with world.changed:
        while len(world.finished) < world.size and world.failure is None:
            moves = world.moves
            if not world.changed.wait(timeout) and world.moves == moves:
                message = f"nothing moved for {timeout:g} s: {world.who_waits()}"
                world.fail(InternalError(message))
    last_call = time.monotonic() + GRACE_SECONDS
    for thread in threads:
        thread.join(max(0.0, last_call - time.monotonic()))
