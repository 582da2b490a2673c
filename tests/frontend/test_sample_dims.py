"""Where samples count in what a model returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gemsc
from gemsc.base.nests import OF_ALL, ONCE
from gemsc.frontend.record import record
from gemsc.frontend.values import sample_dims

WEIGHTS = torch.ones(2)


class Net(nn.Module):
    def __init__(self, forward: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.drop = nn.Dropout()
        self.then = forward

    def forward(self, x: Tensor) -> Any:
        return self.then(self.drop(self.layer(x)))


@pytest.mark.slow(6)
@pytest.mark.parametrize(
    ("forward", "rows", "dims"),
    [
        (lambda y: y, 4, ()),
        (lambda y: y.transpose(0, 1), 2, (1,)),
        (lambda y: y.transpose(0, 1), 4, (1,)),  # as many words as samples
        (lambda y: y.flatten(0, 1), 2, ()),
        (lambda y: y.flatten(0, 1).t(), 3, (1,)),
        (lambda y: (y.mean(), {"a": y, "b": y.movedim(0, 2)}), 1, (OF_ALL, 0, 2)),
        (lambda y: (y, y.sum((0, 1))), 4, (0, OF_ALL)),
        (lambda y: (y, WEIGHTS * 2, torch.ones(2)), 2, (0, ONCE, ONCE)),
        (lambda y: (y, WEIGHTS + torch.randn(2)), 2, (0, OF_ALL)),
        (lambda y: (y[0], WEIGHTS), 1, ()),  # a graph
        (lambda y: {"loss": y.mean()}, 2, (OF_ALL,)),
        (lambda y: y[:, 0] @ y[:, 0].t(), 2, ()),  # of each two samples
        (lambda y: y.transpose(0, 1).reshape(4, 2, 4), 2, ()),  # of no more samples
    ],
)
def test_it_is_the_dimension_that_grows_with_the_samples(
    forward: Callable[[Tensor], Any], rows: int, dims: tuple[int, ...]
) -> None:
    model, inputs = Net(forward), (torch.randn(rows, 4, 4),)
    evaluation = record(model, inputs, training=False)
    before = torch.get_rng_state()
    assert sample_dims(model, inputs, evaluation) == dims
    assert torch.equal(before, torch.get_rng_state())
    assert model.training


def test_what_is_made_of_an_input_for_all_samples_comes_once() -> None:
    class Timed(nn.Module):
        def forward(self, x: Tensor, times: Tensor) -> Any:
            return x * times.sum(), times * 2, times * x.sum()

    model, inputs = Timed(), (torch.randn(2, 4), torch.randn(3))
    evaluation = record(model, inputs, training=False)
    assert sample_dims(model, inputs, evaluation) == (0, ONCE, OF_ALL)


def test_a_plan_of_phases_has_that_of_the_model() -> None:
    phase = gemsc.Phase(
        "only",
        loss=lambda model, x, target: model(x).square().mean(),
        train="layer",
        optimizer=lambda pairs: torch.optim.SGD([p for _, p in pairs], lr=0.1),
    )
    model, inputs = Net(lambda y: y.transpose(0, 1)), (torch.randn(2, 4, 4),)
    options = {"example_target": torch.zeros(2), "ranks": 1, "phases": [phase]}
    assert gemsc.compile(model, inputs, **options).plan.sample_dims == [1]
