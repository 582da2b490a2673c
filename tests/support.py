"""Run compiled programs on threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gemsc.runtime.local import run_local
from gemsc.runtime.trainer import OptimizerFactory
from gemsc.runtime.verification import record_steps
from gemsc.verify import StepRecord, read_record


def run_on_threads(
    directory: Path,
    num_ranks: int,
    batches: list[tuple[Any, Any]],
    *,
    dtype: torch.dtype = torch.float64,
    optimizer: OptimizerFactory | None = None,
    measure: bool = True,
) -> StepRecord:
    """Run training steps on threads; every rank has the same loss."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        all_losses = run_local(
            num_ranks,
            lambda transport: record_steps(
                directory,
                transport,
                directory,
                batches,
                dtype,
                optimizer,
                measure=measure,
            ),
            timeout=120,
        )
    finally:
        torch.set_default_dtype(before)
    assert all(losses == all_losses[0] for losses in all_losses)
    return read_record(directory, num_ranks)
