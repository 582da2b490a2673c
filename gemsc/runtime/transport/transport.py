"""What ranks need of a message library, and how to wait without burning a core."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from gemsc.errors import InternalError
from gemsc.runtime.transport.doorbell import Doorbell

__all__ = [
    "LARGEST_TAG",
    "Group",
    "Request",
    "Transport",
    "check_message",
    "check_sum",
    "describe",
    "wait_for_rings",
    "wait_politely",
]

LARGEST_TAG = 32767  # what the MPI standard guarantees


class Request(Protocol):
    """One operation in flight."""

    def done(self) -> bool:
        """Give the library a turn; True once complete, and from then on."""
        ...


class Group(Protocol):
    """Some of the ranks, for sums over them."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members, ascending."""
        ...

    def all_reduce(self, tensor: Tensor) -> Request:
        """Start the sum over the members, in place; the same bits on every member.

        The tensor is on the CPU. All members start their sums in the same order.
        bfloat16 and float16 are added in float32 and rounded once.
        """
        ...


class Transport(Protocol):
    """Messages between ranks. Nothing blocks but `wait` and the collectives."""

    @property
    def rank(self) -> int:
        """Its number, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    @property
    def local_rank(self) -> int:
        """Its number among the ranks of one machine: for the choice of a device."""
        ...

    @property
    def local_size(self) -> int:
        """How many ranks its machine has: they share the cores."""
        ...

    @property
    def cuda_aware(self) -> bool:
        """Whether CUDA tensors can be sent and received as they are."""
        ...

    def send(self, tensor: Tensor, dest: int, tag: int) -> Request:
        """Start to send a contiguous tensor; it must not change until that is done."""
        ...

    def receive(self, tensor: Tensor, source: int, tag: int) -> Request:
        """Start to receive into a contiguous tensor: exactly its size must come."""
        ...

    def wait(self, *requests: Request) -> None:
        """Return when all requests are complete; leave the core to others till then."""
        ...

    def progress(self) -> None:
        """Give the library one cheap turn, between two layers for instance."""
        ...

    def group(self, ranks: tuple[int, ...], key: str = "") -> Group:
        """Return the group of these ranks, who all ask for it, in the same order.

        Sums of one group start in the same order on all its ranks; groups with
        different keys do not wait for each other.
        """
        ...

    def all_gather_object(self, value: object) -> list[object]:
        """Return every rank's small value, by rank."""
        ...

    def broadcast_object(self, value: object, root: int = 0) -> object:
        """Return the root's small value on every rank."""
        ...

    def barrier(self) -> None:
        """Return when all ranks have come here."""
        ...

    def abort(self, code: int) -> NoReturn:
        """End all ranks at once with this exit code."""
        ...

    def close(self) -> None:
        """Wait for the others and give back what the library holds."""
        ...


def describe(tensor: Tensor) -> str:
    """Return shape and dtype in the form `2x3 float32`."""
    shape = "x".join(str(size) for size in tensor.shape) or "scalar"
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')}"


def check_message(
    tensor: Tensor, peer: int, tag: int, *, size: int, cuda_aware: bool
) -> None:
    """Raise an InternalError for a message that no transport can carry."""
    if not 0 <= peer < size:
        raise InternalError(f"no rank {peer}: there are {size} ranks")
    if not 0 <= tag <= LARGEST_TAG:
        raise InternalError(f"tag {tag} is outside 0..{LARGEST_TAG}")
    check_memory(tensor, cuda_aware=cuda_aware)


def check_memory(tensor: Tensor, *, cuda_aware: bool) -> None:
    """Raise an InternalError unless the library can read the tensor's memory."""
    if not tensor.is_contiguous():
        raise InternalError(f"{describe(tensor)} with gaps: make it contiguous first")
    if tensor.device.type != "cpu" and not (tensor.is_cuda and cuda_aware):
        raise InternalError(
            f"{describe(tensor)} on {tensor.device}: this transport carries "
            f"{'CPU and CUDA' if cuda_aware else 'CPU'} tensors"
        )


def check_sum(tensor: Tensor) -> None:
    """Raise an InternalError for a tensor that cannot be summed over ranks.

    Sums take CPU tensors only: MPI libraries that carry CUDA tensors in messages do not
    do so in non-blocking sums.
    """
    check_memory(tensor, cuda_aware=False)
    if tensor.dtype == torch.bool or tensor.is_complex():
        raise InternalError(f"no all-reduce for {describe(tensor)}")


# Waiting. A blocking MPI call polls without pause and takes 98 % of a core. Where those
# who complete the requests ring, a rank sleeps until then. Otherwise a few turns come
# at once, then sleeps that grow with the time waited so far:
#
#     turn turn turn ... | turn 20us turn 20us ... turn 2ms turn 2ms ...
#     ---- 60 us ------- | ---- sleep = 1/8 of the wait, 20 us to 2 ms ---
#
# so that a wait lasts at most about 1/8 longer than the message needs, and a rank that
# waits long takes 1 to 3 % of a core. A library without single copy moves a large
# message piece by piece, a few pieces a turn: two turns on end that took much longer
# than the quickest one moved data (one may be a cold wake-up), and the next follows at
# once. benchmarks/transport.py has the figures.

SPIN_SECONDS = 60e-6
SHORTEST_SLEEP = 20e-6
LONGEST_SLEEP = 2e-3
SLEEP_SHARE = 1 / 8
LONGEST_SLEEP_WITH_BELL = 0.1
MOVED_DATA_RATIO = 4  # of a turn that moved data to the quickest turn
MOVED_DATA_SECONDS = 15e-6  # shorter turns are never taken for one

_PR_SET_TIMERSLACK = 29
_prepared = threading.local()


def _sleep_precisely() -> None:
    """Ask Linux to end this thread's sleeps on time, not up to 50 us later."""
    if getattr(_prepared, "done", False):
        return
    _prepared.done = True
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


def wait_for_rings(requests: Sequence[Request], bell: Doorbell) -> None:
    """Return when all requests are complete; whoever completes one rings."""
    pending = list(requests)
    while pending := [request for request in pending if not request.done()]:
        bell.sleep(LONGEST_SLEEP_WITH_BELL)


def wait_politely(requests: Sequence[Request], bell: Doorbell | None = None) -> None:
    """Return when all requests are complete; sleep between turns for the library.

    A ring of `bell` ends a sleep.
    """
    now = started = time.perf_counter()
    quickest_turn = 1.0
    long_turns = 0
    pending = list(requests)
    while pending := [request for request in pending if not request.done()]:
        before, now = now, time.perf_counter()
        turn = now - before
        quickest_turn = min(quickest_turn, turn)
        long = turn > max(MOVED_DATA_SECONDS, MOVED_DATA_RATIO * quickest_turn)
        long_turns = long_turns + 1 if long else 0
        if now - started < SPIN_SECONDS:
            _yield_core()
        elif long_turns > 1:
            started = now - SPIN_SECONDS  # data flow: short sleeps again
            _yield_core()
        else:
            pause = (now - started) * SLEEP_SHARE
            pause = min(max(pause, SHORTEST_SLEEP), LONGEST_SLEEP)
            if _sleep(pause, bell):
                started = time.perf_counter()
        now = time.perf_counter()


def _sleep(seconds: float, bell: Doorbell | None) -> bool:
    """Sleep; return whether somebody rang."""
    _sleep_precisely()
    if bell is not None:
        return bell.sleep(seconds)
    time.sleep(seconds)
    return False


def _yield_core() -> None:
    if hasattr(os, "sched_yield"):
        os.sched_yield()
