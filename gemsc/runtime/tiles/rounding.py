"""What is there for rounding alone, and is left out where nothing rounds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

__all__ = ["not_negative", "nothing_rounds"]

_here = threading.local()


@contextmanager
def nothing_rounds() -> Iterator[None]:
    """Let this thread compute over a finite field, where no number is negative."""
    _here.exact = True
    try:
        yield
    finally:
        _here.exact = False


def not_negative(value: Tensor) -> Tensor:
    """Return what only rounding can make negative, in place, with 0 there."""
    return value if getattr(_here, "exact", False) else value.clamp_(min=0)
