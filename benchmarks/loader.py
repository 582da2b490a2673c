"""How much of a slow dataset `--workers` hides: 50 ms a batch beside steps of 80 ms."""

from __future__ import annotations

import itertools
import statistics
import time

import torch

from gemsc.runtime.data.batches import Batches

READ_SECONDS = 0.05  # for a batch
STEP_SECONDS = 0.08
SIZE, NUM_BATCHES = 4, 20


class Slow:
    """A dataset that takes its time, as one does that reads files."""

    def __len__(self) -> int:
        return SIZE * NUM_BATCHES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(READ_SECONDS / SIZE)
        return torch.full((16,), float(index)), index


def step_seconds(workers: int) -> float:
    """Return the median seconds from batch to batch, with a step between them."""
    batches = Batches(Slow(), SIZE, seed=0, shuffle=True, workers=workers)
    marks = []
    for epoch in range(2):  # processes start in the first
        marks.clear()
        for _ in batches.epoch(epoch):
            time.sleep(STEP_SECONDS)
            marks.append(time.perf_counter())
    return statistics.median(b - a for a, b in itertools.pairwise(marks))


if __name__ == "__main__":
    for workers in (0, 1, 2):
        print(f"--workers {workers}: {step_seconds(workers) * 1e3:.0f} ms a step")
