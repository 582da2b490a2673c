"""Which clock to measure with, so that other processes count as little as possible."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def clock_of(device: str) -> Callable[[], float]:
    """Return a function that gives seconds.

    With one thread on a CPU, that of the CPU time of this thread: it stands still while
    others have the core. Where several threads or a GPU work, that of the wall.
    """
    if device == "cpu" and torch.get_num_threads() == 1:
        return time.thread_time
    return time.perf_counter
