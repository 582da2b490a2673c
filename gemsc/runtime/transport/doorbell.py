"""Ranks of one machine wake each other, so that a waiting rank can sleep.

A message library tells nobody that a message has come: one has to ask it. A rank that
asks often burns the core of another, one that asks seldom is late. Here a sender rings
after it has sent, and a receiver once it has taken what was sent to it, since the send
of a large message is complete only then. A bell is an eventfd of Linux: a ring is one
cheap system call, and one more hears all the rings since the last time.

To be woken for nothing costs more than to ring for nothing, so a rank hangs out a note
of whom it waits for, in memory that the others read before they ring:

    waiting rank      note: "0 sends to me"   has it come?   no: sleep
    sending rank                     send     the note? there: ring

Each writes before it reads, so at least one of them sees what the other wrote.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import socket
import sys
import time
from collections.abc import Iterable, Mapping

__all__ = ["SENT", "TAKEN", "Doorbell", "hearing_range"]

SENT, TAKEN = 1, 2  # why to ring: a message is on its way to you; yours has arrived
_ANYTHING = SENT | TAKEN

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
        self._places = {other: n for n, other in enumerate(sorted(neighbours))}
        self._bells: dict[int, int] = {}  # of neighbours, once met
        self._notes: dict[int, tuple[mmap.mmap, int]] = {}  # and this rank's place
        self._own: int | None = None
        if sys.platform == "linux":
            self._own = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._paper = os.memfd_create("gemsc-note")
            os.ftruncate(self._paper, self._num_bytes)
            self._note = mmap.mmap(self._paper, self._num_bytes)
            self._door = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._door.settimeout(LONGEST_MEETING)
            self._door.bind(self._address(rank))

    @staticmethod
    def new_job() -> str:
        """Return a name that no other job on the machine has."""
        return secrets.token_hex(8)

    def _address(self, rank: int) -> str:
        return f"\0gemsc-{self._job}-{rank}"  # the 0 means: a name, not a file

    @property
    def _num_bytes(self) -> int:
        return max(1, len(self._places))

    def meet(self) -> None:
        """Give all neighbours a key to this bell, and take theirs.

        One rank after the other, in order: a socket keeps few letters, and who hands
        out keys meets ranks that listen.
        """
        if self._own is None:
            return
        before = sum(rank < self._rank for rank in self._places)
        self._hear(before)
        for rank, place in self._places.items():
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.connect(self._address(rank))
                letter = f"{self._rank} {place}".encode()
                socket.send_fds(sender, [letter], [self._own, self._paper])
        self._hear(len(self._places) - before)
        self._door.close()
        os.close(self._paper)

    def _hear(self, count: int) -> None:
        for _ in range(count):
            letter, (bell, paper), _, _ = socket.recv_fds(self._door, 64, 2)
            rank, place = map(int, letter.split())
            self._bells[rank] = bell
            self._notes[rank] = mmap.mmap(paper, 0, prot=mmap.PROT_READ), place
            os.close(paper)

    def reaches(self, rank: int) -> bool:
        """Whether the two ranks hear each other."""
        return rank in self._bells

    def expect(self, reasons: Mapping[int, int] | None) -> None:
        """Hang out a note: who shall ring this rank from now on, and why.

        `reasons` has SENT, TAKEN or both for neighbours; None: anybody, for anything.
        """
        if self._own is None:
            return
        if reasons is None:
            self._note[:] = bytes([_ANYTHING]) * self._num_bytes
            return
        for rank, why in reasons.items():
            self._note[self._places[rank]] = why

    def expect_nothing(self) -> None:
        """Take the note away."""
        if self._own is not None:
            self._note[:] = bytes(self._num_bytes)

    def ring(self, rank: int, why: int) -> None:
        """Wake a neighbour that expects it; never blocks."""
        if rank in self._bells:
            note, place = self._notes[rank]
            if note[place] & why:
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
        for note, _ in self._notes.values():
            note.close()
        self._bells.clear()
        self._notes.clear()
        if self._own is not None:
            self._door.close()
            self._note.close()
            os.close(self._own)
            self._own = None
