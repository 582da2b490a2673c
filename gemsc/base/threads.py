"""How many threads torch uses, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def with_threads(count: int) -> Iterator[None]:
    """Let torch use so many threads here, and in threads of Python that start here.

    In small work more than one only wait for each other, and keep a core busy with it.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
