"""Messages of MPI that are under way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gemsc.errors import InternalError
from gemsc.runtime.transport.doorbell import TAKEN, Doorbell

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MessageRequest", "Route"]


@dataclass(frozen=True, slots=True)
class Route:
    """From where to where a message goes, as this rank sees it."""

    rank: int
    peer: int
    tag: int
    is_send: bool

    def __str__(self) -> str:
        """Return for example `rank 0: send to rank 1 with tag 3`."""
        towards = "send to" if self.is_send else "receive from"
        return f"rank {self.rank}: {towards} rank {self.peer} with tag {self.tag}"


class MessageRequest:
    """A send or a receive; keeps the tensor alive until it is complete."""

    __slots__ = ("_bell", "_mpi", "_pieces", "_status", "_tensor", "route")

    def __init__(
        self,
        mpi: Any,
        bell: Doorbell,
        route: Route,
        pieces: list[tuple[MPI.Request, int]],
        tensor: Tensor,
    ) -> None:
        self.route = route
        self._mpi = mpi
        self._bell = bell
        self._pieces = pieces  # requests, and the bytes of each
        self._status = None if route.is_send else mpi.Status()
        self._tensor: Tensor | None = tensor

    def done(self) -> bool:
        """Give the library a turn; True once complete, and from then on."""
        while self._pieces:
            request, num_bytes = self._pieces[0]
            try:
                complete = request.Test(self._status)
            except self._mpi.Exception as error:
                raise InternalError(f"{self.route}: {error}") from error
            if not complete:
                return False
            del self._pieces[0]
            if self._status is not None:
                _taken(self._mpi, self._status, num_bytes, self.route, self._bell)
        self._tensor = None
        return True


def _taken(
    mpi: Any, status: MPI.Status, expected: int, route: Route, bell: Doorbell
) -> None:
    """Check the size of what came: MPI complains of longer messages only.

    The sender hears that it may go on, if it waits for that.
    """
    count = status.Get_count(mpi.BYTE)
    if count != expected:
        raise InternalError(f"{route}: {count} bytes came, not {expected}")
    bell.ring(route.peer, TAKEN)
