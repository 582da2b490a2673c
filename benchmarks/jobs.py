"""What a group of processes trains, and what its processes agree on."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

__all__ = ["LEARNING_RATE", "Job", "Step", "join_gloo"]

LEARNING_RATE = 0.001
LONGEST_WAIT = timedelta(hours=1)  # while other groups have their turns

Step = Callable[[], list[float]]  # returns the mean loss, where the rank knows it


@dataclass(frozen=True)
class Job:
    """What a group trains."""

    case: str
    ranks: int
    micro_batches: int
    schedule: str
    directory: str  # of the compiled program
    threads: int = 1  # of each rank
    memory_format: str = "as-given"  # of one process; a program has its own
    torch_compile: bool = False  # so is this


def join_gloo(job: Job, place: Path) -> int:
    """Start torch.distributed over gloo; return this process' rank."""
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{place / 'store'}",
        rank=rank,
        world_size=job.ranks,
        timeout=LONGEST_WAIT,
    )
    return rank
