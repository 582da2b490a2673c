"""Resizing to and from a single row or column, where PyTorch has kernels of its own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tile_support import Function, assert_same, eager, on_tiles, uneven_loss

pytestmark = pytest.mark.usefixtures("in_double")

SIZES = [
    ((12, 6), (24, 1)),
    ((12, 1), (24, 1)),
    ((12, 1), (24, 3)),
    ((12, 6), (6, 3)),
    ((12, 6), (1, 12)),
]


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
