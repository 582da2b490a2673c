"""How many cores there are."""

from __future__ import annotations

import os

__all__ = ["num_cores"]


def num_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
