"""Run a program's ranks as threads of this process, without MPI."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch

from gemsc.runtime.training.trainer import OptimizerFactory
from gemsc.runtime.training.verification import record_steps
from gemsc.runtime.transport.local import run_local
from gemsc.runtime.transport.transport import Transport
from gemsc.verify.record import StepRecord, read_record

T = TypeVar("T")
TIMEOUT = 120.0  # seconds in which nothing moves


def on_threads(
    num_ranks: int, work: Callable[[Transport], T], dtype: torch.dtype
) -> list[T]:
    """Return what `work(transport)` gives on each rank, with this default dtype."""
    with _default_dtype(dtype):
        return run_local(num_ranks, work, timeout=TIMEOUT)


def steps_on_threads(
    directory: Path,
    num_ranks: int,
    batches: list[tuple[Any, Any]],
    *,
    dtype: torch.dtype = torch.float64,
    optimizer: OptimizerFactory | None = None,
    measure: bool = True,
    draws: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> StepRecord:
    """Run training steps, each in `draws()`; all ranks have the same loss."""

    def steps(transport: Transport) -> list[float]:
        with draws():
            how = dtype, optimizer
            given = directory, transport, directory, batches
            return record_steps(*given, *how, measure=measure)

    losses = on_threads(num_ranks, steps, dtype)
    assert all(each == losses[0] for each in losses)
    return read_record(directory, num_ranks)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # all threads have it
    try:
        yield
    finally:
        torch.set_default_dtype(before)
