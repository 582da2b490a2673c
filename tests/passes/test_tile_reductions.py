"""Reductions over dimensions that are cut: values, gradients, ties, what stays cut."""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import inf
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_trunk import cut_along
from tile_support import Function, Step, assert_same, eager, on_tiles, uneven_loss
from torch import Tensor, nn

from gemsc.ir import meta

__all__ = ["cut_along"]  # a fixture
pytestmark = pytest.mark.usefixtures("in_double")

LEFT_OUT = (torch.arange(7) < 4)[:, None]  # all rows of a tile

GRIDS = [(3, 1), (1, 2), (2, 2), (2, 3)]

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean of all": lambda x: x.mean(),
    "mean over pixels": lambda x: x.mean((2, 3)),
    "mean over pixels, kept": lambda x: x.mean(dim=(-1, -2), keepdim=True),
    "mean over rows": lambda x: x.mean(2),
    "mean over columns": lambda x: x.mean(-1),
    "mean over rows, kept": lambda x: x.mean(2, keepdim=True),
    "mean over channels and columns": lambda x: torch.mean(x, (1, 3)),
    "mean over channels": lambda x: x.mean(1),
    "sum of all": lambda x: torch.sum(x),
    "sum over rows and columns": lambda x: x.sum([2, 3], True),
    "sum over columns": lambda x: torch.sum(x, dim=3, keepdim=True),
    "sum over the batch and rows": lambda x: x.sum((0, 2)),
    "sum in another type": lambda x: x.float().sum(2, dtype=torch.float64),
    "amax over pixels": lambda x: x.amax(dim=(2, 3)),
    "amax over rows": lambda x: x.amax(2),
    "amax over columns, kept": lambda x: torch.amax(x, -1, keepdim=True),
    "amin over pixels": lambda x: x.amin((2, 3), keepdim=True),
    "max of all": lambda x: x.max(),
    "min of all": lambda x: torch.min(x),
    "var over pixels": lambda x: x.var((2, 3)),
    "var over rows": lambda x: x.var(2, keepdim=True),
    "var of all": lambda x: torch.var(x),
    "biased var": lambda x: x.var((2, 3), unbiased=False),
    "biased var of all": lambda x: x.var(False),
    "var with correction": lambda x: torch.var(x, (1, 2, 3), correction=2),
    "std over pixels": lambda x: x.std((2, 3), keepdim=True),
    "std over columns": lambda x: x.std(-1, correction=0),
    "adaptive max": lambda x: F.adaptive_max_pool2d(x, 1),
    "max pool of all": lambda x: F.max_pool2d(x, (7, 10)),
    "adaptive mean": lambda x: F.adaptive_avg_pool2d(x, 1),
    "mean of flattened pixels": lambda x: x.flatten(2).mean(-1),
    "mean of flattened pixels, kept": lambda x: x.flatten(2).mean(2, keepdim=True),
    "amax of a view": lambda x: x.view(2, 3, -1).amax(2),
    "std of a reshape": lambda x: x.reshape(2, -1).std(1),
    "mean over channels of pixels": lambda x: x.flatten(2).mean(1),
    "cumsum over rows": lambda x: x.cumsum(2),
    "cumsum over columns": lambda x: torch.cumsum(x, dim=-1),
    "softmax over columns": lambda x: x.softmax(-1),
    "softmax over rows": lambda x: F.softmax(x, dim=2),
    "softmax over channels": lambda x: torch.softmax(x, 1),
    "log_softmax over rows": lambda x: F.log_softmax(4 * x, 2),
    "softmax of flattened pixels": lambda x: x.flatten(2).softmax(2).amax(2),
    "log_softmax of pixels": lambda x: x.flatten(2).log_softmax(-1).mean(-1),
    "softmax layer": nn.Softmax(-1),
    "softmax with rows left out": lambda x: x.masked_fill(LEFT_OUT, -inf).softmax(2),
    "softmax of large numbers": lambda x: (300 * x).softmax(3),
    "flip of rows": lambda x: x.flip(2),
    "flip of rows and columns": lambda x: torch.flip(x, (2, -1)),
    "flip of channels": lambda x: x.flip([1]),
    "flip of everything": lambda x: x.flip(dims=(0, 1, 2, 3)) * x,
}


