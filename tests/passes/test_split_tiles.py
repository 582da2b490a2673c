"""Tiles against the model as a whole: random networks, and each operation's corners."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from random_networks import is_fixed, random_case, seeds
from tile_support import assert_same, eager, is_decided, on_tiles
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("in_double")

PER_TEST = 7


def check(seed: int) -> bool:
    """Compare a random network with itself on tiles, unless its loss is not finite."""
    model, inputs, loss, target, grid = random_case(seed)
    expected = eager(model, inputs, loss, target)
    if not expected.is_finite:
        return False
    try:
        assert_same(on_tiles(model, inputs, loss, target, grid), expected)
    except BaseException as error:
        if not is_decided(expected, model, inputs, loss, target):
            return False
        error.add_note(f"seed {seed}, grid {grid}, input {inputs[0].shape}: {model}")
        raise
    return True


def test_rounding_decides_where_elements_are_equal_by_their_making() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.MaxPool2d(2))
    for x, decided in (torch.randn(1, 2, 4, 4), True), (torch.ones(1, 2, 4, 4), False):
        case = model, (x,), lambda y: y.square().mean(), None
        assert is_decided(eager(*case), *case) == decided


@pytest.mark.parametrize("first", seeds(7, 300, PER_TEST))
def test_random_networks_on_tiles_are_the_networks(first: int) -> None:
    finite = sum(map(check, range(first, first + PER_TEST)))
    assert not is_fixed(first) or finite >= PER_TEST - 1


class Written(nn.Module):
    """A layer with settings for tiles, whose result is changed through a view."""

    def __init__(self, change: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.first = nn.AvgPool2d(3, 1, padding=1)
        self.second = nn.Conv2d(2, 2, 3, padding=1)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        self.change(y)
        return self.second(y)


@pytest.mark.parametrize(
    "change", [lambda y: y[:, :1].add_(1), lambda y: y[..., ::2].mul_(2)]
)
def test_a_layer_that_is_gathered_after_all_has_its_own_settings(
    change: Callable[[Tensor], object],
) -> None:
    """On tiles it would have no padding, beside a halo of the tile's."""
    x, target = torch.randn(2, 2, 8, 8), torch.randn(2, 2, 8, 8)
    model = Written(change)
    step = on_tiles(model, (x,), F.mse_loss, target, (2, 2))
    assert_same(step, eager(model, (x,), F.mse_loss, target))


class Ends(nn.Module):
    """Windows over one value that have other things beyond its ends."""

    def __init__(self) -> None:
        super().__init__()
        self.zeros = nn.Conv2d(2, 2, 3, padding=1)
        self.around = nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular")

    def forward(self, x: Tensor) -> Tensor:
        y = x.sin() - 2  # its largest elements are not those beyond
        return self.zeros(y) + F.max_pool2d(y, 3, 1, 1) + self.around(y)


@pytest.mark.parametrize("fuse", [0, 2])
def test_windows_over_one_value_have_their_own_padding(fuse: int) -> None:
    x, target = torch.randn(2, 2, 8, 8), torch.randn(2, 2, 8, 8)
    model = Ends()
    step = on_tiles(model, (x,), F.mse_loss, target, (2, 2), fuse=fuse)
    assert_same(step, eager(model, (x,), F.mse_loss, target))
