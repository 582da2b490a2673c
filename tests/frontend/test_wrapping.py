"""Values whose opposite edges are neighbours: circular padding, and rolls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tile_support import assert_same, eager, on_tiles, uneven_loss
from torch import Tensor, nn

from gemsc.messages.exchange import Exchange

pytestmark = pytest.mark.usefixtures("in_double")

GRIDS = [(2, 2), (3, 1), (1, 2), (2, 3)]


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def circular(kernel: int, padding: object, **options: int) -> nn.Module:
    return nn.Conv2d(
        3,
        3,
        kernel,
        padding=padding,  # type: ignore[arg-type]
        padding_mode="circular",
        **options,  # type: ignore[arg-type]
    )


STEPS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: circular(3, 1),
    "wide conv": lambda: circular(5, 6, dilation=3),
    "conv with a stride": lambda: circular(4, 2, stride=3),
    "same": lambda: circular(4, "same"),
    "rows only": lambda: circular(3, (1, 0)),
    "pad": lambda: Function(lambda x: F.pad(x, (3, 0, 7, 2), mode="circular")),
    "layer": lambda: nn.CircularPad2d((1, 2, 3, 0)),
    "roll": lambda: Function(lambda x: x.roll(3, -1)),
    "roll back": lambda: Function(lambda x: torch.roll(x, -2, 2)),
    "roll twice around": lambda: Function(lambda x: x.roll((16, -21), (2, 3))),
    "roll both ways": lambda: Function(lambda x: torch.roll(x, (-2, 3), dims=(2, 3))),
    "roll channels too": lambda: Function(lambda x: x.roll((1, 3), (1, -1))),
    "roll channels": lambda: Function(lambda x: x.roll(1, 1)),
    "roll nothing": lambda: Function(lambda x: x.roll(0, 2)),
}


@pytest.mark.slow(3)
@pytest.mark.by_day(8)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", STEPS)
def test_opposite_edges_are_neighbours(
    name: str, first: bool, grid: tuple[int, ...]
) -> None:
    """As the first step, which takes an input, or between two convolutions."""
    step = STEPS[name]()
    model = nn.Sequential(step, nn.Conv2d(3, 2, 3, padding=1))
    if not first:
        model.insert(0, nn.Conv2d(3, 3, 3, padding=1))
    x = torch.randn(2, 3, 7, 10)
    for fuse in (0, 3):
        result = on_tiles(model, (x,), uneven_loss, None, grid, fuse=fuse)
        assert_same(result, eager(model, (x,), uneven_loss, None))
        assert not result.barriers


@pytest.mark.slow
def test_several_circular_convolutions_with_wide_halos() -> None:
    layers = (circular(3, 1) for _ in range(4))
    model = nn.Sequential(*layers, nn.Conv2d(3, 3, 3, padding=1), circular(3, 1))
    x = torch.randn(2, 3, 12, 10)
    for grid in GRIDS:
        result = on_tiles(model, (x,), uneven_loss, None, grid, fuse=9)
        assert_same(result, eager(model, (x,), uneven_loss, None))


def test_a_roll_over_all_elements_is_gathered() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), Function(lambda x: x.roll(5)))
    result = on_tiles(model, (torch.randn(2, 3, 7, 10),), uneven_loss, None, (2, 2))
    assert "all elements" in result.barriers[0].reason


def test_an_edge_and_its_neighbour_may_be_two_pieces_of_one_tile() -> None:
    exchange = Exchange(
        0, (8,), (((0, 4),), ((4, 8),)), (((-1, 5),), ((3, 9),)), wraps=True
    )
    first = [(p.source, p.box, p.shift) for p in exchange.pieces if p.dest == 0]
    assert first == [
        (0, ((0, 4),), (0,)),
        (1, ((7, 8),), (-8,)),
        (1, ((4, 5),), (0,)),
    ]
    assert not exchange.seen_from(0).outside
