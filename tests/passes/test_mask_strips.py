"""A mask that is drawn in strips is the same for any number of tiles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gemsc.base.boxes import Box, shape_of
from gemsc.passes.spatial.cuts import Axes, boxes
from gemsc.runtime.tiles import dropout
from gemsc.runtime.tiles.dropout import LARGE

SHAPE = (4, 70, 1000)
assert LARGE <= 4 * 70 * 1000


def drawn(box: Box, *, draw: int = 0, p: float = 0.25) -> Tensor:
    torch.manual_seed(5)
    return dropout(torch.ones(shape_of(box)), p, shape=SHAPE, box=box, draw=draw)


def together(axes: Axes, grid: tuple[int, ...], draw: int = 0) -> Tensor:
    whole = torch.empty(SHAPE)
    for box in boxes(SHAPE, axes, grid):
        whole[tuple(slice(*sides) for sides in box)] = drawn(box, draw=draw)
    return whole


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_any_split_draws_the_same_mask(dim: int) -> None:
    axes = tuple(0 if each == dim else None for each in range(3))
    two = together(axes, (2,))
    assert all(torch.equal(together(axes, (count,)), two) for count in (3, 4))


def test_strips_are_dropout() -> None:
    mask = together((None, 0, None), (2,))
    assert mask.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert mask.mean() == pytest.approx(1.0, abs=0.01)
    rows = mask.flatten(0, 1)
    assert len({tuple(row[:40].tolist()) for row in rows}) == len(rows)


def test_every_dropout_has_a_mask_of_its_own() -> None:
    assert not torch.equal(
        together((None, 0, None), (2,), 1), together((None, 0, None), (2,), 2)
    )


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_nothing_and_everything(p: float) -> None:
    (box, _) = boxes(SHAPE, (None, 0, None), (2,))
    assert drawn(box, p=p).unique().tolist() == [1.0 - p]
