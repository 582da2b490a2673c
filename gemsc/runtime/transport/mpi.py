"""The transport of real jobs: MPI, through mpi4py."""

from __future__ import annotations

import ctypes
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy
import torch
from torch import Tensor

from gemsc.base.lifeline import end_with_launcher
from gemsc.errors import GemscError, InternalError
from gemsc.runtime.transport.doorbell import SENT, TAKEN, Doorbell, hearing_range
from gemsc.runtime.transport.mpi_messages import MessageRequest, Route
from gemsc.runtime.transport.transport import (
    Request,
    check_message,
    check_sum,
    describe,
    wait_for_rings,
    wait_politely,
)

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MpiTransport"]

CUDA_AWARE_VARIABLE = "GEMSC_CUDA_AWARE"
LARGEST_PIECE = 2**30  # bytes; counts have 31 bits before MPI 4
TRIAL_BYTES = 2**20  # more than a library sends before the receiver is there
TRIAL_SECONDS = 0.1
NUM_RANKS_VARIABLE = "GEMSC_NUM_RANKS"  # set by gemsc.launch.launch


def _import_mpi() -> Any:  # the module, which starts MPI when it is first imported
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise GemscError(
            f"no MPI library for Python: {error}", help="pip install 'gemsc[mpi]'"
        ) from error
    return MPI


class _SumRequest:
    """A sum in flight, perhaps in a float32 copy that is put back at the end."""

    __slots__ = ("_request", "_ring", "_staged", "_tensor")

    def __init__(
        self,
        request: MPI.Request | None,
        tensor: Tensor,
        staged: Tensor,
        ring: Callable[[], None],
    ) -> None:
        self._request = request
        self._ring = ring  # the others: they may wait for this rank's part
        self._tensor = tensor
        self._staged = staged

    def done(self) -> bool:
        if self._request is None:
            return True
        if not self._request.Test():
            return False
        self._request = None
        self._ring()
        if self._staged is not self._tensor:
            self._tensor.copy_(self._staged)
        return True


class _TestRequest:
    """Any other operation."""

    __slots__ = ("_request",)

    def __init__(self, request: MPI.Request) -> None:
        self._request = request

    def done(self) -> bool:
        return self._request.Test()


class MpiGroup:
    """Some of the ranks, with a communicator of their own."""

    def __init__(
        self, mpi: Any, comm: MPI.Intracomm, ranks: tuple[int, ...], bell: Doorbell
    ) -> None:
        self.ranks = ranks
        self._bell = bell
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

    def all_reduce(self, tensor: Tensor) -> Request:
        """Start the sum; 16 bit floats travel and are added as float32."""
        check_sum(tensor)
        tensor = tensor.detach()
        if len(self.ranks) == 1:
            return _SumRequest(None, tensor, tensor, self._ring)
        half = tensor.dtype in (torch.bfloat16, torch.float16)
        staged = tensor.to(torch.float32) if half else tensor
        if staged.dtype not in self._types:
            raise InternalError(f"no all-reduce for {describe(tensor)}")
        buffer = self._mpi.buffer.fromaddress(staged.data_ptr(), staged.nbytes)
        request = self._comm.Iallreduce(
            self._mpi.IN_PLACE, [buffer, self._types[staged.dtype]], self._mpi.SUM
        )
        self._ring()
        return _SumRequest(request, tensor, staged, self._ring)

    def _ring(self) -> None:
        for rank in self.ranks:
            self._bell.ring(rank, SENT)

    def free(self) -> None:
        """Give the communicator back."""
        if len(self.ranks) > 1:
            self._comm.Free()


