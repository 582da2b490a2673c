"""Ranks of one machine wake each other, so that a waiting rank can sleep.

A message library tells nobody that a message has come: one has to ask it. A rank that
asks often burns the core of another, one that asks seldom is late. Here a sender rings
after it has sent, and a receiver rings back once it has taken a large message, since
the send of that is complete only then. A bell is an eventfd of Linux: a ring is one
cheap system call, and one more hears all the rings since the last time.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import sys
import time
from collections.abc import Iterable

__all__ = ["Doorbell", "hearing_range"]

LONGEST_MEETING = 120.0  # seconds until all ranks of a machine have come


def hearing_range() -> str:
    """Return a name that is the same for processes whose bells reach each other."""
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


class Doorbell:
    """One rank's bell, and those of its neighbours: the ranks on the same machine.

    A ring is never lost: one that comes while the rank works ends its next `sleep` at
    once. On other systems than Linux nobody has neighbours.
    """

    def __init__(self, job: str, rank: int, neighbours: Iterable[int]) -> None:
        """Hang up this rank's bell; `job` is the same for all its ranks (`new_job`).

        The neighbours are reached after `meet`, which all call once all bells hang.
        """
        self._job = job
        self._rank = rank
        self._neighbours = sorted(neighbours)
        self._bells: dict[int, int] = {}  # of neighbours, once met
        self._own: int | None = None
        if sys.platform == "linux":
            self._own = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._door = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._door.settimeout(LONGEST_MEETING)
            self._door.bind(self._address(rank))

    @staticmethod
    def new_job() -> str:
        """Return a name that no other job on the machine has."""
        return secrets.token_hex(8)

    def _address(self, rank: int) -> str:
        return f"\0gemsc-{self._job}-{rank}"  # the 0 means: a name, not a file

    def meet(self) -> None:
        """Give all neighbours a key to this bell, and take theirs.

        One rank after the other, in order: a socket keeps few letters, and who hands
        out keys meets ranks that listen.
        """
        if self._own is None:
            return
        before = sum(rank < self._rank for rank in self._neighbours)
        self._hear(before)
        for rank in self._neighbours:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.connect(self._address(rank))
                socket.send_fds(sender, [str(self._rank).encode()], [self._own])
        self._hear(len(self._neighbours) - before)
        self._door.close()

    def _hear(self, count: int) -> None:
        for _ in range(count):
            text, (bell,), _, _ = socket.recv_fds(self._door, 32, 1)
            self._bells[int(text)] = bell

    def reaches(self, rank: int) -> bool:
        """Whether the two ranks hear each other."""
        return rank in self._bells

    def ring(self, rank: int) -> None:
        """Wake a neighbour; never blocks."""
        if rank in self._bells:
            os.eventfd_write(self._bells[rank], 1)

    def sleep(self, seconds: float) -> bool:
        """Return True at a ring, now or since the last sleep; False after the time."""
        if self._own is None:
            time.sleep(seconds)
            return False
        ready, _, _ = select.select([self._own], [], [], seconds)
        if ready:
            os.eventfd_read(self._own)
        return bool(ready)

    def close(self) -> None:
        """Take the bell down."""
        for bell in self._bells.values():
            os.close(bell)
        self._bells.clear()
        if self._own is not None:
            self._door.close()
            os.close(self._own)
            self._own = None
