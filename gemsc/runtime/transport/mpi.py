"""The transport of real jobs: MPI, through mpi4py."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy
import torch
from torch import Tensor

from gemsc.base.process import end_with_launcher
from gemsc.errors import GemscError, InternalError
from gemsc.runtime.transport.launcher import check_size, start_mpi
from gemsc.runtime.transport.streams import Streams
from gemsc.runtime.transport.transport import (
    add_in_order,
    check_memory,
    check_message,
    check_sum,
    shape_text,
)
from gemsc.runtime.transport.trial import may_carry, try_message
from gemsc.runtime.transport.waiting import (
    Awaited,
    Request,
    Wait,
    check_in_waits,
    check_no_more,
    wait,
)

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

LEFT_SECONDS = 2.0  # for what a rank has sent before it left
LAST_SECONDS = 5.0  # for the library to end all ranks
LARGEST_PIECE = 2**30  # bytes; counts have 31 bits before MPI 4


class _MessageRequest:
    """A send, or a receive with a `status`; keeps the tensor until it is complete."""

    __slots__ = ("_mpi", "_pieces", "_status", "_tensor", "need")

    def __init__(
        self,
        mpi: Any,
        pieces: list[tuple[MPI.Request, int]],
        status: MPI.Status | None,
        tensor: Tensor,
        need: Awaited,
    ) -> None:
        self._mpi = mpi
        self._pieces = pieces  # with the bytes of each
        self._status = status
        self._tensor: Tensor | None = tensor
        self.need = need

    def done(self) -> bool:
        while self._pieces:
            request, num_bytes = self._pieces[0]
            try:
                complete = request.Test(self._status)
            except self._mpi.Exception as error:
                raise InternalError(f"{self.need.what}: {error}") from error
            if not complete:
                return False
            del self._pieces[0]
            if self._status is not None:  # MPI complains of longer messages only
                count = self._status.Get_count(self._mpi.BYTE)
                if count != num_bytes:
                    text = f"{self.need.what}: {count} bytes came, not {num_bytes}"
                    raise InternalError(text)
        self._tensor = None
        return True


class _CollectiveRequest:
    """A collective operation in flight; keeps its tensors, and ends with `then`."""

    __slots__ = ("_request", "_tensors", "_then", "need")

    def __init__(
        self,
        request: MPI.Request | None,
        need: Awaited,
        tensors: tuple[Tensor, ...] = (),
        then: Callable[[], object] | None = None,
    ) -> None:
        self._request = request
        self.need = need
        self._tensors = tensors
        self._then = then

    def done(self) -> bool:
        if self._request is None:
            return True
        if not self._request.Test():
            return False
        if self._then is not None:
            self._then()
        self._request, self._tensors, self._then = None, (), None
        return True


class _TestRequest:
    """Any other operation."""

    __slots__ = ("_request", "need")

    def __init__(self, request: MPI.Request, need: Awaited) -> None:
        self._request = request
        self.need = need

    def done(self) -> bool:
        return self._request.Test()


class MpiGroup:
    """Some of the ranks, with a communicator of their own; `name` is for reports."""

    def __init__(
        self, mpi: Any, comm: MPI.Intracomm, ranks: tuple[int, ...], name: str
    ) -> None:
        self.ranks = ranks
        self._name = name
        self._mpi = mpi
        self._comm = comm
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
        """Start the sum; 16 bit floats travel and are added as float32."""
        check_sum(tensor)
        tensor = tensor.detach()
        if len(self.ranks) == 1:
            return _CollectiveRequest(None, self._need("sum"))
        half = tensor.dtype in (torch.bfloat16, torch.float16)
        staged = tensor.to(torch.float32) if half else tensor
        if staged.dtype not in self._types:
            raise InternalError(f"no all-reduce for {shape_text(tensor)}")
        request = self._comm.Iallreduce(
            self._mpi.IN_PLACE,
            [self._buffer(staged), self._types[staged.dtype]],
            self._mpi.SUM,
        )
        then = partial(tensor.copy_, staged) if staged is not tensor else None
        need = self._need("sum")
        return _CollectiveRequest(request, need, (tensor, staged), then)

    def reduce_scatter(
        self, tensor: Tensor, sizes: Sequence[int], result: Tensor
    ) -> Request:
        """Start the sum: all members exchange their terms, each adds up its own part.

        The libraries' own non-blocking one sums all of it on one rank first.
        """
        tensor, result = tensor.detach(), result.detach()
        me, size = self._comm.Get_rank(), result.numel()
        sent, wanted = list(sizes), [size] * len(sizes)
        sent[me] = wanted[me] = 0
        arrived = tensor.new_empty(sum(wanted))
        request = self._comm.Ialltoallv(
            [self._buffer(tensor), (sent, _starts(sizes)), self._unit(tensor)],
            [self._buffer(arrived), (wanted, _starts(wanted)), self._unit(tensor)],
        )
        terms = list(torch.split(arrived, wanted))
        terms[me] = torch.split(tensor, list(sizes))[me]
        then = partial(add_in_order, terms, result)
        need = self._need("sum of shares")
        return _CollectiveRequest(request, need, (tensor, arrived, result), then)

    def all_gather(
        self, tensor: Tensor, sizes: Sequence[int], result: Tensor
    ) -> Request:
        """Start to bring all members' tensors together."""
        tensor, result = tensor.detach(), result.detach()
        request = self._comm.Iallgatherv(
            [self._buffer(tensor), self._unit(tensor)],
            [self._buffer(result), (list(sizes), _starts(sizes)), self._unit(result)],
        )
        return _CollectiveRequest(request, self._need("gathering"), (tensor, result))

    def _need(self, what: str) -> Awaited:
        return Awaited(f"the {what} '{self._name}'", self.ranks)

    def _buffer(self, tensor: Tensor) -> MPI.buffer:
        check_memory(tensor, cuda_aware=False)
        found: MPI.buffer = self._mpi.buffer.fromaddress(
            tensor.data_ptr(), tensor.nbytes
        )
        return found

    def _unit(self, tensor: Tensor) -> MPI.Datatype:
        """Return a type as large as the tensor's elements, to move them."""
        mpi, size = self._mpi, tensor.itemsize
        types = mpi.UINT8_T, mpi.UINT16_T, mpi.UINT32_T, mpi.UINT64_T
        found: MPI.Datatype = (*types, mpi.C_DOUBLE_COMPLEX)[size.bit_length() - 1]
        return found

    def free(self) -> None:
        """Give the communicator back."""
        if len(self.ranks) > 1:
            self._comm.Free()


