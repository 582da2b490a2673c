"""Ranks of one machine wake each other, so that a waiting rank can sleep.

A message library tells nobody that a message has come: one has to ask it. A rank that
asks often burns the core of another, one that asks seldom is late. Here a sender rings
after it has sent, and a receiver rings back once it has taken a message, since the send
of a large one is complete only then. A ring is one empty datagram on a local socket.
"""

from __future__ import annotations

import secrets
import select
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

__all__ = ["Doorbell"]


class Doorbell:
    """One rank's bell, and those of its neighbours: the ranks on the same machine.

    A ring is never lost: one that comes while the rank works ends its next `sleep` at
    once. On other systems than Linux nobody has neighbours.
    """

    def __init__(self, job: str, rank: int, neighbours: Iterable[int]) -> None:
        """Hang up this rank's bell; `job` is the same for all its ranks (`new_job`)."""
        self._job = job
        self._neighbours: set[int] = set()
        self._socket: socket.socket | None = None
        if sys.platform == "linux":
            self._neighbours.update(neighbours)
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
            self._socket.bind(self._address(rank))

    @staticmethod
    def new_job() -> str:
        """Return a name that no other job on the machine has."""
        return secrets.token_hex(8)

    def _address(self, rank: int) -> str:
        return f"\0gemsc-{self._job}-{rank}"  # the 0 means: a name, not a file

    def reaches(self, rank: int) -> bool:
        """Whether the two ranks hear each other."""
        return rank in self._neighbours

    def ring(self, rank: int) -> None:
        """Wake a neighbour; never blocks."""
        if self._socket is None or rank not in self._neighbours:
            return
        try:
            self._socket.sendto(b"", self._address(rank))
        except BlockingIOError:
            pass  # it has many rings to hear already
        except OSError:  # it is gone
            self._neighbours.discard(rank)

    def sleep(self, seconds: float) -> bool:
        """Return True at a ring, now or since the last sleep; False after the time."""
        if self._socket is None:
            time.sleep(seconds)
            return False
        ready, _, _ = select.select([self._socket], [], [], seconds)
        with suppress(BlockingIOError):
            while ready:
                self._socket.recv(1)
        return bool(ready)

    def close(self) -> None:
        """Take the bell down."""
        self._neighbours.clear()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
