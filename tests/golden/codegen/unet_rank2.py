"""Rank 2 of 3: stage 2 of FlatUNet.

Written by gemsc; do not edit, compile again:
    gemsc compile FlatUNet --ranks 3

Stage 2: 1.5 MFLOP forward, 9.1 KiB of parameters,
97.0 KiB kept for each micro-batch.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gemsc.runtime import Input, Message, RankProgram, Run, Value, Worker

NUM_MICRO_BATCHES = 4
STAGE2 = Run(stage=2)

# What comes in and goes out, for each micro-batch.
E1_AND_E2 = Message(
    tag=2,
    source=0,
    dest=2,
    values=(
        Value("e1", (2, 8, 16, 16), torch.float32, gradient=True),
        Value("e2", (2, 8, 8, 8), torch.float32, gradient=True),
    ),
)
D3 = Message(
    tag=4,
    source=1,
    dest=2,
    values=(Value("d3", (2, 8, 4, 4), torch.float32, gradient=True),),
)


class Stage2(nn.Module):
    """Stage 2: up2, up1."""

    def __init__(self) -> None:
        super().__init__()
        self.up2 = nn.Conv2d(16, 8, kernel_size=3, padding=1)
        self.up1 = nn.Conv2d(16, 8, kernel_size=3, padding=1)

    def forward(
        self, e1: Tensor, e2: Tensor, d3: Tensor, target: Tensor
    ) -> tuple[Tensor, Tensor]:
        # networks.py:93  d2 = F.relu(self.up2(torch.cat([e2, F.interpolate(d3, scal ...
        d2 = F.relu(self.up2(torch.cat([e2, F.interpolate(d3, scale_factor=2)], 1)))
        # networks.py:94  return self.up1(torch.cat([e1, F.interpolate(d2, scale_fac ...
        up1 = self.up1(torch.cat([e1, F.interpolate(d2, scale_factor=2)], 1))
        # program_support.py:73  return F.mse_loss(output, target)
        loss = F.mse_loss(up1, target)
        return up1, loss


def forward_stage2(worker: Worker, m: int) -> None:
    """Run stage 2 on micro-batch m."""
    e1, e2 = worker.receive(E1_AND_E2, m)  # from rank 0, a skip over 1 stage
    d3 = worker.receive(D3, m)  # from rank 1
    target = worker.input("target", m)
    up1, loss = worker.run(STAGE2, m, e1, e2, d3, target)
    worker.add_loss(loss)


def backward_stage2(worker: Worker, m: int) -> None:
    """Run stage 2 backward on micro-batch m."""
    grad_e1, grad_e2, grad_d3 = worker.backward(STAGE2, m, None, worker.loss_gradient)
    # to rank 0, a skip over 1 stage
    worker.send(E1_AND_E2.gradient, m, grad_e1, grad_e2)
    worker.send(D3.gradient, m, grad_d3)  # to rank 1


def weights_stage2(worker: Worker, m: int) -> None:
    """Add stage 2's weight gradients of micro-batch m."""
    worker.weights(STAGE2, m)


def evaluate_stage2(worker: Worker, m: int) -> None:
    """Run stage 2 on micro-batch m, without gradients."""
    e1, e2 = worker.receive(E1_AND_E2, m)  # from rank 0, a skip over 1 stage
    d3 = worker.receive(D3, m)  # from rank 1
    target = worker.input("target", m)
    up1, loss = worker.evaluate(STAGE2, m, e1, e2, d3, target)
    worker.add_result(m, loss, up1)


def train_step(worker: Worker) -> None:
    """Run this rank's part of one training step."""
    for m in range(NUM_MICRO_BATCHES):
        forward_stage2(worker, m)
        backward_stage2(worker, m)
    weights_stage2(worker, 3)
    worker.update()


def eval_step(worker: Worker) -> None:
    """Run this rank's part of one evaluation step."""
    for m in range(NUM_MICRO_BATCHES):
        evaluate_stage2(worker, m)


PROGRAM = RankProgram(
    num_micro_batches=NUM_MICRO_BATCHES,
    num_replicas=1,
    stages={STAGE2: Stage2},
    # What this rank reads of each micro-batch.
    inputs={"target": Input(("target",), (2, 8, 16, 16), torch.float32)},
    reductions={},
    # Micro-batches that leave weight gradients to `weights_...`.
    deferred={STAGE2: (3,)},
    train_order=(
        (2, E1_AND_E2),
        (2, D3),
        E1_AND_E2,
        (2, E1_AND_E2.gradient, D3.gradient),
        (D3, E1_AND_E2, E1_AND_E2.gradient, D3.gradient, D3, E1_AND_E2.gradient),
        D3.gradient,
    ),
    eval_order=((2, E1_AND_E2), (2, D3), (2, E1_AND_E2, D3)),
    train_step=train_step,
    eval_step=eval_step,
)
