"""Tiles whose ranks share channels or branches: random networks are the networks."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plan_support import metered_peaks
from program_support import written
from random_meshes import JOINS, Case, random_forked_mesh, random_mesh
from random_networks import is_fixed, seeds
from shard_support import on_mesh
from threads import run_on_threads
from tile_support import Step, assert_same, eager, is_decided
from torch import Tensor, nn

from gemsc.base.grid_shape import GridShape
from gemsc.base.rng import same_draws
from gemsc.errors import GemscError
from gemsc.planner.ending import held_gradients
from gemsc.planner.explain import task_of
from gemsc.verify.compare import compare
from gemsc.verify.one_process import reference_steps

pytestmark = pytest.mark.usefixtures("in_double", "drawn_alike")
PER_TEST = 4


NOTHING = r"nothing in stage 0 can be cut|stage 0 (gains nothing|has no branches)"


def step_of(case: Case, fuse: int, whole: tuple[str, ...] = ()) -> Step | None:
    """Return a network's step on a mesh; None if there is nothing to share."""
    try:
        return on_mesh(*case, whole, fuse=fuse)
    except GemscError as error:
        advice = re.search(r"--whole (\S+)", str(error))
        if advice is None and re.search(NOTHING, str(error)):
            return None
        if advice is None or advice[1] in whole:
            raise
        return step_of(case, fuse, (*whole, *advice[1].split(",")))


def check(seed: int, make: Callable[[int], Case]) -> int:
    """Compare a network with itself; return how much of it ranks share."""
    case = model, *_, grid = make(seed)
    with same_draws():
        expected = eager(*case[:-1])
    if not expected.is_finite:
        return 0
    step = step_of(case, fuse=2 * (seed % 2))  # every second with fused halos
    if step is None:
        return 0
    try:
        assert_same(step, expected)
    except AssertionError as error:
        with same_draws():
            if not is_decided(expected, *case[:-1]):
                return 0
        error.add_note(f"seed {seed}, {grid}: {model}")
        raise
    return len(step.programs[0].parts)


@pytest.mark.parametrize("first", seeds(4, 300, PER_TEST))
def test_random_networks_on_tiles_of_shards_are_the_networks(first: int) -> None:
    seeds_here = range(first, first + PER_TEST)
    cut = sum(check(seed, random_mesh) for seed in seeds_here)
    assert not is_fixed(first) or cut >= PER_TEST


@pytest.mark.slow
@pytest.mark.parametrize("first", seeds(4, 300, PER_TEST))
def test_random_branches_on_tiles_are_the_networks(first: int) -> None:
    seeds_here = range(first, first + PER_TEST)
    placed = sum(check(seed, random_forked_mesh) for seed in seeds_here)
    assert not is_fixed(first) or placed >= PER_TEST


class Pooled(nn.Module):
    """Branches that begin at the picture itself; one ends in a number per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.three, self.seven = (nn.Conv2d(2, 6, k, padding=k // 2) for k in (3, 7))
        self.one = nn.Sequential(nn.Conv2d(2, 6, 1), nn.AdaptiveAvgPool2d(1))
        self.join = JOINS["product"]

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self.join(self.three(x), self.seven(x)), self.one(x))


class Written(Pooled):
    """One branch changes in place what tiles share: all ranks compute it."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.three(x).clone()
        y[:, :1] = 0.5
        return y + self.seven(x) + self.one(x)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class OwnBackward(Pooled):
    """One branch has a backward of the user's own, of what is gathered."""

    def forward(self, x: Tensor) -> Tensor:
        y = Square.apply(self.three(x)).cumprod(-1)
        return torch.maximum(torch.maximum(y, self.seven(x)), self.one(x))


class Numbers(Pooled):
    """The branches give numbers, which a sum joins."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.three(x), self.seven(x)
        return a * (a.mean() + b.square().mean() + self.one(x).amax())


class PooledSum(Pooled):
    """A sum adds up what each tile has as a whole."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = (F.adaptive_avg_pool2d(f(x), 1) for f in (self.seven, self.one))
        return x[:, :1] * (a + b)


