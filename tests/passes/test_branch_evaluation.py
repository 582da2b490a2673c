"""Networks with branches: another graph in evaluation, another dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from program_support import on_ranks, written
from torch import Tensor, nn

from gemsc.compiler import compile
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


class ForkInAFork(nn.Module):
    """One branch joins two and goes on; evaluation has an operation more before."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.aside = linear(), linear(), linear()
        self.on = nn.Sequential(nn.Linear(8, 8), linear())

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        if not self.training:
            x = x.clamp(-0.5, 0.5)
        return (self.on(self.one(x) + self.two(x)) + self.aside(x),)


def loss(outputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
    return sum((output.square().mean() for output in outputs), target.sum() * 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [OtherGraph, ForkInAFork])
def test_each_rank_computes_what_it_has_the_weights_of(
    kind: type[nn.Module], tmp_path: Path
) -> None:
    model = kind()
    program = written(tmp_path, model, (X,), loss, TARGET, **OPTIONS)
    assert program.compilation.whole.twins is None
    (shards,) = program.compilation.whole.program.shards.values()
    assert {rank for _, rank in shards.placed} == {0, 1}
    (expected,) = model.eval()(X)
    outputs = on_ranks(
        tmp_path, 2, lambda t: t.evaluate((X,), TARGET).output, dtype=torch.float64
    )
    ((output,),) = (output for output in outputs if output is not None)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-12)


def test_a_layer_that_is_in_no_branch_then_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GemscError, match="is in a branch of one rank") as error:
        written(tmp_path, OneBranch(), (X,), loss, TARGET, **OPTIONS)
    assert "'one.0'" in error.value.message
    assert error.value.help == "keep it whole: --whole one.0"
    written(tmp_path, OneBranch(), (X,), loss, TARGET, whole=("one",), **OPTIONS)


class Masked(nn.Module):
    """Three branches of a sum: what comes first in them is no number of the model."""

    def __init__(self, *, casts: bool = False) -> None:
        super().__init__()
        self.stem, self.layers = linear(), nn.ModuleList(linear() for _ in range(3))
        self.casts = casts

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.stem(x)
        mask = x > 0
        parts = [layer(torch.where(mask, 0.5, x)) for layer in self.layers]
        if self.casts:  # one travels in float32 whatever the model is in
            return (torch.stack([parts[0].float(), parts[1], parts[2].float()]).sum(0),)
        return (parts[0] + parts[1] + parts[2],)


@pytest.mark.slow(1)
@pytest.mark.parametrize("casts", [False, True])
def test_what_a_rank_without_a_branch_gives_follows_the_dtype_of_the_model(
    *, casts: bool
) -> None:
    torch.set_default_dtype(torch.float32)  # and the first step runs in float64
    options = {**OPTIONS, "ranks": 4, "branches": ("4",)}
    compiled = compile(
        Masked(casts=casts),
        (X.float(),),
        loss=loss,
        example_target=TARGET.float(),
        **options,
    )
    assert not compiled.plan.unchecked
    (shards,) = compiled.compilation.whole.program.shards.values()
    assert not any(fork.reason for fork in shards.forks)


class OfParameters(nn.Module):
    """Two branches take parameters alone, each of which one rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = linear()
        self.a, self.b = (nn.Parameter(torch.randn(8, 8192)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        rows = [row @ row.T / 8192 for row in (self.a, self.b)]
        return (self.stem(x) @ torch.maximum(rows[0].tanh(), rows[1].tanh()),)


@pytest.mark.slow
def test_a_rank_without_a_branch_has_not_its_parameters() -> None:
    options = {**OPTIONS, "ranks": 3, "branches": ("3",)}
    compiled = compile(
        OfParameters(), (X,), loss=loss, example_target=TARGET, **options
    )
    assert not compiled.plan.unchecked
    (shards,) = compiled.compilation.whole.program.shards.values()
    assert {rank for _, rank in shards.placed} == {0, 1}


def test_towers_that_forward_returns_apart_are_no_branches() -> None:
    """As those of a CLIP whose loss multiplies them."""

    class Towers(nn.Module):
        def __init__(self, joins: bool) -> None:
            super().__init__()
            self.joins = joins
            self.a, self.b = (
                nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64))
                for _ in range(2)
            )

        def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            one, other = self.a(x), self.b(x)
            return one @ other.T if self.joins else (one, other)

    def loss(output: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        return (output if isinstance(output, Tensor) else output[0] @ output[1].T).sum()

    x, given = torch.randn(64, 64), {**OPTIONS, "loss": loss}
    with pytest.raises(GemscError, match="has no branches") as caught:
        compile(Towers(False), (x,), **given)
    assert "let forward return what joins its branches" in str(caught.value)
    assert compile(Towers(True), (x,), **given).plan.ranks == 2
