"""What torch.distributed has in flight: operations, and threads that wait for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NoReturn

from torch import Tensor

from gemsc.runtime.transport.waiting import Awaited


class Waiters:
    """Threads that wait, each for one operation: as many as are in flight at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._idle = 0

    def start(self, task: Callable[[], None]) -> None:
        """Let a thread do it."""
        with self._lock:
            is_new = self._idle == 0
            self._idle -= not is_new
        if is_new:
            threading.Thread(target=self._run, name="gemsc wait", daemon=True).start()
        self._tasks.put(task)

    def _run(self) -> None:
        while True:
            self._tasks.get()()
            with self._lock:
                self._idle += 1


@dataclass(slots=True, eq=False)
class TorchRequest:
    """An operation in flight; keeps its tensors, and ends with `then`."""

    _work: Any
    need: Awaited
    _is_lost: Callable[[Awaited, Exception], NoReturn]
    _tensors: tuple[Tensor, ...]
    _then: Callable[[], object] | None = None

    def done(self) -> bool:
        """Whether it is complete."""
        if self._work is None:
            return True
        if not self._work.is_completed():
            return False
        try:
            self._work.wait()
        except RuntimeError as error:
            self._is_lost(self.need, error)
        if self._then is not None:
            self._then()
        self._work, self._tensors, self._then = None, (), None
        return True


@dataclass(slots=True, eq=False)
class AwaitedWork:
    """The works of a message, for which a thread waits."""

    _works: list[Any]
    _is_over: bool = False
    _error: RuntimeError | None = None

    def await_it(self) -> None:
        """Wait for them, in a thread."""
        try:
            while self._works:
                self._works.pop(0).wait()
        except RuntimeError as error:
            self._error = error
        self._is_over = True

    def is_completed(self) -> bool:
        """Whether all are over."""
        return self._is_over

    def wait(self) -> None:
        """Raise what went wrong, if something did."""
        if self._error is not None:
            raise self._error


@dataclass(slots=True, eq=False)
class OwnMessage:
    """One end of a message of a rank to itself: complete when both ends are there."""

    tensor: Tensor
    is_there: bool = False

    def done(self) -> bool:
        """Whether it is complete."""
        return self.is_there
