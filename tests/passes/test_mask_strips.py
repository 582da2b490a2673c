"""A mask that is drawn in strips is the same for any number of tiles."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from program_support import run_passes
from tile_support import one_stage
from torch import Tensor, nn

from gemsc.base.boxes import Box, shape_of
from gemsc.base.grid_shape import GridShape
from gemsc.frontend.record import record
from gemsc.passes.canonicalize import Canonicalize
from gemsc.passes.find_halos import FindHalos
from gemsc.passes.spatial.cuts import Axes, boxes
from gemsc.passes.split_tiles import SplitTiles
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
    axes = tuple(0 if axis == dim else None for axis in range(3))
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


class Slices(nn.Module):
    """A few slices: with a wide halo, one of two tiles has all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(1, 4, 3, padding=1)
        self.b = nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.dropout(self.a(x), 0.5))


def test_tiles_of_which_one_has_all_rows_draw_the_same_mask() -> None:
    inputs = (torch.zeros(1, 1, 3, LARGE // 8),)
    traced = record(Slices(), inputs, loss=F.mse_loss, target=inputs[0])
    grid = (GridShape((2, 1)),)
    program = one_stage(run_passes(traced, (Canonicalize(),)))
    program = run_passes(program, (FindHalos(grid, 2),))
    masks, rows = [], []
    for tile in range(2):
        nodes = run_passes(program, (SplitTiles(grid, tile),)).graph.nodes
        (settings,) = (node.kwargs for node in nodes if node.target is dropout)
        box = settings["box"]
        torch.manual_seed(5)
        masks.append(dropout(torch.ones(shape_of(box)), 0.5, **settings))
        rows.append(box[2])
    assert rows == [(0, 3), (1, 3)]
    assert torch.equal(masks[0][:, :, 1:], masks[1])
    assert masks[0].unique().tolist() == [0.0, 2.0]