class MpiTransport:
    """One rank's end of the messages.

    Messages, control data and every group have a communicator of their own, apart from
    whatever else uses MPI in this process.
    """

    sums_on_device = False

    def __init__(self) -> None:
        end_with_launcher()
        self._mpi = start_mpi()
        world: MPI.Intracomm = self._mpi.COMM_WORLD
        self.rank = world.Get_rank()
        self.size = world.Get_size()
        check_size(self.size, self._mpi.Get_library_version())
        self._messages = world.Dup()
        self._control = world.Dup()
        self._groups: dict[tuple[tuple[int, ...], str], MpiGroup] = {}
        self._is_open = True
        self._left: dict[int, float] = {}  # when this rank has heard of it
        check_in_waits(self._check_left)
        self.cuda_aware = False
        self._neighbours = self._find_neighbours()

    def _find_neighbours(self) -> list[int]:
        """Return the ranks of this machine, ascending."""
        machine = self._control.Split_type(self._mpi.COMM_TYPE_SHARED, self.rank)
        try:
            return machine.allgather(self.rank)
        finally:
            machine.Free()

    @property
    def local_rank(self) -> int:
        """Its number among the ranks of one machine."""
        return self._neighbours.index(self.rank)

    @property
    def local_size(self) -> int:
        """How many ranks its machine has."""
        return len(self._neighbours)

    def try_device(self, streams: Streams) -> None:
        """Send memory of the device from each rank to the next; see `cuda_aware`."""
        may, note = may_carry(streams.device)
        self.cuda_aware = self.size > 1 and all(self.all_gather_object(may))
        if self.cuda_aware:
            arrived = self.all_gather_object(try_message(self, streams))
            self.cuda_aware = all(arrived)
            if not self.cuda_aware:
                note = "MPI changes messages of GPU memory: they go through the host"
        if note and self.rank == 0:
            print(f"note: {note}", file=sys.stderr, flush=True)  # noqa: T201

    def send(self, tensor: Tensor, dest: int, tag: int) -> Request:
        """Start to send the tensor's bytes."""
        pieces = self._post(self._messages.Isend, tensor, dest, tag)
        need = Awaited(f"message {tag} from rank {self.rank} to rank {dest}", (dest,))
        return _MessageRequest(self._mpi, pieces, None, tensor, need)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Request:
        """Start to receive into the tensor's bytes."""
        pieces = self._post(self._messages.Irecv, tensor, source, tag)
        need = Awaited(
            f"message {tag} from rank {source} to rank {self.rank}", (source,)
        )
        return _MessageRequest(self._mpi, pieces, self._mpi.Status(), tensor, need)

    def _post(
        self, start: Callable[..., MPI.Request], tensor: Tensor, peer: int, tag: int
    ) -> list[tuple[MPI.Request, int]]:
        """Start an operation on each piece of the tensor's bytes."""
        check_message(tensor, peer, tag, size=self.size, cuda_aware=self.cuda_aware)
        address, left = tensor.data_ptr(), tensor.nbytes
        pieces: list[tuple[MPI.Request, int]] = []
        while left or not pieces:
            num_bytes = min(left, LARGEST_PIECE)
            buffer = self._mpi.buffer.fromaddress(address, num_bytes)
            pieces.append((start([buffer, self._mpi.BYTE], peer, tag), num_bytes))
            address += num_bytes
            left -= num_bytes
        return pieces

    def wait(self, *requests: Request) -> None:
        """Return when all requests are complete."""
        wait(*requests)

    def progress(self) -> None:
        """Give the library one turn: about 1 us, more if data is there to be moved."""
        self._control.Iprobe()

    def group(self, ranks: tuple[int, ...], key: str = "") -> MpiGroup:
        """Return the group of these ranks."""
        ranks = tuple(sorted(set(ranks)))
        if self.rank not in ranks:
            raise InternalError(f"rank {self.rank} is not in the group {ranks}")
        if (ranks, key) not in self._groups:
            comm = self._mpi.COMM_SELF
            if len(ranks) > 1:
                members = self._control.Get_group().Incl(ranks)
                comm = self._control.Create_group(members)
            self._groups[ranks, key] = MpiGroup(self._mpi, comm, ranks, key)
        return self._groups[ranks, key]

    def all_gather_object(self, value: T) -> list[T]:
        """Return every rank's value, by rank."""
        what = "what each rank tells all others"
        data = numpy.frombuffer(bytearray(pickle.dumps(value)), numpy.uint8)
        sizes = numpy.zeros(self.size, numpy.int64)
        self._finish(self._control.Iallgather(numpy.array([data.size]), sizes), what)
        everything = numpy.empty(sizes.sum(), numpy.uint8)
        self._finish(self._control.Iallgatherv(data, [everything, sizes]), what)
        parts = numpy.split(everything, numpy.cumsum(sizes)[:-1])
        return [pickle.loads(part.tobytes()) for part in parts]

    def broadcast_object(self, value: T, root: int = 0) -> T:
        """Return the root's value on every rank."""
        what = f"what rank {root} tells all others"
        data = numpy.frombuffer(bytearray(pickle.dumps(value)), numpy.uint8)
        size = numpy.array([data.size])
        self._finish(self._control.Ibcast(size, root), what)
        if self.rank != root:
            data = numpy.empty(size[0], numpy.uint8)
        self._finish(self._control.Ibcast(data, root), what)
        found: T = pickle.loads(data.tobytes())
        return found

    def barrier(self) -> None:
        """Return when all ranks have come here."""
        self._finish(self._control.Ibarrier(), "all to come to one point")

    def _finish(self, request: MPI.Request, what: str) -> None:
        wait(_TestRequest(request, Awaited(what, tuple(range(self.size)))))

    def leave(self) -> None:
        """Tell all ranks that this one takes part in nothing more; see `_check_left`.

        Nobody answers, and ranks that end, too, never read it.
        """
        for rank in range(self.size if self._is_open else 0):
            if rank != self.rank:
                self._control.Isend([b"", self._mpi.BYTE], rank)

    def _check_left(self, waiting: Wait) -> None:
        """Raise an error if what a wait takes is of a rank that has left."""
        status = self._mpi.Status()
        while self._is_open and self._control.Iprobe(status=status):
            rank = status.Get_source()
            self._control.Recv([bytearray(), self._mpi.BYTE], rank)
            self._left[rank] = time.monotonic()
        for what, ranks in waiting.needs:
            for rank in ranks:
                if time.monotonic() - self._left.get(rank, math.inf) > LEFT_SECONDS:
                    raise GemscError(
                        f"rank {rank} has left its loop, and rank {self.rank} waits "
                        f"for {what}",
                        help="leave on all ranks after the same step; where one fails, "
                        "raise an error or call sys.exit with it",
                    )

    def abort(self, code: int) -> NoReturn:
        """End all ranks of the job with this exit code; what was printed is kept."""
        sys.stdout.flush()
        sys.stderr.flush()
        with contextlib.suppress(OSError):  # it ends even if mpirun does not answer
            nowhere = os.open(os.devnull, os.O_WRONLY)
            faulthandler.dump_traceback_later(LAST_SECONDS, exit=True, file=nowhere)
        self._mpi.COMM_WORLD.Abort(code)
        raise SystemExit(code)

    def close(self) -> None:
        """Wait for the others politely, so that MPI's own end need not."""
        self.barrier()
        self._is_open = False
        check_no_more(self._check_left)
        for group in self._groups.values():
            group.free()
        self._groups.clear()
        self._messages.Free()
        self._control.Free()


def _starts(sizes: Sequence[int]) -> list[int]:
    """Return where each of some parts begins that lie one after the other."""
    return [0, *accumulate(sizes)][:-1]
