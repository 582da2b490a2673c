"""Messages of MPI in flight: of any size, and what follows once they have come.

MPI counts have 31 bits before version 4: a large message goes in pieces.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gemsc.errors import InternalError
from gemsc.runtime.transport.waiting import Awaited, Request

if TYPE_CHECKING:
    from mpi4py import MPI

LARGEST_PIECE = 2**30  # bytes

Then = Callable[[], Iterable[Request] | None]


class InSteps:
    """Operations of several steps, of which the next one is started from here.

    MPI moves what was started whenever it is called. Whoever waits for anything lets
    these take a turn, or two ranks could wait for each other. At most half of the time
    is theirs.
    """

    def __init__(self) -> None:
        self._open: list[ChainedRequest] = []
        self._next = 0.0  # when it may be

    def add(self, chain: ChainedRequest) -> None:
        """Let this one take turns until it is done."""
        self._open.append(chain)

    @property
    def is_idle(self) -> bool:
        """Whether no operation is open."""
        return not self._open

    def take(self) -> None:
        """Start what can be started."""
        if self._open and (begin := time.perf_counter()) >= self._next:
            self._open = [chain for chain in self._open if not chain.advance()]
            end = time.perf_counter()
            self._next = end + (end - begin)


class ChainedRequest:
    """Requests, and what to do once all are complete: perhaps it makes new ones.

    It keeps `tensors` until then.
    """

    def __init__(
        self,
        turns: InSteps,
        need: Awaited,
        requests: Iterable[Request],
        *then: Then,
        tensors: tuple[Tensor, ...] = (),
    ) -> None:
        self.need = need
        self._turns = turns
        self._requests = [*requests]
        self._then = deque(then)
        self._tensors = tensors

    def advance(self) -> bool:
        """Go on as far as it can; True once complete."""
        while True:
            self._requests = [r for r in self._requests if not r.done()]
            if self._requests:
                return False
            if not self._then:
                self._tensors = ()
                return True
            self._requests = [*(self._then.popleft()() or ())]

    def done(self) -> bool:
        """Give the library a turn; True once complete, and from then on."""
        self._turns.take()
        return self.advance()


@dataclass(slots=True, eq=False)
class TestRequest:
    """Any operation of MPI itself."""

    _turns: InSteps
    _request: MPI.Request
    need: Awaited

    @property
    def is_lone(self) -> bool:
        """Whether no operation in steps is open, which waits for turns as well."""
        return self._turns.is_idle

    def done(self) -> bool:
        """Give the library a turn; True once complete, and from then on."""
        self._turns.take()
        return self._request.Test()


@dataclass(slots=True, eq=False)
class MessageRequest:
    """A send, or a receive with a `status`; keeps the tensor until it is complete."""

    _mpi: Any
    _turns: InSteps
    _pieces: list[tuple[MPI.Request, int]]  # with the bytes of each
    _status: MPI.Status | None
    _tensor: Tensor | None
    need: Awaited

    @property
    def is_lone(self) -> bool:
        """Whether no operation in steps is open, which waits for turns as well."""
        return self._turns.is_idle

    def done(self) -> bool:
        """Give the library a turn; True once complete, and from then on."""
        self._turns.take()
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


class Lane:
    """A communicator that carries messages."""

    def __init__(self, mpi: Any, comm: MPI.Intracomm, turns: InSteps) -> None:
        self._mpi = mpi
        self._comm = comm
        self._turns = turns

    def send(self, tensor: Tensor, dest: int, tag: int, need: Awaited) -> Request:
        """Start to send the tensor's bytes."""
        pieces = self._post(self._comm.Isend, tensor, dest, tag)
        return MessageRequest(self._mpi, self._turns, pieces, None, tensor, need)

    def receive(self, tensor: Tensor, source: int, tag: int, need: Awaited) -> Request:
        """Start to receive into the tensor's bytes."""
        pieces = self._post(self._comm.Irecv, tensor, source, tag)
        status = self._mpi.Status()
        return MessageRequest(self._mpi, self._turns, pieces, status, tensor, need)

    def _post(
        self, start: Callable[..., MPI.Request], tensor: Tensor, peer: int, tag: int
    ) -> list[tuple[MPI.Request, int]]:
        """Start an operation on each piece of the tensor's bytes."""
        address, left = tensor.data_ptr(), tensor.nbytes
        pieces: list[tuple[MPI.Request, int]] = []
        while left or not pieces:
            num_bytes = min(left, LARGEST_PIECE)
            buffer = self._mpi.buffer.fromaddress(address, num_bytes)
            pieces.append((start([buffer, self._mpi.BYTE], peer, tag), num_bytes))
            address += num_bytes
            left -= num_bytes
        return pieces
