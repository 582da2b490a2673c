"""Sums and gathers over some of the ranks, by MPI.

    all-reduce        MPI_Iallreduce, in pieces
      of 16 bit floats, large ones: the next two, one after the other
    reduce-scatter    each member gets all terms of its part, and adds them up
    all-gather        each member sends its part to all others

16 bit floats are added in float32 and rounded once. MPI would add them in 16 bits, so
small ones travel as float32, and large ones as they are: half of the bytes, twice the
messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gemsc.base.dtypes import HALF
from gemsc.errors import InternalError
from gemsc.runtime.transport.mpi_messages import (
    ChainedRequest,
    InSteps,
    Lane,
    TestRequest,
    Then,
)
from gemsc.runtime.transport.transport import (
    LARGEST_TAG,
    add_in_order,
    check_memory,
    check_sum,
    shape_text,
)
from gemsc.runtime.transport.waiting import Awaited, Request

if TYPE_CHECKING:
    from mpi4py import MPI

# Open MPI takes new memory of a sum's size for each: from here on that takes longer
PIECE_BYTES = 8 * 2**20
MOST_PIECES = 64  # in flight at once
LARGEST_PIECE = 2**30  # elements; counts have 31 bits before MPI 4
HALVES_BYTES = 2**20  # from here on 16 bit floats travel as they are


class MpiGroup:
    """Some of the ranks, with a communicator of their own; `name` is for reports."""

    def __init__(
        self,
        mpi: Any,
        comm: MPI.Intracomm,
        ranks: tuple[int, ...],
        name: str,
        turns: InSteps,
    ) -> None:
        self.ranks = ranks
        self._name = name
        self._mpi = mpi
        self._comm = comm
        self._turns = turns
        self._lane = Lane(mpi, comm, InSteps())  # of its own: a turn takes all of them
        self._member = comm.Get_rank()
        self._count = 0  # of the exchanges so far, the same on all members
        self._types: dict[torch.dtype, MPI.Datatype] = {
            torch.float32: mpi.FLOAT,
            torch.float64: mpi.DOUBLE,
            torch.uint8: mpi.UINT8_T,
            torch.int8: mpi.INT8_T,
            torch.int16: mpi.INT16_T,
            torch.int32: mpi.INT32_T,
            torch.int64: mpi.INT64_T,
        }

    def connect(self) -> None:
        """There is nothing to make: sums go through the host."""

    def all_reduce(self, tensor: Tensor) -> Request:
        """Start the sum, in pieces."""
        check_sum(tensor)
        tensor = tensor.detach()
        if len(self.ranks) == 1 or not tensor.numel():
            return self._chained("sum", ())
        if tensor.dtype not in HALF:
            return self._chained("sum", self._sums(tensor), kept=(tensor,))
        if tensor.nbytes >= HALVES_BYTES:
            return self._sum_of_halves(tensor)
        staged = tensor.to(torch.float32)

        def finish() -> None:
            tensor.copy_(staged)

        kept = (tensor, staged)
        return self._chained("sum", self._sums(staged), finish, kept=kept)

    def _sums(self, tensor: Tensor) -> list[Request]:
        """Start the sum of each piece of a tensor."""
        if tensor.dtype not in self._types:
            raise InternalError(f"no all-reduce for {shape_text(tensor)}")
        kind, need = self._types[tensor.dtype], self._need("sum")
        size = max(PIECE_BYTES // tensor.itemsize, -(-tensor.numel() // MOST_PIECES))
        requests: list[Request] = []
        for piece in torch.split(tensor.view(-1), min(size, LARGEST_PIECE)):
            buffer = [self._buffer(piece), kind]
            sum_ = self._comm.Iallreduce(self._mpi.IN_PLACE, buffer, self._mpi.SUM)
            requests.append(TestRequest(InSteps(), sum_, need))
        return requests

    def _sum_of_halves(self, tensor: Tensor) -> Request:
        """Start the sum of 16 bit floats: first of each member's part, then gather."""
        tag, members = self._next_tag(), len(self.ranks)
        parts = tensor.view(-1).tensor_split(members)
        part = parts[self._member]
        arrived = [torch.empty_like(part) for _ in parts]
        terms = [*arrived]
        terms[self._member] = part

        def gather() -> list[Request]:
            add_in_order(terms, part)
            return self._exchange(tag, [part] * members, parts, "sum")

        first = self._exchange(tag, parts, arrived, "sum")
        chain = self._chained("sum", first, gather, kept=(tensor, *arrived))
        self._turns.add(chain)
        return chain

    def reduce_scatter(
        self, tensor: Tensor, sizes: Sequence[int], result: Tensor
    ) -> Request:
        """Start the sum: all members exchange their terms, each adds up its own part.

        The libraries' own non-blocking one sums all of it on one rank first.
        """
        tensor, result = tensor.detach(), result.detach()
        check_memory(tensor, cuda_aware=False)
        parts = torch.split(tensor, list(sizes))
        part, members = parts[self._member], range(len(parts))
        terms = [part if m == self._member else torch.empty_like(part) for m in members]
        what, add = "sum of shares", partial(add_in_order, terms, result)
        requests = self._exchange(self._next_tag(), parts, terms, what)
        return self._chained(what, requests, add, kept=(tensor, result))

    def all_gather(
        self, tensor: Tensor, sizes: Sequence[int], result: Tensor
    ) -> Request:
        """Start to bring all members' tensors together."""
        tensor, result = tensor.detach(), result.detach()
        check_memory(tensor, cuda_aware=False)
        check_memory(result, cuda_aware=False)
        parts = torch.split(result, list(sizes))
        parts[self._member].copy_(tensor)
        what = "gathering"
        requests = self._exchange(self._next_tag(), [tensor] * len(parts), parts, what)
        return self._chained(what, requests, kept=(tensor, result))

    def _chained(
        self,
        what: str,
        requests: Sequence[Request],
        *then: Then,
        kept: tuple[Tensor, ...] = (),
    ) -> ChainedRequest:
        need = self._need(what)
        return ChainedRequest(self._turns, need, requests, *then, tensors=kept)

    def _next_tag(self) -> int:
        """Return a tag that no other exchange in flight has, the same on all members.

        Sums of several steps may go on in another order than they began.
        """
        self._count = (self._count + 1) % LARGEST_TAG
        return self._count

    def _exchange(
        self, tag: int, ours: Sequence[Tensor], theirs: Sequence[Tensor], what: str
    ) -> list[Request]:
        """Start to send each other member a tensor, and to receive one."""
        need = self._need(what)
        others = [i for i in range(len(self.ranks)) if i != self._member]
        return [
            *(self._lane.receive(theirs[i], i, tag, need) for i in others),
            *(self._lane.send(ours[i], i, tag, need) for i in others),
        ]

    def _need(self, what: str) -> Awaited:
        return Awaited(f"the {what} '{self._name}'", self.ranks)

    def _buffer(self, tensor: Tensor) -> MPI.buffer:
        check_memory(tensor, cuda_aware=False)
        buffer: MPI.buffer = self._mpi.buffer.fromaddress(
            tensor.data_ptr(), tensor.nbytes
        )
        return buffer

    def free(self) -> None:
        """Give the communicator back."""
        if len(self.ranks) > 1:
            self._comm.Free()
