"""Updates of several steps equal those of a plain loop, whatever comes between them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from program_support import Net, X, batch_of, mse, on_ranks, written
from torch import Tensor, nn

from gemsc.runtime.training.trainer import Trainer

LIMIT = 0.05  # of the norm: far below that of all gradients


def tied(self: Any, x: Tensor) -> Tensor:
    return self.d(torch.tanh(self.c(self.b(torch.tanh(self.a(x))))))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5)


def test_steps_of_one_update_add_up_and_are_clipped_as_in_one_process(
    tmp_path: Path, in_double: None
) -> None:
    """Also of a weight of two stages, each in two replicas; evaluations do nothing."""
    net = Net(tied)
    net.d.weight = net.a.weight
    model, x = copy.deepcopy(net), X.double()
    options = {"ranks": 2, "schedule": "mast", "micro_batches": 2, "cuts": ("c",)}
    plan = written(tmp_path, net, (x,), target=x, **options).plan
    count = plan.batch_size // len(x)
    data = [batch_of((x + number, x), count) for number in range(4)]
    optimizer, norms = sgd(model.parameters()), []
    for number, (inputs, target) in enumerate(data):
        (mse(model(inputs), target) / 2).backward()
        if number % 2:
            norm = nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
            norms.append(float(norm))
            optimizer.step()
            optimizer.zero_grad()
    expected = model.state_dict()

    def work(trainer: Trainer) -> list[float | None]:
        measured = []
        for inputs, target in data:
            trainer.step(inputs, target)
            trainer.evaluate(inputs, target)
            measured.append(trainer.gradient_norm)
        for name, tensor in trainer.state_dict().items():
            torch.testing.assert_close(tensor, expected[name])
        return measured[1::2]

    given = {"optimizer": sgd, "accumulate": 2, "clip_norm": LIMIT}
    for of_rank in on_ranks(tmp_path, 2, work, **given):
        torch.testing.assert_close(of_rank, norms)


class Either(nn.Module):
    """One of two layers, by the data: it stays whole, and the other has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.high(x) if x.sum().item() > 0 else self.low(x)


def test_a_gradient_of_one_step_stays_in_parts_until_the_update(
    tmp_path: Path, in_double: None
) -> None:
    net, x = nn.Sequential(Either(), nn.Linear(4, 4)), X.double().abs()
    model = copy.deepcopy(net)
    options: Any = {"ranks": 2, "data": 2, "shard": "gradients", "optimizer": sgd}
    plan = written(tmp_path, net, (x,), target=x, **options).plan
    whole = x.repeat(plan.batch_size // len(x), 1)
    data = [(whole, whole), (-whole, whole)]
    for inputs, target in data:
        (mse(model(inputs), target) / 2).backward()
    sgd(model.parameters()).step()

    def work(trainer: Trainer) -> None:
        for inputs, target in data:
            trainer.step(inputs, target)
        for name, tensor in trainer.state_dict().items():
            torch.testing.assert_close(tensor, model.state_dict()[name])

    on_ranks(tmp_path, 2, work, optimizer=sgd, accumulate=2)