class MpiTransport:
    """One rank's end of the messages.

    Messages, control data and every group have a communicator of their own, apart from
    whatever else uses MPI in this process.
    """

    def __init__(self, comm: MPI.Intracomm | None = None) -> None:
        end_with_launcher()
        self._mpi = _import_mpi()
        world: MPI.Intracomm = comm if comm is not None else self._mpi.COMM_WORLD
        self.rank = world.Get_rank()
        self.size = world.Get_size()
        self._check_launcher(whole_world=comm is None)
        self._messages = world.Dup()
        self._control = world.Dup()
        self._groups: dict[tuple[tuple[int, ...], str], MpiGroup] = {}
        self._neighbours = self._find_neighbours()
        self._bell = self._hang_bell()
        self.single_copy = self._try_single_copy()

    def _hang_bell(self) -> Doorbell:
        """Let the ranks of this machine wake each other."""
        job = self.broadcast_object(Doorbell.new_job())
        ranges = self.all_gather_object(hearing_range())
        others = [rank for rank in self._neighbours if rank != self.rank]
        near = [rank for rank in others if ranges[rank] == ranges[self.rank]]
        bell = Doorbell(str(job), self.rank, near)
        self.barrier()  # all bells hang
        bell.meet()
        return bell

    def _try_single_copy(self) -> bool:
        """Return whether a large message comes without turns of its sender.

        It does where the receiver may read the sender's memory; otherwise, in many
        containers for example, the two move it piece by piece. Two ranks of a machine
        try it, one of them asleep.
        """
        first, last = self._neighbours[0], self._neighbours[-1]
        alone = True
        data = numpy.zeros(TRIAL_BYTES, numpy.uint8)
        if self.rank == first and self._bell.reaches(last):
            self._bell.expect(None)
            request = self._control.Isend(data, last)
            alone = self._bell.sleep(TRIAL_SECONDS)
            self._bell.expect_nothing()
            self._finish(request)
        elif self.rank == last and self._bell.reaches(first):
            self._finish(self._control.Irecv(data, first))
            self._bell.ring(first, TAKEN)
        return all(self.all_gather_object(alone))

    def _find_neighbours(self) -> list[int]:
        """Return the ranks of this machine, ascending."""
        machine = self._control.Split_type(self._mpi.COMM_TYPE_SHARED, self.rank)
        try:
            return machine.allgather(self.rank)
        finally:
            machine.Free()

    def _check_launcher(self, *, whole_world: bool) -> None:
        """Find an mpirun and an mpi4py of different MPI libraries: all are rank 0."""
        expected = os.environ.get(NUM_RANKS_VARIABLE, "")
        if whole_world and expected.isdecimal() and int(expected) != self.size:
            library = self._mpi.Get_library_version().strip("\0").split(",")[0]
            raise GemscError(
                f"{expected} ranks were started, but MPI counts {self.size}",
                help=f"mpi4py uses {library}: start the ranks with its own mpirun",
            )

    @property
    def local_rank(self) -> int:
        """Its number among the ranks of one machine."""
        return self._neighbours.index(self.rank)

    @property
    def local_size(self) -> int:
        """How many ranks its machine has."""
        return len(self._neighbours)

    @cached_property
    def cuda_aware(self) -> bool:
        """What the library says, or GEMSC_CUDA_AWARE=0 or 1."""
        if not torch.cuda.is_available():
            return False
        setting = os.environ.get(CUDA_AWARE_VARIABLE, "")
        if setting not in ("", "0", "1"):
            raise GemscError(f"{CUDA_AWARE_VARIABLE} is {setting!r}, not 0 or 1")
        return setting == "1" if setting else _library_takes_cuda()

    def send(self, tensor: Tensor, dest: int, tag: int) -> Request:
        """Start to send the tensor's bytes."""
        route = self._route(tensor, dest, tag, is_send=True)
        request = self._post(self._messages.Isend, tensor, route)
        self._bell.ring(dest, SENT)
        return request

    def receive(self, tensor: Tensor, source: int, tag: int) -> Request:
        """Start to receive into the tensor's bytes."""
        route = self._route(tensor, source, tag, is_send=False)
        return self._post(self._messages.Irecv, tensor, route)

    def _route(self, tensor: Tensor, peer: int, tag: int, *, is_send: bool) -> Route:
        check_message(tensor, peer, tag, size=self.size, cuda_aware=self.cuda_aware)
        return Route(self.rank, peer, tag, is_send)

    def _post(
        self, start: Callable[..., MPI.Request], tensor: Tensor, route: Route
    ) -> Request:
        address, left = tensor.data_ptr(), tensor.nbytes
        pieces: list[tuple[MPI.Request, int]] = []
        while left or not pieces:
            num_bytes = min(left, LARGEST_PIECE)
            buffer = self._mpi.buffer.fromaddress(address, num_bytes)
            request = start([buffer, self._mpi.BYTE], route.peer, route.tag)
            pieces.append((request, num_bytes))
            address += num_bytes
            left -= num_bytes
        return MessageRequest(self._mpi, self._bell, route, pieces, tensor)

    def wait(self, *requests: Request) -> None:
        """Return when all requests are complete; sleep until the others ring.

        Where messages may need turns of both sides, no sleep is long.
        """
        reasons = self._reasons(requests)
        self._bell.expect(reasons)
        if reasons is None:
            wait_politely(requests, self._bell)
        else:
            wait_for_rings(requests, self._bell)
        self._bell.expect_nothing()

    def _reasons(self, requests: Sequence[Request]) -> dict[int, int] | None:
        """Return whose rings complete the requests; None if rings do not suffice."""
        if not self.single_copy or self.cuda_aware:  # tried with the host's memory
            return None
        reasons: dict[int, int] = {}
        for request in requests:
            if not isinstance(request, MessageRequest):
                return None
            route = request.route
            if not self._bell.reaches(route.peer):
                return None
            why = TAKEN if route.is_send else SENT
            reasons[route.peer] = reasons.get(route.peer, 0) | why
        return reasons

    def progress(self) -> None:
        """Give the library one turn: about 1 us, more if data is there to be moved."""
        self._control.Iprobe()  # no message ever comes here, only collectives

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
            self._groups[ranks, key] = MpiGroup(self._mpi, comm, ranks, self._bell)
        return self._groups[ranks, key]

    def all_gather_object(self, value: object) -> list[object]:
        """Return every rank's value, by rank."""
        data = numpy.frombuffer(bytearray(pickle.dumps(value)), numpy.uint8)
        sizes = numpy.zeros(self.size, numpy.int64)
        self._finish(self._control.Iallgather(numpy.array([data.size]), sizes))
        everything = numpy.empty(sizes.sum(), numpy.uint8)
        self._finish(self._control.Iallgatherv(data, [everything, sizes]))
        parts = numpy.split(everything, numpy.cumsum(sizes)[:-1])
        return [pickle.loads(part.tobytes()) for part in parts]

    def broadcast_object(self, value: object, root: int = 0) -> object:
        """Return the root's value on every rank."""
        data = numpy.frombuffer(bytearray(pickle.dumps(value)), numpy.uint8)
        size = numpy.array([data.size])
        self._finish(self._control.Ibcast(size, root))
        if self.rank != root:
            data = numpy.empty(size[0], numpy.uint8)
        self._finish(self._control.Ibcast(data, root))
        return pickle.loads(data.tobytes())

    def barrier(self) -> None:
        """Return when all ranks have come here."""
        self._finish(self._control.Ibarrier())

    def _finish(self, request: MPI.Request) -> None:
        wait_politely([_TestRequest(request)])

    def abort(self, code: int) -> NoReturn:
        """End all ranks of the job with this exit code; what was printed is kept."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._mpi.COMM_WORLD.Abort(code)
        raise SystemExit(code)

    def close(self) -> None:
        """Wait for the others politely, so that MPI's own end need not."""
        self.barrier()
        for group in self._groups.values():
            group.free()
        self._groups.clear()
        self._bell.close()
        self._messages.Free()
        self._control.Free()


def _library_takes_cuda() -> bool:
    """Ask the MPI library in this process; Open MPI and MPICH have this function."""
    for path in _loaded_libraries("libmpi"):
        query = getattr(ctypes.CDLL(path), "MPIX_Query_cuda_support", None)
        if query is not None:
            return bool(query())
    return False


def _loaded_libraries(prefix: str) -> list[str]:
    """Paths of the shared libraries in this process whose file name starts so."""
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # not Linux: no CUDA either
        return []
    paths = {line.split(maxsplit=5)[-1] for line in maps if "/" in line}
    return sorted(path for path in paths if Path(path).name.startswith(prefix))
