"""Run compiled programs on threads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from gemsc.runtime.training.trainer import OptimizerFactory
from gemsc.runtime.training.verification import record_steps
from gemsc.runtime.transport.local import run_local
from gemsc.runtime.transport.transport import Transport
from gemsc.verify.record import StepRecord, read_record


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
    """Run training steps on threads, each in `draws()`; all have the same loss."""

    def steps(transport: Transport) -> list[float]:
        with draws():
            return record_steps(
                directory,
                transport,
                directory,
                batches,
                dtype,
                optimizer,
                measure=measure,
            )

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        all_losses = run_local(num_ranks, steps, timeout=120)
    finally:
        torch.set_default_dtype(before)
    assert all(losses == all_losses[0] for losses in all_losses)
    return read_record(directory, num_ranks)
