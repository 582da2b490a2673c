"""Rank 0 of 2: stage 0 of TiedEncoder.

Written by gemsc; do not edit, compile again:
    gemsc compile TiedEncoder --ranks 2

Stage 0: 3.1 kFLOP forward, 1.2 KiB of parameters,
2.5 KiB kept for each micro-batch.
"""

import torch
from torch import Tensor, nn

from gemsc.runtime import Input, Message, RankProgram, Run, Value, Worker

NUM_MICRO_BATCHES = 4
STAGE0 = Run(stage=0)

# What comes in and goes out, for each micro-batch.
X = Message(
    tag=0,
    source=0,
    dest=1,
    values=(Value("x", (2, 6, 8), torch.float32, gradient=True),),
)


class Stage0(nn.Module):
    """Stage 0: embedding, layers.0.1, layers.1.1."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleDict()
        self.layers["0"] = nn.ModuleDict()
        self.layers["0"]["0"] = nn.LayerNorm(8)
        self.layers["0"]["1"] = nn.Linear(8, 8)
        self.layers["0"]["2"] = nn.GELU()
        self.layers["1"] = nn.ModuleDict()
        self.layers["1"]["0"] = nn.LayerNorm(8)
        self.layers["1"]["1"] = nn.Linear(8, 8)
        self.layers["1"]["2"] = nn.GELU()

    def forward(self, tokens: Tensor) -> Tensor:
        # networks.py:184  x = self.embedding(tokens)
        x = self.embedding(tokens)
        # networks.py:186  x = x + layer(x)
        x = x + self.layers["0"]["2"](self.layers["0"]["1"](self.layers["0"]["0"](x)))
        x = x + self.layers["1"]["2"](self.layers["1"]["1"](self.layers["1"]["0"](x)))
        return x


def forward_stage0(worker: Worker, m: int) -> None:
    """Run stage 0 on micro-batch m."""
    tokens = worker.input("tokens", m)
    x = worker.run(STAGE0, m, tokens)
    worker.send(X, m, x)  # to rank 1


def backward_stage0(worker: Worker, m: int) -> None:
    """Run stage 0 backward on micro-batch m."""
    grad_x = worker.receive(X.gradient, m)  # from rank 1
    worker.backward(STAGE0, m, grad_x)


def evaluate_stage0(worker: Worker, m: int) -> None:
    """Run stage 0 on micro-batch m, without gradients."""
    tokens = worker.input("tokens", m)
    x = worker.evaluate(STAGE0, m, tokens)
    worker.send(X, m, x)  # to rank 1


def train_step(worker: Worker) -> None:
    """Run this rank's part of one training step."""
    forward_stage0(worker, 0)
    for m in range(1, NUM_MICRO_BATCHES):
        forward_stage0(worker, m)
        backward_stage0(worker, m - 1)
    backward_stage0(worker, 3)
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
    inputs={"tokens": Input(("input", 0), (2, 6), torch.int64)},
    # Gradients are all-reduced by the ranks that hold the same parameters.
    reductions={"embedding.weight": (0, 1)},
    train_order=((2, X, X, X.gradient, X.gradient),),
    eval_order=((4, X),),
    train_step=train_step,
    eval_step=eval_step,
)
