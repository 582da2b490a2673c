"""Rank 1 of 2: stage 1 of TiedEncoder.

Written by gemsc; do not edit, compile again:
    gemsc compile TiedEncoder --ranks 2

Stage 1: 4.6 kFLOP forward, 864 B of parameters,
2.8 KiB kept for each micro-batch.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gemsc.runtime import Input, Message, RankProgram, Run, Value, Worker

NUM_MICRO_BATCHES = 4
STAGE1 = Run(stage=1)

# What comes in and goes out, for each micro-batch.
X = Message(
    tag=0,
    source=0,
    dest=1,
    values=(Value("x", (2, 6, 8), torch.float32, gradient=True),),
)


class Stage1(nn.Module):
    """Stage 1: layers.2.1, head."""

    draws_random_numbers = True

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Module()
        self.embedding.weight = nn.Parameter(torch.empty(16, 8))
        self.layers = nn.ModuleDict()
        self.layers["2"] = nn.ModuleDict()
        self.layers["2"]["0"] = nn.LayerNorm(8)
        self.layers["2"]["1"] = nn.Linear(8, 8)
        self.layers["2"]["2"] = nn.GELU()
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight  # tied

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        # networks.py:186  x = x + layer(x)
        x = x + self.layers["2"]["2"](self.layers["2"]["1"](self.layers["2"]["0"](x)))
        # networks.py:187  return self.head(F.dropout(x, 0.1, self.training))
        head = self.head(F.dropout(x, p=0.1, training=self.training))
        # networks.py:191  return F.cross_entropy(output.flatten(0, 1), target.flatt ...
        flatten = head.flatten(0, 1)
        loss = F.cross_entropy(flatten, target.flatten())
        return head, loss


def forward_stage1(worker: Worker, m: int) -> None:
    """Run stage 1 on micro-batch m."""
    x = worker.receive(X, m)  # from rank 0
    target = worker.input("target", m)
    head, loss = worker.run(STAGE1, m, x, target)
    worker.add_loss(loss)


def backward_stage1(worker: Worker, m: int) -> None:
    """Run stage 1 backward on micro-batch m."""
    (grad_x,) = worker.backward(STAGE1, m, None, worker.loss_gradient)
    worker.send(X.gradient, m, grad_x)  # to rank 0


def weights_stage1(worker: Worker, m: int) -> None:
    """Add stage 1's weight gradients of micro-batch m."""
    worker.weights(STAGE1, m)


def evaluate_stage1(worker: Worker, m: int) -> None:
    """Run stage 1 on micro-batch m, without gradients."""
    x = worker.receive(X, m)  # from rank 0
    target = worker.input("target", m)
    head, loss = worker.evaluate(STAGE1, m, x, target)
    worker.add_result(m, loss, head)


def train_step(worker: Worker) -> None:
    """Run this rank's part of one training step."""
    for m in range(NUM_MICRO_BATCHES):
        forward_stage1(worker, m)
        backward_stage1(worker, m)
    weights_stage1(worker, 3)
    worker.finish_reductions()
    worker.update()


def eval_step(worker: Worker) -> None:
    """Run this rank's part of one evaluation step."""
    for m in range(NUM_MICRO_BATCHES):
        evaluate_stage1(worker, m)


PROGRAM = RankProgram(
    num_micro_batches=NUM_MICRO_BATCHES,
    num_replicas=1,
    stages={STAGE1: Stage1},
    # What this rank reads of each micro-batch.
    inputs={"target": Input(("target",), (2, 6), torch.int64)},
    # Gradients are all-reduced by the ranks that hold the same parameters.
    reductions={"embedding.weight": (0, 1)},
    # Micro-batches that leave weight gradients to `weights_...`.
    deferred={STAGE1: (3,)},
    train_order=((2, X, X, X.gradient, X.gradient),),
    eval_order=((4, X),),
    train_step=train_step,
    eval_step=eval_step,
)