def check(model: nn.Module, x: Tensor, grid: tuple[int, ...], **options: Any) -> Step:
    step = on_tiles(model, (x,), uneven_loss, None, grid, **options)
    assert_same(step, eager(model, (x,), uneven_loss, None))
    return step


def gathered(step: Step) -> list[str]:
    """Return the names of the exchanges that bring whole values of more than a sum."""
    names = []
    for node in step.programs[0].compute_nodes:
        if getattr(node.target, "__name__", "") == "redistribute":
            layout = meta.layout(node)
            if layout is not None and layout.is_whole:
                names.append(node.name)
    return names


# both axes for all, one axis in turn
ON_GRIDS = [
    (name, grid)
    for index, name in enumerate(REDUCTIONS)
    for grid in ((2, 3), GRIDS[index % 3])
]


@pytest.mark.slow(7)
@pytest.mark.by_day(20)
@pytest.mark.parametrize(("name", "grid"), ON_GRIDS, ids=str)
def test_reductions(name: str, grid: tuple[int, ...]) -> None:
    step = check(Function(REDUCTIONS[name]), torch.randn(2, 3, 7, 10), grid)
    assert not [b for b in step.barriers if "sin" not in str(b.node)], step.barriers


MOVED: dict[str, Callable[[Tensor], Tensor]] = {
    "flipped dimensions one by one": lambda x: x.flip(3, 2),
    "rolled twice": lambda x: x.roll((1, 3, 4), (2, 3, 2)),
    "the last column": lambda x: x[..., -1],
    "rows from the end": lambda x: x.narrow(2, -4, 4),
    "one dimension more": lambda x: x[True, :, 1:],
    "after itself": lambda x: torch.cat([x, x], 2),
    "one window of all rows": lambda x: x.unfold(2, 7, 1),
    "windows of channels": lambda x: x.unfold(1, 2, 1),
    "after others": lambda x: torch.cat([x[:, :, :2], x, x.sin()], 2),
    "after nothing": lambda x: torch.cat([x.new_zeros(0), x], 3),
    "beside means": lambda x: torch.cat([x.mean(2, True).expand_as(x), x], 1),
    "repeated": lambda x: x.repeat(1, 1, 2, 1),
    "normalized rows": lambda x: F.layer_norm(x, (10,)),
    "rows of one size": lambda x: F.rms_norm(x.mean(2), (10,)),
    "softmax of whole numbers": lambda x: (
        x * (9 * x.detach()).long().softmax(2, dtype=torch.float64)
    ),
}


class Around(nn.Module):
    """Two windows want the same rows: around the edge, and with zeros outside."""

    def __init__(self) -> None:
        super().__init__()
        self.around = nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular")

    def forward(self, x: Tensor) -> Tensor:
        return self.around(x) + F.avg_pool2d(x, 3, 1, 1)


def test_what_goes_around_the_edge_is_not_what_has_zeros_outside() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), Around())
    check(model, torch.randn(2, 3, 7, 10), (2, 3))


@pytest.mark.slow(7)
@pytest.mark.parametrize("name", MOVED)
def test_rows_go_where_they_belong(name: str) -> None:
    check(Function(MOVED[name]), torch.randn(2, 3, 7, 10), (2, 3))


@pytest.mark.slow(3)
@pytest.mark.parametrize("value", [0.1, 100.3, 12345.678])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.GroupNorm(2, 4)], ids=repr)
def test_norms_of_what_is_constant(norm: nn.Module, value: float) -> None:
    x = torch.full((2, 4, 300, 301), value, dtype=torch.float32)
    norm = copy.deepcopy(norm).float()
    tiles = on_tiles(norm, (x,), uneven_loss, None, (3, 1)).outputs[0]
    plain = eager(norm, (x,), uneven_loss, None).outputs[0]
    assert tiles.abs().max() <= max(2 * plain.abs().max(), 316 * 1e-7 * value)


