"""Schedulers that go by the numbers of groups, of which a rank may have some only."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from program_support import Net, X, batch_of, mse, on_ranks, written
from torch import Tensor
from torch.optim import lr_scheduler as lrs

from gemsc.errors import GemscError
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.worker.rates import check_rates

RATE: Tensor = torch.tensor(0.1)


def simple(self: Any, x: Tensor) -> Tensor:
    return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def by_layer(named: Any) -> torch.optim.Optimizer:
    """Make a group for each layer that the rank has."""
    layers: dict[str, list[Any]] = {}
    for pair in named:
        layers.setdefault(pair[0].partition(".")[0], []).append(pair)
    groups = [{"params": layer, "depth": ord(n)} for n, layer in layers.items()]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def described(named: Any) -> torch.optim.Optimizer:
    """Let groups say what a rank's are no copies of."""
    optimizer = by_layer(named)
    for number, group in enumerate(optimizer.param_groups):
        group |= {"lr": RATE, "number": number, "of": len(optimizer.param_groups)}
    return optimizer


class Copying(torch.optim.SGD):
    """Keeps what the parameters are at first, of which it reads numbers."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, lr=0.1)
        for group in self.param_groups:
            for tensor in group["params"]:
                self.state[tensor]["first"] = tensor.detach().clone()
                assert float(tensor.sum()) == 0.0


def copying(named: Any) -> torch.optim.Optimizer:
    return Copying([{"params": [pair]} for pair in named])


def all_layers(named: Any) -> torch.optim.Optimizer:
    """Make a group for each layer of the network."""
    pairs = [*named]
    groups = [{"params": [p for p in pairs if p[0].startswith(n)]} for n in "abc"]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def numbers(optimizer: Any, scale: float = 1.0) -> list[float]:
    return [scale * (i + 1) for i, _ in enumerate(optimizer.param_groups)]


def functions(optimizer: Any) -> list[Callable[[int], float]]:
    return [lambda step, n=n: n ** -(step + 1) for n in numbers(optimizer)]


def late(optimizer: Any) -> list[Callable[[int], float]]:
    """Let all but the first group wait long."""
    return [lambda step, n=n: float(step >= 400 * (n - 1)) for n in numbers(optimizer)]


def chained(o: Any) -> Any:
    return lrs.ChainedScheduler([lrs.StepLR(o, 2), lrs.LambdaLR(o, functions(o))])


def in_sequence(o: Any) -> Any:
    by_number = lrs.MultiplicativeLR(o, functions(o))
    return lrs.SequentialLR(o, [lrs.LinearLR(o), by_number], [3])


BY_NUMBER: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: lrs.LambdaLR(o, functions(o)),
    "late": lambda o: lrs.LambdaLR(o, late(o)),
    "multiplicative": lambda o: lrs.MultiplicativeLR(o, functions(o)),
    "one cycle": lambda o: lrs.OneCycleLR(o, numbers(o, 0.1), total_steps=9),
    "cyclic": lambda o: lrs.CyclicLR(o, numbers(o, 0.1), numbers(o), 5),
    "plateau": lambda o: lrs.ReduceLROnPlateau(o, min_lr=numbers(o, 0.01)),
    "chained": chained,
    "in sequence": in_sequence,
}


@pytest.mark.slow(4)
@pytest.mark.parametrize("kind", BY_NUMBER)
def test_a_scheduler_by_numbers_of_groups_is_refused_where_these_differ(
    kind: str, tmp_path: Path
) -> None:
    written(tmp_path, Net(simple), ranks=2, micro_batches=2)
    given = {"optimizer": by_layer, "scheduler": BY_NUMBER[kind]}
    says = r"by the numbers of groups: .* and 'c\.weight' gets other rates"
    with pytest.raises(GemscError, match=says):
        on_ranks(tmp_path, 2, lambda trainer: None, **given)


KINDS = {
    f"{layer}.weight": (torch.Size((10**5, 10**5)), torch.float32, True)
    for layer in "abc"
}


class Telling(lrs.StepLR):
    """Prints its steps."""

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        sys.stdout.write(f"step {self.last_epoch}\n")


ALIKE: list[Callable[[Any], Any]] = [
    lambda o: lrs.OneCycleLR(o, 0.1, total_steps=9),
    lambda o: lrs.LambdaLR(o, [lambda step: 0.9**step for _ in o.param_groups]),
    lambda o: lrs.LambdaLR(o, lambda step: np.power(1 - step / 100, 0.9)),  # NaN
    lambda o: lrs.LambdaLR(o, lambda step: [1.0, 0.1, 0.01][step]),
    lambda o: lrs.LambdaLR(o, lambda step: 2 + 0 * random.random()),
    lambda o: Telling(o, 2),
]


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("scheduler", ALIKE)
@pytest.mark.parametrize("optimizer", [by_layer, described, copying])
def test_schedulers_that_do_the_same_with_each_group_are_tried_with_no_trace(
    optimizer: Any, scheduler: Any, capsys: Any
) -> None:
    before = random.getstate()
    check_rates(["b.weight"], KINDS, optimizer, scheduler)
    assert random.getstate() == before
    assert torch.tensor(0.1) == RATE
    assert not capsys.readouterr().out


def by_depth(o: Any) -> Any:
    depths = [group["depth"] for group in o.param_groups]
    return lrs.LambdaLR(o, [lambda n, d=d: d / 100 / (n + 1) for d in depths])


@pytest.mark.slow(5)
@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [
        (by_layer, by_depth),
        (by_layer, lambda o: lrs.StepLR(o, 2)),
        *((all_layers, make) for make in BY_NUMBER.values()),
    ],
)
def test_other_schedulers_of_groups_train_as_one_process_does(
    optimizer: Any, scheduler: Any, tmp_path: Path
) -> None:
    def pace(paced: Any, *, by_updates: bool) -> None:
        if isinstance(paced, lrs.ReduceLROnPlateau):
            paced.step(1.0)
        elif by_updates:
            paced.step()

    def train(trainer: Trainer) -> dict[str, Tensor]:
        for batch in batches:
            trainer.step(*batch)
            pace(trainer.scheduler, by_updates=False)
        parameters = trainer.worker.updates.parameters
        return {name: p.detach().clone() for name, p in parameters.items()}

    batches = [batch_of((X, X), 2) for _ in range(6)]
    written(tmp_path, Net(simple), ranks=2, micro_batches=2)
    given = {"optimizer": optimizer, "scheduler": scheduler, "dtype": torch.float64}
    states = on_ranks(tmp_path, 2, train, **given)
    model = Net(simple).double()
    one = optimizer(model.named_parameters())
    paced = scheduler(one)
    for inputs, target in batches:
        one.zero_grad()
        mse(model(inputs.double()), target.double()).backward()
        one.step()
        pace(paced, by_updates=True)
    for name, value in {**states[0], **states[1]}.items():
        torch.testing.assert_close(value, dict(model.named_parameters())[name])
