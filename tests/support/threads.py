"""Run compiled programs on threads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from gemsc.base.elementwise import OptimizerFactory
from gemsc.runtime.training.verification import record_steps
from gemsc.runtime.transport.transport import Transport
from gemsc.verify.compare import StepRecord, read_record
from gemsc.verify.first_step import on_threads


def run_on_threads(
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
            given = directory, transport, directory, batches, dtype, optimizer
            return record_steps(*given, measure=measure)

    losses = on_threads(num_ranks, steps, dtype)
    assert all(of_rank == losses[0] for of_rank in losses)
    return read_record(directory, num_ranks)
