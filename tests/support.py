"""Run compiled programs on threads and compare them with one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gemsc.runtime.local import run_local
from gemsc.runtime.trainer import OptimizerFactory
from gemsc.runtime.verification import record_steps
from gemsc.runtime.weights import read_tensors
from gemsc.verify import Reference, reference_steps


@dataclass
class Record:
    """What the ranks of a program wrote down."""

    losses: list[float]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


def run_on_threads(
    directory: Path,
    num_ranks: int,
    batches: list[tuple[Any, Any]],
    *,
    dtype: torch.dtype = torch.float64,
    optimizer: OptimizerFactory | None = None,
) -> Record:
    """Run training steps with the in-process transport."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        all_losses = run_local(
            num_ranks,
            lambda transport: record_steps(
                directory, transport, directory, batches, dtype, optimizer
            ),
            timeout=120,
        )
    finally:
        torch.set_default_dtype(before)
    assert all(losses == all_losses[0] for losses in all_losses)
    return read_record(directory, num_ranks)


def read_record(directory: Path, num_ranks: int) -> Record:
    """Join what the ranks wrote; copies of one tensor must be equal."""
    record = Record([], {}, {})
    for rank in range(num_ranks):
        record.losses = json.loads((directory / f"losses{rank}.json").read_text())
        for kind, target in (("gradients", record.gradients), ("state", record.state)):
            for name, tensor in read_tensors(
                directory / f"{kind}{rank}.safetensors"
            ).items():
                assert name not in target or torch.equal(target[name], tensor), name
                target[name] = tensor
    return record
