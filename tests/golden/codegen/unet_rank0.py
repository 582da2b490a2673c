"""Rank 0 of 3: stage 0 of FlatUNet.

Written by gemsc; do not edit, compile again:
    gemsc compile FlatUNet --ranks 3

Stage 0: 774.1 kFLOP forward, 6.8 KiB of parameters,
52.5 KiB kept for each micro-batch.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gemsc.runtime import Input, Message, RankProgram, Run, Value, Worker

NUM_MICRO_BATCHES = 4
STAGE0 = Run(stage=0)

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
E1_AND_E2 = Message(
    tag=2,
    source=0,
    dest=2,
    values=(
        Value("e1", (2, 8, 16, 16), torch.float32, gradient=True),
        Value("e2", (2, 8, 8, 8), torch.float32, gradient=True),
    ),
)


class Stage0(nn.Module):
    """Stage 0: down1, down2, down3."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(8, 8, kernel_size=3, padding=1)
        self.down2 = nn.Conv2d(8, 8, kernel_size=3, padding=1)
        self.down3 = nn.Conv2d(8, 8, kernel_size=3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # networks.py:88  e1 = F.relu(self.down1(x))
        e1 = F.relu(self.down1(x))
        # networks.py:89  e2 = F.relu(self.down2(F.max_pool2d(e1, 2)))
        e2 = F.relu(self.down2(F.max_pool2d(e1, 2)))
        # networks.py:90  e3 = F.relu(self.down3(F.max_pool2d(e2, 2)))
        e3 = F.relu(self.down3(F.max_pool2d(e2, 2)))
        # networks.py:91  m = F.relu(self.mid(F.max_pool2d(e3, 2)))
        max_pool2d = F.max_pool2d(e3, 2)
        return e1, e2, e3, max_pool2d


def forward_stage0(worker: Worker, m: int) -> None:
    """Run stage 0 on micro-batch m."""
    x = worker.input("x", m)
    e1, e2, e3, max_pool2d = worker.run(STAGE0, m, x)
    worker.send(E3_AND_MAX_POOL2D, m, e3, max_pool2d)  # to rank 1
    worker.send(E1_AND_E2, m, e1, e2)  # to rank 2, a skip over 1 stage


def backward_stage0(worker: Worker, m: int) -> None:
    """Run stage 0 backward on micro-batch m."""
    # from rank 2, a skip over 1 stage
    grad_e1, grad_e2 = worker.receive(E1_AND_E2.gradient, m)
    # from rank 1
    grad_e3, grad_max_pool2d = worker.receive(E3_AND_MAX_POOL2D.gradient, m)
    worker.backward(STAGE0, m, grad_e1, grad_e2, grad_e3, grad_max_pool2d)


def evaluate_stage0(worker: Worker, m: int) -> None:
    """Run stage 0 on micro-batch m, without gradients."""
    x = worker.input("x", m)
    e1, e2, e3, max_pool2d = worker.evaluate(STAGE0, m, x)
    worker.send(E3_AND_MAX_POOL2D, m, e3, max_pool2d)  # to rank 1
    worker.send(E1_AND_E2, m, e1, e2)  # to rank 2, a skip over 1 stage


def train_step(worker: Worker) -> None:
    """Run this rank's part of one training step."""
    for m in range(NUM_MICRO_BATCHES - 1):
        forward_stage0(worker, m)
    backward_stage0(worker, 0)
    forward_stage0(worker, 3)
    for m in range(1, NUM_MICRO_BATCHES):
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
    inputs={"x": Input(("input", 0), (2, 8, 16, 16), torch.float32)},
    reductions={},
    train_order=(
        (2, E3_AND_MAX_POOL2D, E1_AND_E2),
        (
            2,
            E3_AND_MAX_POOL2D,
            E1_AND_E2,
            E1_AND_E2.gradient,
            E3_AND_MAX_POOL2D.gradient,
            E1_AND_E2.gradient,
            E3_AND_MAX_POOL2D.gradient,
        ),
    ),
    eval_order=((4, E3_AND_MAX_POOL2D, E1_AND_E2),),
    train_step=train_step,
    eval_step=eval_step,
)
