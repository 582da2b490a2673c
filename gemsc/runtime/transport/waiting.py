"""How a rank waits: it asks a few times at once, then sleeps between the questions.

A message library tells nobody that a message has come: one has to ask, and each
question is a turn in which the library may move data. A blocking MPI call asks without
pause and takes 98 % of a core. Here the sleeps grow with the time waited so far:

    turn turn turn ... | turn 20us turn 20us ... turn 2ms turn 2ms ...
    ---- 60 us ------- | ---- sleep = 1/8 of the wait, 20 us to 2 ms ---

so that a wait lasts at most about 1/8 longer than the message needs, and a rank that
waits long takes 1 to 3 % of a core. Where one process may not read another's memory, a
large message goes piece by piece, a few in each turn: after a turn that took as long as
the copy of a piece the next ones follow at once. benchmarks/transport.py has the
figures.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from typing import Protocol

__all__ = ["Request", "wait"]

SPIN_SECONDS = 60e-6
SHORTEST_SLEEP = 20e-6
LONGEST_SLEEP = 2e-3
SLEEP_SHARE = 1 / 8
COPY_SECONDS = 50e-6  # a turn as long has moved data

_PR_SET_TIMERSLACK = 29
_prepared = threading.local()
_yield_core = getattr(os, "sched_yield", lambda: None)  # not on every system


class Request(Protocol):
    """One operation in flight."""

    def done(self) -> bool:
        """Give the library a turn; True once complete, and from then on."""
        ...


def wait(*requests: Request) -> None:
    """Return when all requests are complete; leave the core to others till then."""
    started = before = time.perf_counter()
    pending = requests
    while pending := tuple(request for request in pending if not request.done()):
        now = time.perf_counter()
        if now - before > COPY_SECONDS:
            started = now
        if now - started < SPIN_SECONDS:
            _yield_core()
        else:
            seconds = (now - started) * SLEEP_SHARE
            _sleep(min(max(seconds, SHORTEST_SLEEP), LONGEST_SLEEP))
        before = time.perf_counter()


def _sleep(seconds: float) -> None:
    """Sleep; on Linux no longer than that, by default it may be 50 us more."""
    if sys.platform == "linux" and not getattr(_prepared, "done", False):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        _prepared.done = True
    time.sleep(seconds)
