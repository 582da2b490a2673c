"""Values cut by samples or tokens: what a stage computes between its regions."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from random_networks import LOSSES, RandomNetwork
from tile_support import assert_same, eager, on_tiles
from torch import fx

from gemsc.base.grid_shape import GridShape
from gemsc.passes.spatial.cuts import Axes, fits
from gemsc.passes.spatial.inputs import Placeholders
from gemsc.passes.spatial.values import whole_shape

pytestmark = pytest.mark.usefixtures("in_double")


@pytest.fixture
def cut_along(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return what lets all inputs come in cut along a dimension."""

    def cut(dim: int) -> None:
        def axes(self: Placeholders, node: fx.Node, grid: GridShape) -> Axes | None:
            shape = whole_shape(node)
            found = tuple(0 if d == dim else None for d in range(len(shape)))
            return (
                found
                if grid and len(shape) > dim and fits(shape, found, grid.axes)
                else None
            )

        monkeypatch.setattr(Placeholders, "_image_axes", axes)

    return cut


@pytest.mark.parametrize("seed", range(24))
def test_random_networks_on_samples(
    seed: int, cut_along: Callable[[int], None]
) -> None:
    cut_along(0)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rank = rng.choice([1, 2, 2, 3])
    size = {1: range(5, 20), 2: range(5, 12), 3: range(4, 7)}[rank]
    shape = (rng.choice([3, 4, 5]), rng.choice([1, 2, 4]))
    shape += tuple(rng.choice(size) for _ in range(rank))
    model = RandomNetwork(rng, shape, rng.randint(2, 6))
    x, target = torch.randn(shape), torch.randn(model.out_shape)
    loss = LOSSES[rng.choice(list(LOSSES))]
    expected = eager(model, (x,), loss, target)
    if not expected.is_finite:
        pytest.skip("a variance of one element")
    step = on_tiles(model, (x,), loss, target, (rng.choice([2, 3]),))
    assert_same(step, expected)
    assert not step.barriers
