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

A step is like the one before: where the last waits for the same thing were longer, the
sleeps are up to 5 ms until three quarters of that are over, unless data moves. It
halves the CPU time of waiting.

A rank that is bound to cores of its own may ask without a pause: see `spin`.

In a wait of seconds, `check_in_waits` lets a transport look once a second whether what
is awaited can still come. A wait that is long enough for a sleep is noted, for who
watches over hangs: `wait_of` returns what a thread waits for, `waited_seconds` how long
this one has waited.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from gemsc.errors import GemscError

SPIN_SECONDS = 60e-6
SHORTEST_SLEEP = 20e-6
LONGEST_SLEEP = 2e-3
KNOWN_SLEEP = 5e-3
KNOWN_SHARE = 3 / 4
GROWTH = 5 / 4  # from one such wait to the next: a pause of the job is no step
SLEEP_SHARE = 1 / 8
COPY_SECONDS = 50e-6  # a turn as long has moved data
CHECK_SECONDS = 1.0

_PR_SET_TIMERSLACK = 29
_prepared = threading.local()
_waits: dict[int, Wait] = {}  # by thread: the one that it is in
_waited: dict[int, float] = {}  # by thread: seconds in waits that are over
_lasted: dict[tuple[Awaited, ...], float] = {}  # seconds that waits for it had lately
_checks: list[Callable[[Wait], None]] = []
_spins = False
_yield_core = getattr(os, "sched_yield", lambda: None)  # not on every system


class Awaited(NamedTuple):
    """What an operation in flight takes: `what` of it is known, of which ranks."""

    what: str
    ranks: tuple[int, ...]


def is_gone(need: Awaited, how: str, rank: int) -> GemscError:
    """Return the error of a rank that waits for what cannot come any more."""
    return GemscError(
        f"{how}, and rank {rank} waits for {need.what}",
        help="leave on all ranks after the same step; if one rank fails, raise an "
        "error or call sys.exit with it",
    )


class Request(Protocol):
    """One operation in flight.

    It may have a `need`, which `Wait.needs` returns, and a `longest_sleep` in seconds,
    where something starts only when it is asked. It may be `is_lone`: no other
    operation of this rank needs the turns of a wait for it.
    """

    def done(self) -> bool:
        """Give the library a turn; True once complete, and from then on."""


class Wait(NamedTuple):
    """When a thread began to wait (`time.perf_counter`), and for what it still does."""

    begin: float
    pending: tuple[Request, ...]

    @property
    def needs(self) -> list[Awaited]:
        """What the requests take, as far as they say."""
        needs = [getattr(request, "need", None) for request in self.pending]
        return [need for need in dict.fromkeys(needs) if need is not None]


def wait_of(thread: int) -> Wait | None:
    """Return what a thread waits for, if it has waited long enough for a sleep."""
    return _waits.get(thread)


def check_in_waits(check: Callable[[Wait], None]) -> None:
    """From now on, call `check` once a second in each wait; it may raise an error."""
    _checks.append(check)


def check_no_more(check: Callable[[Wait], None]) -> None:
    """Take back one `check_in_waits`."""
    _checks.remove(check)


def wait(*requests: Request) -> None:
    """Return when all requests are complete; leave the core to others till then."""
    begin = started = before = checked = time.perf_counter()
    pending, pause = requests, None
    try:
        while pending := (*[r for r in pending if not r.done()],):
            now = time.perf_counter()
            if now - before > COPY_SECONDS:
                started = now
            if now - started < SPIN_SECONDS:
                _yield_core()
            else:
                if pause is None:
                    pause = _Pause(Wait(begin, pending))
                elif len(pending) < len(pause.wait.pending):
                    pause.look_at(Wait(begin, pending))
                if now - checked > CHECK_SECONDS:
                    checked = now
                    for check in (*_checks,):
                        check(pause.wait)
                pause.take(now - started, now - begin)
            before = time.perf_counter()
    finally:
        if pause is not None:
            pause.end(time.perf_counter() - begin)


def spin() -> None:
    """From now on, never sleep in a wait: this process has cores of its own."""
    global _spins
    _spins = True


def waited_seconds() -> float:
    """Return how long this thread has waited, less what took no sleep."""
    return _waited.get(threading.get_ident(), 0.0)


class _Pause:
    """What a thread does between the questions for some requests."""

    def __init__(self, wait: Wait) -> None:
        self._thread = threading.get_ident()
        self._need = (*wait.needs,)  # of all of them: as the wait is known
        self.look_at(wait)

    def look_at(self, wait: Wait) -> None:
        """From now on, let it be for these requests."""
        self.wait = wait
        self._longest = min(
            getattr(request, "longest_sleep", LONGEST_SLEEP) for request in wait.pending
        )
        is_lone = all(getattr(request, "is_lone", False) for request in wait.pending)
        self._known = KNOWN_SHARE * _lasted.get(self._need, 0.0) if is_lone else 0.0
        _waits[self._thread] = wait

    def take(self, waited: float, since_begin: float) -> None:
        """Leave the core to others for a part of what was waited so far."""
        if _spins:
            _yield_core()
            return
        seconds = min(max(waited * SLEEP_SHARE, SHORTEST_SLEEP), self._longest)
        if waited == since_begin:  # no data has moved
            seconds = max(seconds, min(self._known - waited, KNOWN_SLEEP))
        _sleep(seconds)

    def end(self, seconds: float) -> None:
        """Note how long the whole wait was."""
        del _waits[self._thread]
        _waited[self._thread] = _waited.get(self._thread, 0.0) + seconds
        most = GROWTH * _lasted.get(self._need, seconds)
        _lasted[self._need] = min(seconds, most)


def _sleep(seconds: float) -> None:
    """Sleep; on Linux no longer than that, by default it may be 50 us more."""
    if sys.platform == "linux" and not getattr(_prepared, "done", False):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        _prepared.done = True
    time.sleep(seconds)
