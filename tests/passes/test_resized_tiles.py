"""Resizing to and from a single row or column, where PyTorch has kernels of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tile_support import Function, assert_same, eager, on_tiles, uneven_loss
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("in_double")

SIZES = [
    ((12, 6), (24, 1)),
    ((12, 1), (24, 1)),
    ((12, 1), (24, 3)),
    ((12, 6), (6, 3)),
    ((12, 6), (1, 12)),
]


@pytest.mark.slow(4)
@pytest.mark.by_day(14)
@pytest.mark.parametrize("grid", [(3, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("size", "result"), SIZES, ids=str)
def test_single_rows_and_columns(
    size: tuple[int, int],
    result: tuple[int, int],
    mode: str,
    antialias: bool,
    grid: tuple[int, int],
) -> None:
    model = Function(lambda x: F.interpolate(x, result, mode=mode, antialias=antialias))
    x = torch.randn(1, 3, *size)
    step = on_tiles(model, (x,), uneven_loss, None, grid)
    assert_same(step, eager(model, (x,), uneven_loss, None))


RESIZED: dict[str, dict[str, Any]] = {
    "by two": {"scale_factor": 2, "mode": "bilinear"},
    "by almost two": {"scale_factor": 2.05, "mode": "bilinear"},
    "by two after all": {
        "scale_factor": 2.05,
        "mode": "bilinear",
        "recompute_scale_factor": True,
    },
    "corners on corners": {
        "scale_factor": 2,
        "mode": "bilinear",
        "align_corners": True,
    },
    "smooth": {"scale_factor": 2, "mode": "bicubic", "antialias": True},
    "smaller": {"scale_factor": 0.7, "mode": "bicubic"},
    "to a size": {"size": (18, 30), "mode": "bicubic"},
    "nearest": {"scale_factor": 2.05},
    "exact": {"size": (13, 20), "mode": "nearest-exact"},
    "area": {"size": (5, 7), "mode": "area"},
}


@pytest.mark.slow(6)
@pytest.mark.parametrize("grid", [(2, 1), (1, 3)], ids=str)
@pytest.mark.parametrize("name", RESIZED)
def test_resized(name: str, grid: tuple[int, int]) -> None:
    model = Function(lambda x: F.interpolate(x, **RESIZED[name]))
    x = torch.randn(1, 3, 9, 10)
    step = on_tiles(model, (x,), uneven_loss, None, grid)
    assert_same(step, eager(model, (x,), uneven_loss, None))


class ToOneSize(nn.Module):
    """One layer, called twice: a tile reads other rows of the smaller picture."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Upsample(size=(12, 12), mode="bilinear")

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.avg_pool2d(x, 2), F.avg_pool2d(x, 3)
        return self.up(pooled[0]) * self.up(pooled[1])


def test_a_layer_may_enlarge_several_sizes_to_one() -> None:
    model, x = ToOneSize(), torch.randn(1, 2, 12, 12)
    step = on_tiles(model, (x,), uneven_loss, None, (2, 1))
    assert_same(step, eager(model, (x,), uneven_loss, None))


def test_a_single_column_is_smoothed_as_a_whole() -> None:
    """PyTorch adds up in another way there."""
    model = Function(
        lambda x: F.interpolate(x, (4, 1), mode="bilinear", antialias=True)
    )
    x = torch.randn(2, 3, 8, 12)
    step = on_tiles(model, (x,), uneven_loss, None, (2, 1))
    assert_same(step, eager(model, (x,), uneven_loss, None))
    assert "a single column" in step.barriers[0].reason