class SameHalo(nn.Module):
    """Branches on both ranks want the same rows of one value."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.branches = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return torch.cat([branch(x) for branch in self.branches], 1)


@pytest.mark.slow(3)
@pytest.mark.parametrize(
    "kind", [Pooled, PooledSum, Written, OwnBackward, Numbers, SameHalo]
)
@pytest.mark.parametrize("fuse", [0, 2])
def test_branches_that_tiles_compute(kind: type[nn.Module], fuse: int) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(2, 2, 9, 8)
    target = torch.randn_like(model(x))
    case = model, (x,), F.mse_loss, target
    step = on_mesh(*case, GridShape((2, 1), branches=2), fuse=fuse)
    assert step.programs[0].parts
    assert_same(step, eager(*case))


class Grouped(nn.Module):
    """Groups of channels in a function, and a mean over channels that shards cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Conv2d(2, 12, 3, padding=1)
        self.weight = nn.Parameter(torch.randn(12, 3, 3, 3))
        self.more = nn.Conv2d(2, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.conv2d(self.up(x).tanh(), self.weight, padding=1, groups=4)
        return y.square().mean(1, keepdim=True) + self.more(x).exp().mean((1, 2, 3))[0]


class Kept(nn.Module):
    """A slice that takes all rows: what stands for it is what it is a slice of."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(2, 12, 3, padding=1), nn.Conv2d(12, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x)[:, :, 0:8, 0:8].tanh())


class Rows(nn.Sequential):
    """What tiles cut is what a linear layer multiplies, which shards would cut."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(2, 2, 3, padding=1), nn.Linear(8, 32))


class Split(nn.Module):
    """Of what is split by a size each rank has smaller parts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(2, 12, 3, padding=1), nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate, gated = self.up(x).split(6, 1)
        return self.down(gate.sigmoid() * gated)


@pytest.mark.slow(2)
@pytest.mark.parametrize("kind", [Split, Grouped, Kept, Rows])
@pytest.mark.parametrize("tiles", [(2, 1), (1, 2)])
def test_what_tiles_and_shards_both_meet(
    kind: type[nn.Module], tiles: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(2, 2, 8, 8)
    target = torch.randn_like(model(x))
    case = model, (x,), F.mse_loss, target
    step = on_mesh(*case, GridShape(tiles, shards=2))
    assert step.programs[0].parts
    assert_same(step, eager(*case))


def picture() -> nn.Module:
    torch.manual_seed(0)
    up, down = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 2, 3, padding=1)
    return nn.Sequential(up, nn.BatchNorm2d(6), nn.ReLU(), down)


@pytest.mark.slow(1)
@pytest.mark.parametrize("shard", ["off", "optimizer"])
def test_who_adds_up_gradients_and_what_a_rank_takes(
    shard: str, tmp_path: Path
) -> None:
    torch.set_default_dtype(torch.float32)
    x, options = torch.randn(2, 2, 8, 8), {"tiles": ("2x1",), "shards": ("2",)}
    model, adam = picture(), partial(torch.optim.Adam, lr=0.1)
    program = written(
        tmp_path,
        model,
        (x,),
        F.mse_loss,
        x,
        ranks=4,
        micro_batches=2,
        optimizer=adam,
        shard=shard,
        **options,
    )
    first, task = program.compilation.tiles[0].program, task_of(program.plan)
    ((whole, *parts),) = held_gradients(first, task)
    assert [whole[0], *(ranks for ranks, _ in parts)] == [(0, 1, 2, 3), (0, 2), (1, 3)]
    file = program.rank_modules()["rank3.py"]
    assert '"stage0": (0, 1, 2, 3), "stage0 parts": (1, 3)' in file
    batch = ((x.repeat(2, 1, 1, 1),), x.repeat(2, 1, 1, 1))
    record = run_on_threads(
        tmp_path, 4, [batch] * 2, dtype=torch.float32, optimizer=adam
    )
    assert [max(record.peak_bytes)] == metered_peaks(program.plan)


@pytest.mark.slow
def test_each_rank_drops_its_part_of_one_mask(tmp_path: Path) -> None:
    model, x = picture(), torch.randn(2, 2, 8, 8)
    model.insert(3, nn.Dropout(0.5))
    options = {"ranks": 4, "tiles": ("2x1",), "shards": ("2",), "micro_batches": 2}
    written(tmp_path, model, (x,), F.mse_loss, x, **options)
    batches = [((x.repeat(2, 1, 1, 1),), x.repeat(2, 1, 1, 1))]
    record = run_on_threads(tmp_path, 4, batches, measure=False, draws=same_draws)
    with same_draws():
        expected = reference_steps(model, F.mse_loss, batches, 2, torch.float64)
    assert compare(record, expected).worst < 1e-9


def test_advice_where_there_are_no_branches_keeps_the_tiles() -> None:
    x = torch.randn(2, 2, 8, 8)
    with pytest.raises(GemscError, match="has no branches") as caught:
        on_mesh(picture(), (x,), F.mse_loss, x, GridShape((2, 1), branches=2))
    assert caught.value.help == (
        "give each tile of this stage one rank: --ranks 2 without --branches, "
        "or split its layers: --shards 2 --ranks 4"
    )