class SideBySide(nn.Module):
    """Normalizes groups of channels that lie side by side in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.GroupNorm(2, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x.movedim(1, -1)).movedim(-1, 1))


def test_groups_of_channels_that_lie_side_by_side() -> None:
    check(SideBySide(), torch.randn(2, 4, 2, 3, 3), (2, 1, 1))


@pytest.mark.parametrize("axis", [2, 3])
def test_a_reduction_over_one_axis_leaves_the_other_cut(axis: int) -> None:
    model = Function(lambda x: x * x.mean(axis, keepdim=True).relu())
    step = check(model, torch.randn(2, 3, 7, 10), (2, 2))
    assert not step.barriers
    assert not gathered(step)
    (mean,) = (n for n in step.programs[0].compute_nodes if n.name == "relu")
    layout = meta.layout(mean)
    assert layout is not None
    assert len(set(layout.boxes)) == 2
    assert meta.spec(mean).shape == ((2, 3, 1, 5) if axis == 2 else (2, 3, 4, 1))


class Coordinates(nn.Module):
    """Attention by rows and by columns, each from means over the other axis."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Conv2d(3, 3, (3, 1), padding=(1, 0))
        self.columns = nn.Conv2d(3, 3, (1, 3), padding=(0, 1))
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.rows(x.mean(3, keepdim=True)).sigmoid()
        columns = self.norm(self.columns(x.amax(2, keepdim=True))).sigmoid()
        return x * (rows * columns)


@pytest.mark.slow(4)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("fuse", [0, 2])
def test_what_is_cut_along_one_axis_is_computed_on(
    grid: tuple[int, ...], fuse: int
) -> None:
    step = check(Coordinates(), torch.randn(2, 3, 7, 10), grid, fuse=fuse)
    reasons = {b.reason for b in step.barriers}
    assert reasons <= {"it is cut along some axes of the grid only"}


class Bare(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) * self.weight


@pytest.mark.slow(4)
@pytest.mark.by_day(14)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "amax over pixels",
        "amax over rows",
        "amin over pixels",
        "max of all",
        "min of all",
        "adaptive max",
        "max pool of all",
    ],
)
def test_equal_elements_share_or_yield_the_gradient_as_in_torch(
    name: str, grid: tuple[int, ...]
) -> None:
    x = torch.randint(0, 2, (2, 3, 7, 10)).double()  # ties on and between tiles
    check(Bare(REDUCTIONS[name]), x, grid)
    check(Bare(REDUCTIONS[name]), torch.ones(2, 3, 7, 10), grid)


def test_where_all_are_equal_a_deviation_has_no_gradient() -> None:
    step = check(Bare(lambda x: x.std((2, 3))), torch.ones(2, 3, 7, 10), (2, 2))
    assert torch.equal(step.inputs["0"], torch.zeros(2, 3, 7, 10))


def test_whole_numbers_and_indices_are_gathered() -> None:
    model = Bare(lambda x: x.max(3).values + x.gt(0).long().amax(3))
    step = check(model, torch.randn(2, 3, 7, 10), (2, 2))
    reasons = [barrier.reason for barrier in step.barriers]
    assert any("cut" in reason for reason in reasons)
    assert any("floating point" in reason for reason in reasons)


# what is not as it would be on a tile alone, and why it is gathered, if it is
APART: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "largest whole number": (
        lambda x: F.max_pool2d((9 * x).long(), 3, 1, 1) * x,
        "not floating point",
    ),
    "power mean of a few": (
        lambda x: F.lp_pool2d(x.abs() + 1, 2, 3, 2, ceil_mode=True),
        "last window is not full",
    ),
    "mean by a given number": (
        lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False, divisor_override=5),
        "",
    ),
    "mean of all by a given number": (
        lambda x: F.avg_pool2d(x, 8, divisor_override=5),
        "smaller than the grid",
    ),
    "one window with padding": (
        lambda x: F.avg_pool2d(x, 8, padding=1, stride=8),
        "smaller than the grid",
    ),
    "rows twice": (lambda x: x.repeat(1, 1, 2, 1), "repeats along"),
    "product with itself": (
        lambda x: torch.einsum("bchw,bcwv->bchv", x, x),
        "two of its operands are one value",
    ),
    "norm of columns": (lambda x: F.layer_norm(x, (8,)), "are normalized"),
    "RMS norm of all": (lambda x: F.rms_norm(x, (3, 8, 8)), "are normalized"),
}


