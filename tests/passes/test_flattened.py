"""Flattened pictures: each tile multiplies its own columns of the weight."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tile_support import Step, assert_same, eager, on_tiles, uneven_loss
from torch import Tensor, nn

from gemsc.base.boxes import everything
from gemsc.ir import meta
from gemsc.passes.spatial.flattened import runs_of
from gemsc.runtime.tiles import linear
from gemsc.runtime.tiles.grid import Grid
from gemsc.runtime.transport.device_transport import DeviceTransport
from gemsc.runtime.transport.local import run_local
from gemsc.runtime.transport.streams import Streams

pytestmark = pytest.mark.usefixtures("in_double")

GRIDS = [(2, 2), (3, 1), (1, 2), (2, 3)]
FEATURES = 4 * 7 * 10


class Head(nn.Module):
    """A convolution, then whatever comes after it."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.rest = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.conv(x))


class Function(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Functional(nn.Module):
    """F.linear with a weight of its own."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, FEATURES) / 10)
        self.bias = nn.Parameter(torch.randn(5)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.view(x.shape[0], -1), self.weight, self.bias)


class Twice(nn.Module):
    """One layer for two values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(1)) * self.linear(x.flatten(1).tanh())


HEADS: dict[str, Callable[[], list[nn.Module]]] = {
    "layers": lambda: [nn.Flatten(), nn.Linear(FEATURES, 5)],
    "without bias": lambda: [nn.Flatten(), nn.Linear(FEATURES, 5, bias=False)],
    "method": lambda: [Function(lambda x: x.flatten(1)), nn.Linear(FEATURES, 5)],
    "reshape": lambda: [Function(lambda x: x.reshape(2, -1)), nn.Linear(FEATURES, 5)],
    "function": lambda: [Functional(bias=True)],
    "function without bias": lambda: [Functional(bias=False)],
    "one layer twice": lambda: [Twice()],
    "layers between": lambda: [
        nn.Flatten(),
        nn.ReLU(),
        nn.Dropout(0.0),
        Function(lambda x: x * 2 + x.tanh()),
        nn.Linear(FEATURES, 6),
        nn.ReLU(),
        nn.Linear(6, 5),
    ],
    "pixels": lambda: [nn.Flatten(2), nn.Linear(70, 5)],
    "columns": lambda: [nn.Linear(10, 5)],
    "channels of all pixels": lambda: [
        Function(lambda x: x.movedim(1, -1).reshape(-1, 4)),
        nn.Linear(4, 3),
        Function(lambda x: x.tanh().mean(0)),
    ],
    "back to a picture": lambda: [
        nn.Flatten(),
        nn.Linear(FEATURES, 60),
        nn.Unflatten(1, (1, 6, 10)),
        nn.Conv2d(1, 2, 3),
    ],
}


def check(model: nn.Module, x: Tensor, grid: tuple[int, ...], **options: Any) -> Step:
    step = on_tiles(model, (x,), uneven_loss, None, grid, **options)
    assert_same(step, eager(model, (x,), uneven_loss, None))
    return step


def largest_sum(step: Step) -> int:
    """Return the elements of the largest value that is gathered."""
    sizes = [0]
    for node in step.programs[0].compute_nodes:
        if getattr(node.target, "__name__", "") == "redistribute":
            layout = meta.layout(node)
            assert layout is not None
            if layout.boxes[0] == everything(layout.shape):
                sizes.append(int(torch.Size(layout.shape).numel()))
    return max(sizes)


@pytest.mark.slow(5)
@pytest.mark.by_day(16)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", HEADS)
def test_each_tile_multiplies_its_own_features(
    name: str, grid: tuple[int, ...]
) -> None:
    step = check(Head(*HEADS[name]()), torch.randn(2, 3, 7, 10), grid)
    assert not step.barriers
    assert largest_sum(step) <= 2 * 4 * 7 * 5


def test_a_tiles_gradient_is_zero_outside_its_columns() -> None:
    layer, x = nn.Linear(FEATURES, 5), torch.randn(2, 4, 7, 10)

    def main(transport: Any) -> tuple[Tensor, Tensor]:
        grid = Grid(DeviceTransport(transport, Streams()), (0, 1), transport.rank)
        rows = ((0, 4), (4, 7))[grid.tile]
        fc = copy.deepcopy(layer)
        box = ((0, 4), rows, (0, 10))
        result = linear(
            grid, x[:, :, slice(*rows)], fc.weight, fc.bias, shape=(4, 7, 10), box=box
        )
        (result.square().sum() / 2).backward()
        assert fc.weight.grad is not None
        return result.detach(), fc.weight.grad.view(5, 4, 7, 10)

    (first, upper), (second, lower) = run_local(2, main)
    result = layer(x.flatten(1))
    result.square().sum().backward()
    assert torch.allclose(first, result, rtol=0, atol=1e-12)
    assert torch.equal(first, second)
    assert not upper[:, :, 4:].any()
    assert not lower[:, :, :4].any()
    both = (upper + lower).flatten(1)
    assert layer.weight.grad is not None
    assert torch.allclose(both, layer.weight.grad, rtol=0, atol=1e-12)


