"""What one rank asks for, all do after the same step: to stop, save, leave, end epochs.

    ask("stop", "enough")       on any rank, at any time, also in a signal handler
    numbers, agree              around the next sum of the losses, which carries them
    agreed("stop")              after that sum, the same on every rank

SIGTERM and SIGUSR1 to a rank ask all to leave with a checkpoint: a scheduler that takes
a machine away sends one of them first. SIGINT, and a second SIGTERM, end the rank at
once. After a SIGTERM the watch ends a job whose step does not end within GRACE_SECONDS;
SIGUSR1 leaves it the time that the scheduler gives.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, TypeVar

from gemsc.base.process import end_with_parent
from gemsc.errors import GemscError

T = TypeVar("T")

STOPPED = 75  # exit code, EX_TEMPFAIL of <sysexits.h>: start me again
STOPPING = (signal.SIGTERM, signal.SIGUSR1)
GRACE_SECONDS = 30.0  # what Slurm gives between SIGTERM and SIGKILL
ECHO_SECONDS = 1.0  # one signal may come twice: to the launcher, and to all processes


KINDS = ("stop", "save", "leave", "end")
NUMBERS = 5  # that are added up together, at most


class Requests:
    """The requests of this rank, and those that all ranks know of."""

    def __init__(self) -> None:
        self._asked: dict[str, str] = {}
        self._agreed: set[str] = set()

    def ask(self, kind: str, reason: str = "") -> None:
        """Ask all ranks for one of `KINDS`; the first reason stays."""
        self._asked.setdefault(kind, reason)

    def reason(self, kind: str) -> str:
        """Return why this rank asks, "" if it does not or gave no reason."""
        return self._asked.get(kind, "")

    def numbers(self) -> list[float]:
        """Return what to add up over all ranks, one number for each kind."""
        return [float(kind in self._asked) for kind in KINDS]

    def agree(self, sums: Sequence[float]) -> None:
        """Take the sums of all ranks' `numbers`."""
        self._agreed |= {kind for kind, sum in zip(KINDS, sums, strict=True) if sum > 0}

    def beside(self, numbers: Sequence[float], *, training: bool) -> list[float]:
        """Return what to add up over all ranks in a sum of NUMBERS, or fewer."""
        return [training, *self.numbers(), *numbers, *[0.0] * (NUMBERS - len(numbers))]

    def take(self, sums: Sequence[float], size: int) -> list[float]:
        """Take the sums of what was `beside` numbers; return those of the numbers.

        Raises:
            GemscError: some of the ranks trained, and others evaluated.
        """
        training, *sums = sums
        if training not in (0, size):
            raise GemscError(
                f"{training:.0f} of {size} ranks train, while others evaluate",
                help="call step() and evaluate() on all ranks, with the same batches",
            )
        self.agree(sums[: len(KINDS)])
        return sums[len(KINDS) :]

    def agreed(self, kind: str) -> bool:
        """Whether all ranks know of such a request."""
        return kind in self._agreed

    def done(self, kind: str) -> None:
        """Forget the request: all ranks have done what was asked for."""
        self._agreed.discard(kind)
        self._asked.pop(kind, None)


class StopSignal:
    """The signal that asked this process to stop, and how far that has come.

    `number` is None before; `is_answered` once the training loop knows of it.
    """

    current: StopSignal | None = None  # the one of this process

    def __init__(self) -> None:
        self.number: int | None = None
        self.is_answered = False
        self._is_interrupted = False
        self._time = 0.0
        self._ask: Callable[[str], None] = lambda reason: None

    @classmethod
    def catch(cls, ask: Callable[[str], None]) -> None:
        """From now on, call `ask` with the reason; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            return
        if cls.current is None:
            os.register_at_fork(before=_note_thread, after_in_child=_be_a_child)
        cls.current = cls()
        cls.current._ask = ask
        for number in STOPPING:
            signal.signal(number, cls.current._come)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, cls.current._interrupt)

    @classmethod
    def check(cls) -> None:
        """Raise a KeyboardInterrupt that got lost, as in C code that clears errors."""
        if cls.current is not None and cls.current._is_interrupted:
            raise KeyboardInterrupt

    @classmethod
    def answer(cls) -> None:
        """Say that the training loop knows: the step is over."""
        if cls.current is not None:
            cls.current.is_answered = True

    @classmethod
    def ignore(cls) -> None:
        """Let signals come too late: all is done, and Python takes its time to end."""
        if cls.current is not None:
            for number in STOPPING:
                signal.signal(number, signal.SIG_IGN)

    def _come(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.number is None:
            self.number, self._time = number, now
            self._ask(f"{signal_name(number)} came")
        elif number == signal.SIGTERM and now - self._time > ECHO_SECONDS:
            if self.number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            self.number, self._time = number, now

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._is_interrupted = True
        raise KeyboardInterrupt

    def is_overdue(self, now: float) -> bool:
        """Whether the step should have ended by now."""
        waits = self.number == signal.SIGTERM and not self.is_answered
        return waits and now - self._time > GRACE_SECONDS


def signal_name(number: int) -> str:
    """Return for example `signal 15 (Terminated)`."""
    return f"signal {number} ({signal.strsignal(number)})"


# Processes that a rank forks, as data loaders do, do not answer for it: they end by the
# usual signals, and with it. The system counts a process's thread as its parent: a
# fork of another thread than the main one, which may end first, goes on.

_fork = threading.local()


def _note_thread() -> None:
    _fork.parent = os.getpid()
    _fork.is_main = threading.current_thread() is threading.main_thread()


def _be_a_child() -> None:
    for number in STOPPING:
        signal.signal(number, signal.SIG_DFL)
    if _fork.is_main:
        end_with_parent(_fork.parent, signal.SIGKILL)


def told_by_all(transport: Any, call: str, value: T) -> list[T]:
    """Return every rank's value, by rank, where all of them make this call.

    Raises:
        GemscError: another rank, of the user's own loop, makes another one; on both.
    """
    everyone = transport.all_gather_object((call, value))
    for rank, told in enumerate(everyone):
        theirs: Any = told[0] if isinstance(told, tuple) and told else None
        if theirs != call:
            theirs = theirs if isinstance(theirs, str) else "something else"
            raise GemscError(
                f"rank {transport.rank} calls {call}, where rank {rank} calls {theirs}",
                help="make all calls of the trainer on all ranks, in the same order: "
                "`if rank == 0` is for what prints",
            )
    return [value for _, value in everyone]
