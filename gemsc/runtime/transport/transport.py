"""What ranks need of a message library."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from gemsc.base.dtypes import HALF
from gemsc.errors import InternalError
from gemsc.runtime.transport.streams import Streams
from gemsc.runtime.transport.waiting import Request

T = TypeVar("T")

LARGEST_TAG = 32767  # what the MPI standard guarantees


class Group(Protocol):
    """Some of the ranks, for sums over them."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members, ascending."""

    def connect(self) -> None:
        """Make what sums on the device need, where the transport has any.

        All members call this, in the same order of their groups.
        """

    def all_reduce(self, tensor: Tensor) -> Request:
        """Start the sum over the members, in place; the same bits on every member.

        The tensor is on the CPU, or on the device if the transport `sums_on_device`.
        All members start their sums in the same order.
        bfloat16 and float16 are added in float32 and rounded once.
        """

    def reduce_scatter(
        self, tensor: Tensor, sizes: Sequence[int], result: Tensor
    ) -> Request:
        """Start the sum over the members, of which each gets its part as `result`.

        The flat tensor has `sizes[i]` elements for the i-th member; a member's own ones
        may be its `result`. Terms are added from the first member's to the last one's,
        bfloat16 and float16 as in `all_reduce`: with two members the bits are those of
        `all_reduce`.
        """

    def all_gather(
        self, tensor: Tensor, sizes: Sequence[int], result: Tensor
    ) -> Request:
        """Start to bring all members' flat tensors together in `result`, in order.

        The i-th member brings `sizes[i]` elements.
        """


class Transport(Protocol):
    """Messages between ranks. Nothing blocks but `wait` and the collectives."""

    @property
    def rank(self) -> int:
        """Its number, from 0."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    @property
    def local_rank(self) -> int:
        """Its number among the ranks of one machine: for the choice of a device."""

    @property
    def cuda_aware(self) -> bool:
        """Whether CUDA tensors can be sent and received as they are."""

    @property
    def sums_on_device(self) -> bool:
        """Whether groups that are connected take CUDA tensors, too."""

    def try_device(self, streams: Streams) -> None:
        """Find out what can be done with the device's tensors; all ranks call this."""

    def send(self, tensor: Tensor, dest: int, tag: int) -> Request:
        """Start to send a contiguous tensor; it must not change until that is done."""

    def receive(self, tensor: Tensor, source: int, tag: int) -> Request:
        """Start to receive into a contiguous tensor: exactly its size must come."""

    def wait(self, *requests: Request) -> None:
        """Return when all requests are complete; leave the core to others till then."""

    def progress(self) -> None:
        """Give the library one cheap turn, between two layers for instance."""

    def group(self, ranks: tuple[int, ...], key: str = "") -> Group:
        """Return the group of these ranks, who all ask for it, in the same order.

        Sums of one group start in the same order on all its ranks; groups with
        different keys do not wait for each other.
        """

    def all_gather_object(self, value: T) -> list[T]:
        """Return every rank's small value, by rank."""

    def barrier(self) -> None:
        """Return when all ranks have come here."""

    def abort(self, code: int) -> NoReturn:
        """End all ranks at once with this exit code."""

    def close(self) -> None:
        """Wait for the others and give back what the library holds."""


class LaneTransport(Transport, Protocol):
    """One whose messages have no tags, and which may run one operation at a time.

    From one rank to another they arrive in the order in which they are sent: each needs
    the next receive that is posted there. What a rank starts, messages and sums, it may
    run one after the other, in the order in which they were started, and a message
    takes both of its ends at the same time. Programs say in which order all begin, and
    for that order it is proved that no ranks wait for each other.
    """

    has_lanes: bool

    def as_one(self) -> AbstractContextManager[None]:
        """Return within what messages are started that are one operation.

        It is over when all of them are, in any order.
        """


def members(ranks: Iterable[int], rank: int) -> tuple[int, ...]:
    """Return the members of a group, ascending; an InternalError if `rank` is none."""
    group = tuple(sorted(set(ranks)))
    if rank not in group:
        raise InternalError(f"rank {rank} is not in the group {group}")
    return group


def add_in_order(terms: Sequence[Tensor], result: Tensor) -> None:
    """Put the sum of tensors, added from the first to the last, into `result`.

    bfloat16 and float16 are added in float32 and rounded once.
    """
    half = result.dtype in HALF
    total = terms[0].to(torch.float32) if half else terms[0].clone()
    for term in terms[1:]:
        total += term
    result.copy_(total)


def shape_text(tensor: Tensor) -> str:
    """Return shape and dtype in the form `2x3 float32`."""
    shape = "x".join(str(size) for size in tensor.shape) or "scalar"
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')}"


def check_message(transport: Transport, tensor: Tensor, peer: int, tag: int) -> None:
    """Raise an InternalError for a message that a transport cannot carry."""
    if not 0 <= peer < transport.size:
        raise InternalError(f"no rank {peer}: there are {transport.size} ranks")
    if not 0 <= tag <= LARGEST_TAG:
        raise InternalError(f"tag {tag} is outside 0..{LARGEST_TAG}")
    check_memory(tensor, cuda_aware=transport.cuda_aware)


def check_memory(tensor: Tensor, *, cuda_aware: bool) -> None:
    """Raise an InternalError unless the library can read the tensor's memory."""
    if not tensor.is_contiguous():
        raise InternalError(f"{shape_text(tensor)} with gaps: make it contiguous first")
    if tensor.device.type != "cpu" and not (tensor.is_cuda and cuda_aware):
        raise InternalError(
            f"{shape_text(tensor)} on {tensor.device}: this transport carries "
            f"{'CPU and CUDA' if cuda_aware else 'CPU'} tensors"
        )


def check_sum(tensor: Tensor, *, on_device: bool = False) -> None:
    """Raise an InternalError for a tensor that cannot be summed over ranks.

    MPI takes CPU tensors only: libraries that carry CUDA tensors in messages do not do
    so in non-blocking sums.
    """
    check_memory(tensor, cuda_aware=on_device)
    if tensor.dtype == torch.bool or tensor.is_complex():
        raise InternalError(f"no all-reduce for {shape_text(tensor)}")
