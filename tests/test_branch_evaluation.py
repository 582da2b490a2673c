"""Networks with branches that are another graph in evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from program_support import on_ranks, written
from torch import Tensor, nn

from gemsc.errors import GemscError

pytestmark = pytest.mark.usefixtures("in_double")

OPTIONS = {"ranks": 2, "branches": ("2",), "micro_batches": 1}
X = torch.randn(4, 8, dtype=torch.float64)
TARGET = torch.zeros(4, dtype=torch.float64)


def linear(inputs: int = 8, outputs: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh())


class OtherGraph(nn.Module):
    """Evaluation has a head less, and an operation more before the branches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head, self.other = linear(), nn.Linear(12, 3), linear()
        self.wide, self.narrow = linear(), nn.Sequential(linear(), linear(8, 4))
        self.one, self.two = linear(3, 3), linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.stem(x)
        extra = (self.other(x),) if self.training else ()
        if not self.training:
            x = x.clamp(-0.5, 0.5)
        x = self.head(torch.cat([self.wide(x), self.narrow(x)], 1))
        return (x + self.one(x) + self.two(x), *extra)


class OneBranch(nn.Module):
    """Evaluation has the first of its branches only."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one = linear(), linear()
        self.two, self.three = linear(), linear()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.stem(x)
        if self.training:
            return (self.one(x) + self.two(x.sin()) + self.three(x.cos()),)
        return (self.one(x),)


def loss(outputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
    return sum((output.square().mean() for output in outputs), target.sum() * 0)


def test_each_rank_computes_what_it_has_the_weights_of(tmp_path: Path) -> None:
    model = OtherGraph()
    program = written(tmp_path, model, (X,), loss, TARGET, **OPTIONS)
    assert program.compilation.whole.twins is None
    (shards,) = program.compilation.whole.program.shards.values()
    assert {rank for _, rank in shards.placed} == {0, 1}
    (expected,) = model.eval()(X)
    found = on_ranks(
        tmp_path, 2, lambda t: t.evaluate((X,), TARGET).output, dtype=torch.float64
    )
    ((output,),) = (output for output in found if output is not None)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-12)


def test_a_layer_that_is_in_no_branch_then_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GemscError, match="is in a branch of one rank") as error:
        written(tmp_path, OneBranch(), (X,), loss, TARGET, **OPTIONS)
    assert "'one.0'" in error.value.message
    assert error.value.help == "keep it whole: --whole one.0"
    written(tmp_path, OneBranch(), (X,), loss, TARGET, whole=("one",), **OPTIONS)
