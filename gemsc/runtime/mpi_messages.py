"""Messages of MPI that are under way: those of one time, and those that stand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from gemsc.errors import InternalError
from gemsc.runtime.doorbell import Doorbell

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MessageRequest", "StandingMessage"]


class MessageRequest:
    """A send or a receive; keeps the tensor alive until it is complete."""

    __slots__ = ("_bell", "_mpi", "_pieces", "_status", "_tensor", "_text", "peer")

    def __init__(
        self,
        mpi: Any,
        bell: Doorbell,
        peer: int,
        pieces: list[tuple[MPI.Request, int]],
        tensor: Tensor,
        text: str,
        *,
        is_send: bool,
    ) -> None:
        self.peer = peer
        self._mpi = mpi
        self._bell = bell
        self._pieces = pieces  # requests, and the bytes of each
        self._status = None if is_send else mpi.Status()
        self._tensor: Tensor | None = tensor
        self._text = text

    def done(self) -> bool:
        """Give the library a turn; True once complete, and from then on."""
        while self._pieces:
            request, num_bytes = self._pieces[0]
            try:
                complete = request.Test(self._status)
            except self._mpi.Exception as error:
                raise InternalError(f"{self._text}: {error}") from error
            if not complete:
                return False
            del self._pieces[0]
            if self._status is not None:
                _check_size(self._mpi, self._status, num_bytes, self._text)
                self._bell.ring(self.peer)
        self._tensor = None
        return True


class StandingMessage:
    """A persistent request of MPI, for a send or a receive."""

    __slots__ = (
        "_bell",
        "_mpi",
        "_status",
        "_tensor",
        "_text",
        "active",
        "peer",
        "raw",
    )

    def __init__(
        self,
        mpi: Any,
        bell: Doorbell,
        peer: int,
        raw: MPI.Prequest,
        tensor: Tensor,
        text: str,
        *,
        is_send: bool,
    ) -> None:
        self.peer = peer
        self.raw = raw
        self.active = False
        self._mpi = mpi
        self._bell = bell
        self._status = None if is_send else mpi.Status()
        self._tensor = tensor  # the library reads or writes its memory
        self._text = text

    @property
    def is_send(self) -> bool:
        """Whether this rank sends it."""
        return self._status is None

    def done(self) -> bool:
        """Give the library a turn; True until it is started, and once complete."""
        if not self.active:
            return True
        try:
            complete = self.raw.Test(self._status)
        except self._mpi.Exception as error:
            raise InternalError(f"{self._text}: {error}") from error
        if not complete:
            return False
        self.active = False
        if self._status is not None:
            _check_size(self._mpi, self._status, self._tensor.nbytes, self._text)
            self._bell.ring(self.peer)
        return True

    def free(self) -> None:
        """Give the request back to the library."""
        if self.active:
            raise InternalError(f"{self._text}: freed while it is on its way")
        self.raw.Free()


def _check_size(mpi: Any, status: MPI.Status, expected: int, text: str) -> None:
    """Raise an InternalError for a short message: MPI complains of longer ones only."""
    count = status.Get_count(mpi.BYTE)
    if count != expected:
        raise InternalError(f"{text}: {count} bytes came, not {expected}")
