"""Rank 0 of 1: stage 0 of FlatUNet.

Written by gemsc; do not edit, compile again:
    gemsc compile FlatUNet --ranks 1 --recompute down1,up3 --offload down2,up1

Stage 0: 2.3 MFLOP forward, 22.7 KiB of parameters,
31.0 KiB kept for each micro-batch.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gemsc.runtime import Input, RankProgram, Run, Worker, offloaded, recompute

NUM_MICRO_BATCHES = 4
STAGE0 = Run(stage=0)


class Stage0(nn.Module):
    """Stage 0: down1 to up1, 7 blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(8, 8, kernel_size=3, padding=1)
        self.down2 = nn.Conv2d(8, 8, kernel_size=3, padding=1)
        self.down3 = nn.Conv2d(8, 8, kernel_size=3, padding=1)
        self.mid = nn.Conv2d(8, 8, kernel_size=3, padding=1)
        self.up3 = nn.Conv2d(16, 8, kernel_size=3, padding=1)
        self.up2 = nn.Conv2d(16, 8, kernel_size=3, padding=1)
        self.up1 = nn.Conv2d(16, 8, kernel_size=3, padding=1)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        e1, max_pool2d = recompute(self.down1_block, x)
        with offloaded():
            # networks.py:89  e2 = F.relu(self.down2(F.max_pool2d(e1, 2)))
            e2 = F.relu(self.down2(max_pool2d))
            # networks.py:90  e3 = F.relu(self.down3(F.max_pool2d(e2, 2)))
            max_pool2d = F.max_pool2d(e2, 2)
        e3 = F.relu(self.down3(max_pool2d))
        # networks.py:91  m = F.relu(self.mid(F.max_pool2d(e3, 2)))
        m = F.relu(self.mid(F.max_pool2d(e3, 2)))
        d3 = recompute(self.up3_block, m, e3)
        # networks.py:93  d2 = F.relu(self.up2(torch.cat([e2, F.interpolate(d3, scal ...
        d2 = F.relu(self.up2(torch.cat([e2, F.interpolate(d3, scale_factor=2)], 1)))
        with offloaded():
            # networks.py:94  return self.up1(torch.cat([e1, F.interpolate(d2, scale ...
            up1 = self.up1(torch.cat([e1, F.interpolate(d2, scale_factor=2)], 1))
            # program_support.py:73  return F.mse_loss(output, target)
            loss = F.mse_loss(up1, target)
        return up1, loss

    def down1_block(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """down1: runs again in the backward, keeps its inputs only."""
        # networks.py:88  e1 = F.relu(self.down1(x))
        e1 = F.relu(self.down1(x))
        # networks.py:89  e2 = F.relu(self.down2(F.max_pool2d(e1, 2)))
        max_pool2d = F.max_pool2d(e1, 2)
        return e1, max_pool2d

    def up3_block(self, m: Tensor, e3: Tensor) -> Tensor:
        """up3: runs again in the backward, keeps its inputs only."""
        # networks.py:92  d3 = F.relu(self.up3(torch.cat([e3, F.interpolate(m, scale ...
        d3 = F.relu(self.up3(torch.cat([e3, F.interpolate(m, scale_factor=2)], 1)))
        return d3


def forward_stage0(worker: Worker, m: int) -> None:
    """Run stage 0 on micro-batch m."""
    x = worker.input("x", m)
    target = worker.input("target", m)
    up1, loss = worker.run(STAGE0, m, x, target)
    worker.add_loss(loss)


def backward_stage0(worker: Worker, m: int) -> None:
    """Run stage 0 backward on micro-batch m."""
    worker.backward(STAGE0, m, None, worker.loss_gradient)


def evaluate_stage0(worker: Worker, m: int) -> None:
    """Run stage 0 on micro-batch m, without gradients."""
    x = worker.input("x", m)
    target = worker.input("target", m)
    up1, loss = worker.evaluate(STAGE0, m, x, target)
    worker.add_result(m, loss, up1)


def train_step(worker: Worker) -> None:
    """Run this rank's part of one training step."""
    for m in range(NUM_MICRO_BATCHES):
        forward_stage0(worker, m)
        backward_stage0(worker, m)
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
        "x": Input(("input", 0), (2, 8, 16, 16), torch.float32),
        "target": Input(("target",), (2, 8, 16, 16), torch.float32),
    },
    reductions={},
    train_step=train_step,
    eval_step=eval_step,
)
