"""Max pooling with indices, and unpooling, on tiles: positions in the whole value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tile_support import assert_same, eager, on_tiles
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("in_double")


class Unpooled(nn.Module):
    """Pool, change the values, put them back; the indices are a result too."""

    def __init__(self, rank: int, **settings: Any) -> None:
        super().__init__()
        windows = {n: settings[n] for n in ("kernel_size", "stride", "padding")}
        self.first = getattr(nn, f"Conv{rank}d")(1, 2, 3, padding=1)
        self.pool = getattr(nn, f"MaxPool{rank}d")(**settings, return_indices=True)
        self.middle = getattr(nn, f"Conv{rank}d")(2, 2, 3, padding=1)
        self.unpool = getattr(nn, f"MaxUnpool{rank}d")(**windows)
        self.last = getattr(nn, f"Conv{rank}d")(2, 1, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x).relu()  # ties
        size = x.shape[2:]
        x, indices = self.pool(x)
        x = self.unpool(self.middle(x), indices, output_size=size)
        return self.last(x), indices


def squared(outputs: tuple[Tensor, ...]) -> Tensor:
    return outputs[0].square().mean()


@pytest.mark.slow(3)
@pytest.mark.parametrize(
    ("shape", "grid", "settings"),
    [
        ((12, 16), (2, 2), {}),
        ((14, 11), (2, 2), {"ceil_mode": True}),
        ((15, 4), (3, 1), {}),
        ((13, 9), (2, 2), {"kernel_size": 3, "padding": 1}),
        ((13, 10), (2, 2), {"kernel_size": 2, "stride": 3}),
        ((10, 10), (2, 2), {"kernel_size": 3, "stride": 1}),
        ((16,), (2,), {}),
        ((6, 8, 5), (2, 2, 1), {}),
    ],
)
def test_pooled_values_are_put_back_where_they_were(
    shape: tuple[int, ...], grid: tuple[int, ...], settings: dict[str, Any]
) -> None:
    windows = {"kernel_size": 2, "stride": 2, "padding": 0} | settings
    model, x = Unpooled(len(shape), **windows), torch.randn(2, 1, *shape)
    step = on_tiles(model, (x,), squared, None, grid)
    assert_same(step, eager(model, (x,), squared, None))
    assert not step.barriers


class Functions(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        pooled, indices = F.max_pool2d(x, 2, return_indices=True)
        return (F.max_unpool2d(pooled * 2, indices, 2),)


class Edge(nn.Module):
    """Whole windows of -inf at the edge, where padding is -inf too."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        edge = torch.full_like(x, -torch.inf)
        edge[:, :, 2:-2, 2:-2] = 0
        return x, F.max_pool2d(edge + x, 3, 2, 1, return_indices=True)[1]


@pytest.mark.parametrize("model", [Functions(), Edge()])
def test_functions_and_a_window_of_minus_infinity(model: nn.Module) -> None:
    x = torch.randn(2, 3, 16, 12)
    step = on_tiles(model, (x,), squared, None, (2, 2))
    assert_same(step, eager(model, (x,), squared, None))
    assert all("changed in place" in barrier.reason for barrier in step.barriers)
