"""Rank 0 of 4: tile 0 of 2 x 2, stage 0 of Tiled.

Written by gemsc; do not edit, compile again:
    gemsc compile Tiled --ranks 4 --tiles 2x2

Stage 0: 673.8 kFLOP forward, 13.5 KiB of parameters,
23.0 KiB kept for each micro-batch by the tile that keeps most;
5.0 KiB from tile to tile in forward.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gemsc.runtime import (
    Exchange,
    Grid,
    Input,
    RankProgram,
    Run,
    Tiles,
    Worker,
    tile_boxes,
    tiles,
)

NUM_MICRO_BATCHES = 4
STAGE0 = Run(stage=0)

# What the tiles hold of a value, and what they want of it.
HALO_FIRST = Exchange(
    index=0,
    shape=(2, 8, 16, 16),
    held=tile_boxes((0, 2), (0, 8), [(0, 9), (7, 16)], [(0, 9), (7, 16)]),
    wanted=tile_boxes((0, 2), (0, 8), [(-1, 9), (7, 17)], [(-1, 9), (7, 17)]),
    owned=tile_boxes((0, 2), (0, 8), [(0, 8), (8, 16)], [(0, 8), (8, 16)]),
)
HALO_X = Exchange(
    index=1,
    shape=(2, 8, 8, 8),
    held=tile_boxes((0, 2), (0, 8), [(0, 4), (4, 8)], [(0, 4), (4, 8)]),
    wanted=tile_boxes((0, 2), (0, 8), [(-1, 5), (3, 9)], [(-1, 5), (3, 9)]),
    wraps=True,
)


class Stage0(nn.Module):
    """Stage 0: first, around, fc."""

    grid: Grid

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 8, kernel_size=3)
        self.norm = nn.BatchNorm2d(8)
        self.around = nn.Conv2d(8, 4, kernel_size=3)
        self.fc = nn.Linear(256, 10)
        self._loss = nn.CrossEntropyLoss()

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        x = tiles.redistribute(self.grid, x, HALO_FIRST)  # 1 row up, 1 column left
        # networks.py:204  x = F.relu(self.norm(self.first(x)))
        x = F.relu(tiles.batch_norm(self.grid, self.first(x), self.norm))
        # networks.py:205  x = x * x.mean(2, keepdim=True).sigmoid()
        # all-reduce over tiles (0, 2)
        mean = tiles.all_reduce(self.grid, x.mean(2, keepdim=True) * 0.5, (0, 2))
        x = x * mean.sigmoid()
        # networks.py:206  x = self.around(F.max_pool2d(x, 2))
        # halo of 1
        max_pool2d = tiles.redistribute(self.grid, F.max_pool2d(x, 2), HALO_X)
        x = self.around(max_pool2d)
        # networks.py:207  x = x - x.amax((2, 3), keepdim=True)
        x = x - tiles.amax(self.grid, x, (2, 3), keepdim=True)
        # networks.py:208  return self.fc(torch.flatten(x, 1))
        fc = tiles.linear(
            self.grid,
            x,
            self.fc.weight,
            self.fc.bias,
            shape=(4, 8, 8),
            box=((0, 4), (0, 4), (0, 4)),
        )
        loss = self._loss(fc, target)
        return fc, loss


def forward_stage0(worker: Worker, m: int) -> None:
    """Run stage 0 on micro-batch m."""
    x = worker.input("x", m)
    target = worker.input("target", m)
    fc, loss = worker.run(STAGE0, m, x, target)
    worker.add_loss(loss)


def backward_stage0(worker: Worker, m: int) -> None:
    """Run stage 0 backward on micro-batch m."""
    worker.backward(STAGE0, m, None, worker.loss_gradient)


def evaluate_stage0(worker: Worker, m: int) -> None:
    """Run stage 0 on micro-batch m, without gradients."""
    x = worker.input("x", m)
    target = worker.input("target", m)
    fc, loss = worker.evaluate(STAGE0, m, x, target)
    worker.add_result(m, loss, fc)


def train_step(worker: Worker) -> None:
    """Run this rank's part of one training step."""
    for m in range(NUM_MICRO_BATCHES):
        forward_stage0(worker, m)
        backward_stage0(worker, m)
    worker.start_reduction("stage0")
    worker.finish_reductions()
    worker.update()


def eval_step(worker: Worker) -> None:
    """Run this rank's part of one evaluation step."""
    for m in range(NUM_MICRO_BATCHES):
        evaluate_stage0(worker, m)


PROGRAM = RankProgram(
    num_micro_batches=NUM_MICRO_BATCHES,
    num_replicas=1,
    stages={STAGE0: Stage0},
    # What this rank reads of each micro-batch.
    inputs={
        "x": Input(
            ("input", 0),
            (2, 8, 16, 16),
            torch.float32,
            box=((0, 2), (0, 8), (0, 9), (0, 9)),
        ),
        "target": Input(("target",), (2,), torch.int64),
    },
    # Gradients are all-reduced by the ranks that hold the same parameters.
    reductions={"stage0": (0, 1, 2, 3)},
    tiles=Tiles(grid=(2, 2), ranks=(0, 1, 2, 3), tile=0, sums=((0, 1, 2, 3), (0, 2))),
    train_order=((8, STAGE0), "stage0"),
    eval_order=((4, STAGE0),),
    train_step=train_step,
    eval_step=eval_step,
)
