"""Rank 1 of 3: stage 1 of FlatUNet.

Written by gemsc; do not edit, compile again:
    gemsc compile FlatUNet --ranks 3

Stage 1: 82.9 kFLOP forward, 6.8 KiB of parameters,
4.5 KiB kept for each micro-batch.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gemsc.runtime import Message, RankProgram, Run, Value, Worker

NUM_MICRO_BATCHES = 4
STAGE1 = Run(stage=1)

# What comes in and goes out, for each micro-batch.
E3_AND_MAX_POOL2D = Message(
    tag=0,
    source=0,
    dest=1,
    values=(
        Value("e3", (2, 8, 4, 4), torch.float32, gradient=True),
        Value("max_pool2d", (2, 8, 2, 2), torch.float32, gradient=True),
    ),
)
D3 = Message(
    tag=4,
    source=1,
    dest=2,
    values=(Value("d3", (2, 8, 4, 4), torch.float32, gradient=True),),
)


class Stage1(nn.Module):
    """Stage 1: mid, up3."""

    def __init__(self) -> None:
        super().__init__()
        self.mid = nn.Conv2d(8, 8, kernel_size=3, padding=1)
        self.up3 = nn.Conv2d(16, 8, kernel_size=3, padding=1)

    def forward(self, e3: Tensor, max_pool2d: Tensor) -> Tensor:
        # networks.py:91  m = F.relu(self.mid(F.max_pool2d(e3, 2)))
        m = F.relu(self.mid(max_pool2d))
        # networks.py:92  d3 = F.relu(self.up3(torch.cat([e3, F.interpolate(m, scale ...
        d3 = F.relu(self.up3(torch.cat([e3, F.interpolate(m, scale_factor=2)], 1)))
        return d3


def forward_stage1(worker: Worker, m: int) -> None:
    """Run stage 1 on micro-batch m."""
    e3, max_pool2d = worker.receive(E3_AND_MAX_POOL2D, m)  # from rank 0
    d3 = worker.run(STAGE1, m, e3, max_pool2d)
    worker.send(D3, m, d3)  # to rank 2


def backward_stage1(worker: Worker, m: int) -> None:
    """Run stage 1 backward on micro-batch m."""
    grad_d3 = worker.receive(D3.gradient, m)  # from rank 2
    grad_e3, grad_max_pool2d = worker.backward(STAGE1, m, grad_d3)
    worker.send(E3_AND_MAX_POOL2D.gradient, m, grad_e3, grad_max_pool2d)  # to rank 0


def weights_stage1(worker: Worker, m: int) -> None:
    """Add stage 1's weight gradients of micro-batch m."""
    worker.weights(STAGE1, m)


def evaluate_stage1(worker: Worker, m: int) -> None:
    """Run stage 1 on micro-batch m, without gradients."""
    e3, max_pool2d = worker.receive(E3_AND_MAX_POOL2D, m)  # from rank 0
    d3 = worker.evaluate(STAGE1, m, e3, max_pool2d)
    worker.send(D3, m, d3)  # to rank 2


def train_step(worker: Worker) -> None:
    """Run this rank's part of one training step."""
    forward_stage1(worker, 0)
    for m in range(1, NUM_MICRO_BATCHES):
        forward_stage1(worker, m)
        backward_stage1(worker, m - 1)
    backward_stage1(worker, 3)
    weights_stage1(worker, 3)
    worker.update()


def eval_step(worker: Worker) -> None:
    """Run this rank's part of one evaluation step."""
    for m in range(NUM_MICRO_BATCHES):
        evaluate_stage1(worker, m)


PROGRAM = RankProgram(
    num_micro_batches=NUM_MICRO_BATCHES,
    num_replicas=1,
    stages={STAGE1: Stage1},
    inputs={},
    reductions={},
    # Micro-batches that leave weight gradients to `weights_...`.
    deferred={STAGE1: (3,)},
    train_order=(
        E3_AND_MAX_POOL2D,
        (2, E3_AND_MAX_POOL2D, D3),
        (D3.gradient, E3_AND_MAX_POOL2D.gradient, D3.gradient, D3),
        (E3_AND_MAX_POOL2D.gradient, E3_AND_MAX_POOL2D, D3.gradient, D3),
        (E3_AND_MAX_POOL2D.gradient, D3.gradient, E3_AND_MAX_POOL2D.gradient),
    ),
    eval_order=(E3_AND_MAX_POOL2D, (3, E3_AND_MAX_POOL2D, D3), D3),
    train_step=train_step,
    eval_step=eval_step,
)