@pytest.mark.slow(5)
@pytest.mark.parametrize("name", APART)
def test_what_needs_more_than_a_tile_has(name: str) -> None:
    function, reason = APART[name]
    step = check(Function(function), torch.randn(2, 3, 8, 8), (2, 2))
    reasons = [barrier.reason for barrier in step.barriers]
    assert any(reason in why for why in reasons) if reason else not reasons


class Signs(torch.autograd.Function):
    """Element by element, but not of addends: a gradient must be on one tile."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].sign()


def test_a_backward_of_the_users_own_sees_whole_gradients() -> None:
    def function(x: Tensor) -> Tensor:
        return x * torch.as_tensor(Signs.apply(x.sum(2, keepdim=True)))

    step = check(Function(function), torch.randn(2, 3, 8, 8), (2, 2))
    assert "along some axes of the grid" in step.barriers[0].reason


def test_a_softmax_of_channels_without_samples(
    cut_along: Callable[[int], None],
) -> None:
    cut_along(0)
    step = check(Bare(nn.Softmax2d()), torch.randn(4, 6, 6), (2,))
    assert "batch or channels" in step.barriers[0].reason


WEIGHT = torch.rand(8, 8)
LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int, str]] = {
    "weights": (
        lambda x, y: F.binary_cross_entropy(x, y, weight=WEIGHT.double()),
        1,
        "it has weights",
    ),
    "weights of a layer": (nn.BCELoss(WEIGHT.double()), 1, "it has weights"),
    "a larger target": (F.mse_loss, 3, "different shapes"),
    "an older name": (
        lambda x, y: F.mse_loss(x, y, size_average=False),
        1,
        "size_average or reduce",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_whole_pictures(name: str) -> None:
    loss, channels, reason = LOSSES[name]
    model = nn.Sequential(nn.Conv2d(3, 1, 3, padding=1), nn.Sigmoid())
    given = model, (torch.randn(2, 3, 8, 8),), loss, torch.rand(2, channels, 8, 8)
    step = on_tiles(*given, (2, 2))
    assert_same(step, eager(*given))
    assert reason in step.barriers[-1].reason


class Volume(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(1, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        planes = x.amax((2, 4), keepdim=True) + x.std(3, keepdim=True)
        return (x - planes).var((0, 3)).sum(-1)


@pytest.mark.parametrize("grid", [(2, 2, 2), (2, 1, 2), (1, 3, 1)], ids=str)
def test_volumes_are_reduced_along_any_axes(grid: tuple[int, ...]) -> None:
    assert not check(Volume(), torch.randn(2, 1, 4, 5, 7), grid).barriers


@pytest.mark.slow(1)
@pytest.mark.parametrize("flat", [True, False])
def test_a_dice_loss_of_flattened_masks(flat: bool) -> None:
    def dice(output: Tensor, target: Tensor) -> Tensor:
        if flat:
            output, target = output.sigmoid().view(-1), target.view(-1)
        both = (output * target).sum()
        loss = F.mse_loss(output, target)
        return 1 - 2 * both / (output.sum() + target.sum()) + loss

    x, target = torch.randn(2, 3, 7, 10), torch.rand(2, 1, 7, 10).round()
    model = nn.Conv2d(3, 1, 3, padding=1)
    step = on_tiles(model, (x,), dice, target, (2, 3))
    assert_same(step, eager(model, (x,), dice, target))
    assert not step.barriers
