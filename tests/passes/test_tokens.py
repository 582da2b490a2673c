"""Tokens of pictures: tiles cut them, and shards cut heads of the same values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from random_networks import is_fixed, seeds
from random_tokens import TokenCase, random_classifier, random_tokens
from shard_support import on_mesh
from tile_support import Step, assert_same, eager, on_tiles
from torch import Tensor, nn

from gemsc.base.grid_shape import GridShape
from gemsc.base.rng import same_draws
from gemsc.errors import GemscError

pytestmark = pytest.mark.usefixtures("in_double", "drawn_alike")
PER_TEST = 8
UNEVEN = {
    "it joins or splits a dimension that is cut",
    "tiles and shards cut the same dimension",
}


def step_of(case: TokenCase) -> Step:
    """Return a step on the ranks of a grid; without shards where they share nothing."""
    *given, grid = case
    if grid.shards > 1:
        try:
            return on_mesh(*given, grid)
        except GemscError as error:
            if "nothing in stage 0 can be cut" not in str(error):
                raise
    return on_tiles(*given, grid.tiles)


def check(seed: int, make: Callable[[int], TokenCase]) -> Step:
    """Compare a network with itself; return the step on ranks."""
    case = model, *_, grid = make(seed)
    with same_draws():
        expected = eager(*case[:-1])
    step = step_of(case)
    try:
        assert_same(step, expected)
    except AssertionError as error:
        error.add_note(f"seed {seed}, {grid}: {model}")
        raise
    return step


@pytest.mark.slow
@pytest.mark.parametrize("first", seeds(16, 600, PER_TEST))
def test_random_transformers_of_pictures_are_the_networks(first: int) -> None:
    """None of their tokens is gathered, unless rows are cut unevenly."""
    whole = 0
    for seed in range(first, first + PER_TEST):
        step = check(seed, random_tokens)
        reasons = {barrier.reason for barrier in step.programs[0].barriers}
        assert reasons <= UNEVEN
        whole += not reasons
    assert not is_fixed(first) or whole >= PER_TEST // 2


@pytest.mark.slow
@pytest.mark.parametrize("first", seeds(8, 200, PER_TEST))
def test_random_classifiers_on_tiles_of_shards_are_the_networks(first: int) -> None:
    parts = 0
    for seed in range(first, first + PER_TEST):
        parts += len(check(seed, random_classifier).programs[0].parts)
    assert not is_fixed(first) or parts >= PER_TEST


class Joined(nn.Module):
    """Pictures side by side, along what is cut: some are short, one is a parameter."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.conv = dim, nn.Conv2d(2, 2, 3, padding=1)
        self.edge = nn.Parameter(torch.randn(1, 2, 3, 8).transpose(dim, 2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        edge = self.edge.expand(len(x), -1, -1, -1)
        long = torch.cat([edge, y, x.narrow(self.dim, 1, 2), edge * 2], self.dim)
        return self.conv(long)


@pytest.mark.slow(4)
@pytest.mark.parametrize("grid", [(2, 1), (1, 2), (2, 2), (4, 1)])
@pytest.mark.parametrize("dim", [2, 3])
def test_values_are_joined_along_what_is_cut(grid: tuple[int, ...], dim: int) -> None:
    case = Joined(dim), (torch.randn(2, 2, 8, 8),), lambda y: y.square().mean(), None
    step = on_tiles(*case, grid)
    assert_same(step, eager(*case))
    assert not step.programs[0].barriers


class Joins(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x], 2)


def test_a_value_that_is_joined_to_itself_is_gathered() -> None:
    case = Joins(), (torch.randn(1, 2, 4, 4),), lambda y: (y * y.cos()).sum(), None
    step = on_tiles(*case, (2, 1))
    assert_same(step, eager(*case))
    assert [b.reason for b in step.programs[0].barriers] == [
        "it joins a value to itself"
    ]


class Gram(nn.Module):
    """Products whose operands are one value, and one that sums over what is cut."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(2)
        gram = torch.einsum("bcn,bdn->bcd", flat, flat.tanh())
        return torch.einsum("bij,bij->b", gram, gram) + (flat @ flat.mT).sum((1, 2))


@pytest.mark.parametrize("grid", [(2, 1), (2, 2), (1, 4)])
def test_a_product_may_sum_over_what_is_cut(grid: tuple[int, ...]) -> None:
    case = Gram(), (torch.randn(2, 3, 4, 4),), lambda y: y.sum(), None
    step = on_tiles(*case, grid)
    assert_same(step, eager(*case))
    assert not step.programs[0].barriers


class PerHead(nn.Module):
    """A parameter of which shards have heads and tiles have rows: both at once."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Conv2d(2, 8, 1), nn.Conv2d(8, 2, 1)
        self.place = nn.Parameter(torch.randn(8, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x) * self.place)


def test_a_parameter_is_cut_by_tiles_and_shards() -> None:
    case = PerHead(), (torch.randn(2, 2, 4, 4),), lambda y: y.square().mean(), None
    step = on_mesh(*case, GridShape((2, 1), shards=2))
    assert_same(step, eager(*case))
    assert not step.programs[0].barriers
    part = step.programs[3].parts["place"]
    assert part.rows == (4, 8)


class Scores(nn.Module):
    """A loss over classes that shards have and pixels that tiles have."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.classes = nn.Conv2d(2, 4, 1), nn.Conv2d(4, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.classes(self.wide(x).relu())


def test_classes_of_shards_meet_pixels_of_tiles() -> None:
    target = torch.randint(0, 6, (2, 4, 4))
    target[0, :2] = -100
    case = Scores(), (torch.randn(2, 2, 4, 4),), F.cross_entropy, target
    step = on_mesh(*case, GridShape((2, 1), shards=2))
    assert_same(step, eager(*case))
    assert not step.programs[0].barriers


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "einsum with dots": lambda x, w: torch.einsum("...hw,wv->...hv", x, w),
    "einsum of dots and fewer": lambda x, w: torch.einsum("...w,hw->...h", x, w[:6]),
    "einsum over rows and columns": lambda x, w: torch.einsum("bchw,hw->bc", x, w[:6]),
    "einsum of a list": lambda x, w: torch.einsum("bchw,hw->bchw", [x, w[:6]]),
    "einsum with a diagonal": lambda x, w: torch.einsum("bchw,ww->bch", x, w),
    "einsum outer": lambda x, w: torch.einsum("bchw,bcij->bhj", x, x.cos()[:, :, :3]),
    "by a vector": lambda x, w: x @ w[0],
    "a vector by": lambda x, w: w[0, :6] @ x,
    "broadcast": lambda x, w: x @ w.expand(1, 4, 8, 8),
    "one sample by all": lambda x, w: x[:1] @ x.mT,
    "rows by rows": lambda x, w: x.mT @ x.sin(),
    "bmm": lambda x, w: torch.bmm(x.flatten(0, 1), x.mT.flatten(0, 1)),
    "baddbmm": lambda x, w: torch.baddbmm(
        w.expand(8, 8, 8), x.mT.flatten(0, 1), x.flatten(0, 1).cos(), beta=0.5
    ),
    "addmm": lambda x, w: torch.addmm(w[0], x[0, 0], w, alpha=2),
    "embedding": lambda x, w: F.embedding(x.mul(8).long() % 8, w) * x[..., None],
}


class Product(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x.tanh() * self.weight[:6], self.weight)


@pytest.mark.slow(8)
@pytest.mark.parametrize("grid", [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_what_their_equations_say(
    name: str, grid: tuple[int, ...]
) -> None:
    case = Product(PRODUCTS[name]), (torch.randn(2, 4, 6, 8),), _squares, None
    step = on_tiles(*case, grid)
    assert_same(step, eager(*case))
    adds = name in ("addmm", "baddbmm")  # what they sum over is gathered
    assert adds or name == "einsum with a diagonal" or not step.programs[0].barriers


def _squares(output: Tensor) -> Tensor:
    return (output * output.detach().cos()).sum()


INDICES: dict[str, Callable[[Tensor], Tensor]] = {
    "one more dimension": lambda x: x[:, :, True].sum(2),
    "the last row": lambda x: x[:, :, -1],
    "one row and one column": lambda x: x[..., 2, 5],
    "every third of few": lambda x: x[:, :, 1:5:3],
    "no rows": lambda x: x + x[:, :, 3:3:2].sum(2, keepdim=True),
}


@pytest.mark.slow(6)
@pytest.mark.parametrize("grid", [(2, 1), (1, 2), (2, 2), (3, 1)])
@pytest.mark.parametrize("name", INDICES)
def test_single_rows_few_rows_and_none(name: str, grid: tuple[int, ...]) -> None:
    model = Product(lambda x, w: INDICES[name](x))
    case = model, (torch.randn(2, 4, 6, 8),), _squares, None
    assert_same(on_tiles(*case, grid), eager(*case))