def test_a_picture_that_is_multiplied_at_once() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(210, 8), nn.ReLU(), nn.Linear(8, 5))
    step = check(model, torch.randn(2, 3, 7, 10), (2, 2))
    assert not step.barriers


def test_volumes_and_sequences() -> None:
    volume = nn.Sequential(
        nn.Conv3d(1, 2, 3), nn.Flatten(), nn.Linear(2 * 2 * 3 * 5, 4)
    )
    assert not check(volume, torch.randn(2, 1, 4, 5, 7), (2, 1, 2)).barriers
    sequence = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(33, 4))
    assert not check(sequence, torch.randn(2, 2, 13), (3,)).barriers


@pytest.mark.parametrize("fuse", [0, 2])
def test_a_flattened_value_that_was_computed_with_its_halo(fuse: int) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.ReLU(),
        Function(
            lambda x: torch.cat([x.flatten(1), F.max_pool2d(x, 3, 1).flatten(1)], 1)
        ),
        nn.Linear(FEATURES + 4 * 5 * 8, 5),
    )
    check(model, torch.randn(2, 3, 7, 10), (2, 2), fuse=fuse)
    plain = nn.Sequential(
        *(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3)),
        nn.Flatten(),
        nn.Linear(210, 5),
    )
    assert not check(plain, torch.randn(2, 3, 7, 10), (2, 2), fuse=fuse).barriers


@pytest.mark.slow(4)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.flatten(1).relu(),
        lambda x: x.flatten(1).cumsum(1),
        lambda x: x.flatten(1)[:, 3:9] * 2,
        lambda x: (x.flatten(1) * torch.arange(280.0)).sum(1),
        lambda x: (x.flatten(1) + x.mT.flatten(1)).sum(1),
        lambda x: x.flatten(2).transpose(1, 2).softmax(1),
        lambda x: x.flatten(1).prod(0),
    ],
    ids=["relu", "cumsum", "slice", "weights", "transposed", "tokens", "rows"],
)
def test_what_needs_it_flat_has_rows_of_it(
    function: Callable[[Tensor], Tensor],
) -> None:
    step = check(Head(Function(function)), torch.randn(2, 3, 7, 10), (2, 2))
    assert not step.barriers


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x.flatten(1), "returns it flattened"),
        (lambda x: x.flatten(0, 2).cumsum(0), "fewer rows than tiles"),
    ],
    ids=["flat", "few rows"],
)
def test_what_cannot_be_laid_in_rows_is_gathered(
    function: Callable[[Tensor], Tensor], reason: str
) -> None:
    step = check(Head(Function(function)), torch.randn(2, 3, 7, 10), (3, 1))
    assert any(reason in barrier.reason for barrier in step.barriers)


@pytest.mark.slow
def test_what_a_tile_keeps_is_predicted_to_the_byte() -> None:
    model = Head(nn.ReLU(), nn.Flatten(), nn.Linear(FEATURES, 5), nn.ReLU())
    step = check(model, torch.randn(2, 3, 7, 10), (2, 2), facts=True)
    predicted = [
        sum(meta.facts(node).saved_bytes for node in program.compute_nodes)
        for program in step.programs
    ]
    assert step.saved == predicted


@pytest.mark.parametrize(
    ("shape", "result", "runs"),
    [
        ((2, 3, 4), (6, 4), [("ab", "a"), ("c", "b")]),
        ((6, 4), (2, 3, 4), [("a", "ab"), ("b", "c")]),
        ((2, 3), (2, 3, 1), [("a", "a"), ("b", "b"), ("", "c")]),
        ((3, 0), (0,), [("ab", "a")]),
        ((0,), (3, 0), [("a", "ab")]),
    ],
)
def test_runs_of_dimensions_have_as_many_elements_also_of_none(
    shape: tuple[int, ...], result: tuple[int, ...], runs: list[tuple[str, str]]
) -> None:
    pairs = [
        ("".join("abc"[i] for i in one), "".join("abc"[i] for i in two))
        for one, two in runs_of(shape, result)
    ]
    assert pairs == runs


@pytest.mark.parametrize(
    "best",
    [
        lambda y: y.max(1, keepdim=True)[0],
        lambda y: y.amax(1, keepdim=True),
        lambda y: y.mean(1, keepdim=True),
    ],
)
def test_a_reduction_over_channels_and_rows_that_were_joined(
    best: Callable[[Tensor], Tensor],
) -> None:
    """Joined with columns that were not, and what it is taken of."""
    layers = Function(lambda x: x.flatten(1, 2)), Function(lambda y: y.sin() + best(y))
    for grid in ((2, 1), (1, 2)):
        check(Head(*layers, nn.Linear(10, 3)), torch.randn(2, 3, 6, 10), grid)
