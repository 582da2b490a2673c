"""One wide halo for several layers: the same results, with fewer exchanges."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from models import MODELS, ResNetV2
from random_networks import random_case, seeds
from tile_support import Step, assert_same, eager, on_tiles
from torch import Tensor, nn

from gemsc.ir import meta
from gemsc.ir.flow import exchange_of, is_exchange
from gemsc.ir.program import Program
from gemsc.runtime import tiles

pytestmark = pytest.mark.usefixtures("in_double")


def square(output: Tensor) -> Tensor:
    return output.square().mean()


def num_exchanges(program: Program) -> int:
    exchanges = (exchange_of(n) for n in program.compute_nodes if is_exchange(n))
    return sum(not exchange.is_local for exchange in exchanges)


def exchanges_of(step: Step) -> int:
    return num_exchanges(step.programs[0])


@pytest.mark.slow
@pytest.mark.parametrize("first", seeds(5, 60, 5))
def test_random_networks_are_the_networks(first: int) -> None:
    for seed in range(first, first + 5):
        model, inputs, loss, target, grid = random_case(seed)
        expected = eager(model, inputs, loss, target)
        if not expected.is_finite:
            continue
        try:
            layers = 2 + seed % 3
            step = on_tiles(model, inputs, loss, target, grid, fuse=layers)
            assert_same(step, expected)
        except BaseException as error:
            error.add_note(f"seed {seed}, {layers} layers, grid {grid}: {model}")
            raise


@pytest.mark.slow
@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("name", "size", "grid", "counts"),
    [
        ("resnet18", 64, (2, 2), {2: 8}),  # 17 without
        ("unet", 48, (2, 2), {2: 9, 3: 7}),  # 17
        ("resnet v2", 37, (2, 2), {2: 3, 3: 2}),  # 6
    ],
)
def test_networks_are_the_networks_with_fewer_exchanges(
    name: str, size: int, grid: tuple[int, ...], counts: dict[int, int]
) -> None:
    x = torch.randn(2, 3, size, size)
    if name == "resnet v2":
        model, target, loss = (
            ResNetV2(depth=20, width=4),
            torch.tensor([1, 0]),
            F.cross_entropy,
        )
    else:
        case = MODELS[name]
        model, loss = case.build().double(), case.loss
        _, target = case.inputs(1, torch.float64)
    if name == "unet":
        target = torch.rand(2, 1, size, size).round()
    expected = eager(model, (x,), loss, target)
    for layers, count in counts.items():
        step = on_tiles(model, (x,), loss, target, grid, fuse=layers)
        assert_same(step, expected)
        assert exchanges_of(step) == count


def stack(between: Callable[[], nn.Module]) -> nn.Sequential:
    """Return five convolutions; the input comes with the halo of the first."""
    layers: list[nn.Module] = []
    for width in (2, 4, 4, 4, 4):
        # a sigmoid is not zero where the picture ends
        layers += [nn.Conv2d(width, 4, 3, padding=1), between(), nn.Sigmoid()]
    return nn.Sequential(*layers)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "none": nn.Identity,
    "batch": lambda: nn.BatchNorm2d(4),
    "group": lambda: nn.GroupNorm(2, 4),
    "instance": lambda: nn.InstanceNorm2d(4, affine=True),
}


@pytest.mark.slow(1)
@pytest.mark.by_day(8)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("layers", "count"), [(1, 4), (2, 2), (3, 1), (5, 0), (9, 0)])
def test_as_many_layers_share_a_halo_as_asked(
    layers: int, count: int, norm: str
) -> None:
    model, x = stack(NORMS[norm]), torch.randn(2, 2, 16, 17)
    step = on_tiles(model, (x,), square, None, (2, 2), fuse=layers)
    assert_same(step, eager(model, (x,), square, None))
    assert exchanges_of(step) == count


def test_rows_computed_twice_have_the_mask_of_their_owner() -> None:
    model, x = stack(lambda: nn.Dropout(0.5)), torch.randn(2, 2, 16, 17)
    step = on_tiles(model, (x,), square, None, (2, 2), fuse=2)
    overlaps = 0
    for tile, program in enumerate(step.programs):
        for node in program.compute_nodes:
            if node.target is tiles.dropout:
                layout = meta.layout(node)
                assert layout is not None
                assert node.kwargs["shape"] == layout.shape
                assert node.kwargs["box"] == layout.boxes[tile]
                overlaps += layout.boxes != (layout.owned or layout.boxes)
    assert overlaps == 4 * 2


def test_a_tile_that_computes_all_rows_draws_as_the_others_do() -> None:
    wide = nn.Conv2d(2, 2, 5, padding=2)
    model = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Dropout(0.5), wide)
    step = on_tiles(model, (torch.randn(1, 2, 6, 8),), square, None, (3, 1), fuse=2)
    along = [
        node.kwargs.get("along")
        for program in step.programs
        for node in program.compute_nodes
        if node.target is tiles.dropout
    ]
    assert along == [None, 2, None]


@pytest.mark.slow
def test_what_is_kept_is_predicted_to_the_byte() -> None:
    model, x = stack(lambda: nn.BatchNorm2d(4)), torch.randn(2, 2, 32, 32)
    step = on_tiles(model, (x,), square, None, (2, 2), facts=True, fuse=3)
    predicted = [
        sum(meta.facts(node).saved_bytes for node in program.compute_nodes)
        for program in step.programs
    ]
    assert step.saved == predicted


@pytest.mark.slow
def test_values_that_two_layers_want_with_other_halos_travel_once() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(2, 2, 1)
            self.small = nn.Conv2d(2, 2, 3, padding=1)
            self.large = nn.Conv2d(2, 2, 5, padding=2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x.movedim(1, 1).cumsum(1))
            return self.small(x) + self.large(x)

    model, x = Two(), torch.randn(2, 2, 12, 12)
    expected = eager(model, (x,), square, None)
    apart = on_tiles(model, (x,), square, None, (2, 2))
    assert exchanges_of(apart) == 2
    once = on_tiles(model, (x,), square, None, (2, 2), fuse=1)
    assert_same(once, expected)
    assert exchanges_of(once) == 1
