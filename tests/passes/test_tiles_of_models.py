"""Real networks on tiles, and corners that random networks do not reach."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import MODELS, AmoebaNet, ResNetV2
from tile_support import Function, assert_same, eager, on_tiles
from torch import Tensor, nn

import gemsc
from gemsc.base.boxes import everything
from gemsc.ir import meta
from gemsc.ir.flow import exchange_of, is_exchange
from gemsc.passes.spatial.need import mirrored, support, transposed, window
from gemsc.runtime.tiles import batch_norm, dropout
from gemsc.runtime.tiles.grid import Grid
from gemsc.runtime.transport.device_transport import DeviceTransport
from gemsc.runtime.transport.local import run_local
from gemsc.runtime.transport.streams import Streams

pytestmark = pytest.mark.usefixtures("in_double")


def square(output: Tensor) -> Tensor:
    return output.square().mean()


def check(
    model: nn.Module,
    x: Tensor,
    grid: tuple[int, ...],
    loss: Callable[..., Tensor] = square,
    target: Any = None,
    **options: Any,
) -> Any:
    step = on_tiles(model, (x,), loss, target, grid, **options)
    assert_same(step, eager(model, (x,), loss, target))
    return step


@pytest.mark.slow
@pytest.mark.by_day(2)
@pytest.mark.parametrize(
    ("name", "size", "grid"),
    [
        ("resnet18", 64, (2, 2)),
        ("resnet18", 75, (3, 1)),
        ("resnet50", 97, (1, 2)),
        ("unet", 48, (2, 3)),
        ("densecnn", 33, (2, 2)),
    ],
)
def test_networks_on_tiles_are_the_networks(
    name: str, size: int, grid: tuple[int, ...]
) -> None:
    case = MODELS[name]
    model = case.build().double()
    _, target = case.inputs(1, torch.float64)
    if name == "unet":
        target = torch.rand(2, 1, size, size).round()
    x = torch.randn(2, 3, size, size)
    step = check(model, x, grid, case.loss, target)
    if name != "resnet18":
        assert not step.barriers


OTHER_NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "real as complex": lambda x: torch.view_as_complex(x.unflatten(3, (3, 2))).abs(),
    "complex as real": lambda x: (
        torch.view_as_real((x * (1 + 2j)).unflatten(3, (3, 2))).square().prod(4)
    ),
    "imag": lambda x: (x * (1 + 2j)).unflatten(3, (3, 2)).imag.square(),
    # what the second exchange sends is kept as what the first one gathered
    "twice": lambda x: F.conv2d(
        torch.view_as_complex(x.unflatten(3, (3, 2))),
        torch.ones(3, 3, 5, 3, dtype=torch.complex128, requires_grad=True),
        padding=(2, 1),
    ).abs(),
}


@pytest.mark.slow(4)
@pytest.mark.parametrize("name", OTHER_NUMBERS)
@pytest.mark.parametrize("grid", [(1, 2), (2, 2)])
def test_what_tiles_send_is_kept_right_as_numbers_of_another_kind(
    grid: tuple[int, int], name: str
) -> None:
    """Complex numbers and their parts are the same memory, with other strides."""
    x = torch.randn(2, 3, 8, 6)  # a tile has three columns: half of a pair is sent
    step = check(Function(OTHER_NUMBERS[name]), x, grid)
    assert step.barriers


@pytest.mark.slow
def test_a_residual_network_of_version_2() -> None:
    x, target = torch.randn(2, 3, 37, 37), torch.tensor([1, 0])
    step = check(ResNetV2(depth=20, width=4), x, (2, 2), F.cross_entropy, target)
    assert not step.barriers


@pytest.mark.nightly
def test_a_network_of_cells() -> None:
    x, target = torch.randn(2, 3, 48, 64), torch.tensor([1, 0])
    model = AmoebaNet(num_cells=3, width=16)
    step = check(model, x, (2, 2), F.cross_entropy, target)
    assert not step.barriers


@pytest.mark.slow
def test_what_a_tile_keeps_is_predicted_to_the_byte_and_a_quarter_of_all() -> None:
    layers = []
    for width in (3, 8, 8, 8):
        layers += [nn.Conv2d(width, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    model, x = nn.Sequential(*layers, nn.MaxPool2d(3, 2, 1)), torch.randn(2, 3, 64, 64)
    tiles = on_tiles(model, (x,), square, None, (2, 2), facts=True)
    predicted = [
        sum(meta.facts(node).saved_bytes for node in program.compute_nodes)
        for program in tiles.programs
    ]
    assert tiles.saved == predicted
    (alone,) = on_tiles(model, (x,), square, None, (1, 1)).saved
    assert max(tiles.saved) <= 0.30 * alone


def test_an_input_comes_with_the_halo_of_its_first_layer() -> None:
    step = check(nn.Conv2d(1, 1, 5, padding=2), torch.randn(1, 1, 12, 12), (2, 2))
    (item,) = step.programs[0].inputs
    assert item.spec.shape == (1, 1, 8, 8)
    nodes = step.programs[0].compute_nodes
    exchanges = [exchange_of(node) for node in nodes if is_exchange(node)]
    assert all(exchange.is_local for exchange in exchanges)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.conv(x)) + self.conv(x.mean((2, 3), keepdim=True))


def test_a_layer_may_be_called_on_tiles_and_on_whole_values() -> None:
    check(Branches(), torch.randn(2, 3, 9, 10), (2, 2))


class Padded(nn.Module):
    """The middle of three tiles returns what it has: 5 rows of 14, and of 16."""

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x.tanh(), (0, 0, 1, 1), "reflect")


@pytest.mark.parametrize("layers", [[Padded()], [nn.ZeroPad2d((0, 0, 1, 1))]])
def test_an_output_says_which_part_it_is(layers: list[nn.Module]) -> None:
    check(nn.Sequential(*layers), torch.randn(1, 2, 14, 4), (3, 1))


@pytest.mark.slow(1)
@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_a_tile_drops_what_it_mirrored_too_much(mode: str) -> None:
    """Of three rows the second tile has one, and mirrors two."""
    conv = nn.Conv2d(2, 4, (2, 3), padding="same", padding_mode=mode)
    model, x = nn.Sequential(nn.Conv2d(1, 2, 1), conv), torch.randn(2, 1, 3, 8)
    check(model, x, (2, 1))
    given = {"loss": nn.MSELoss(), "example_target": torch.randn(2, 4, 3, 8)}
    gemsc.compile(model, (x,), ranks=2, tiles=("2x1",), **given)  # shapes are checked


def ramp(*shape: int) -> Tensor:
    """Return weights that are all different."""
    return torch.arange(1.0, prod(shape) + 1).view(shape).cos()


WINDOWS: dict[str, Callable[[Tensor], Tensor]] = {
    "an even window keeps the size": lambda x: F.conv2d(
        x, ramp(2, 3, 2, 4), padding="same"
    ),
    "one number for both": lambda x: F.max_pool2d(x, (2,), [2], (1,)),
    "apart": lambda x: F.max_pool2d(x, (3, 2), 1, 1, (1, 2)),
    "channels that were rows": lambda x: F.conv2d(x.transpose(1, 2), ramp(4, 9, 2, 3)),
    "grown": lambda x: F.conv_transpose2d(
        x, ramp(3, 2, 2, 3), None, (3, 2), (1, 2), (2, 1), 1, (1, 2)
    ),
    "grown by less than the step": lambda x: F.conv_transpose2d(
        x, ramp(3, 2, 2, 1), ramp(2), (3, 4), 0, (2, 3)
    ),
    "grown by what is appended": lambda x: F.conv_transpose2d(
        x[:, :, :3], ramp(3, 2, 1, 1), ramp(2), 1, 0, 3, 1, 4
    ),
    "mirrored beyond its own": lambda x: F.pad(x[:, :, :3], (0, 0, 2, 2), "reflect"),
    "a layer that mirrors": nn.ReflectionPad2d((2, 1, 1, 2)),
    "the last window is not full": lambda x: F.avg_pool2d(x, 4, 3, ceil_mode=True),
    "padding counts": lambda x: F.avg_pool2d(x, 3, 2, 1, True),
    "padding does not count": lambda x: F.avg_pool2d(x, 3, 2, 1, True, False),
    "another divisor": lambda x: F.avg_pool2d(x, 4, 3, 1, True, divisor_override=5),
    "everything by another divisor": lambda x: F.avg_pool2d(
        x, (9, 10), divisor_override=5
    ),
    "almost everything": lambda x: F.avg_pool2d(x, (9, 10), padding=1),
    "powers": lambda x: F.lp_pool2d(x, 2, 4, 3, ceil_mode=True),
    "the largest of numbers below zero": lambda x: F.max_pool2d(x - 9, 3, 2, 1),
}


@pytest.mark.slow(17)
@pytest.mark.parametrize("grid", [(2, 1), (1, 3)], ids=str)
@pytest.mark.parametrize("name", WINDOWS)
def test_windows(name: str, grid: tuple[int, ...]) -> None:
    check(Function(WINDOWS[name]), torch.randn(2, 3, 9, 10), grid)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_rows_are_mirrored_without_a_batch(mode: str) -> None:
    conv = nn.Conv2d(3, 3, 3, padding=1, padding_mode=mode)
    padded = Function(lambda x: F.pad(x, (2, 1, 1, 2), mode))
    check(nn.Sequential(conv, padded), torch.randn(3, 7, 8), (2, 2))


def test_what_is_cropped_is_not_wrapped_around() -> None:
    model = Function(lambda x: F.pad(x, (2, -1, 0, 1), "circular"))
    step = check(model, torch.randn(1, 3, 7, 8), (2, 2))
    assert step.barriers[0].reason == "it crops what it wraps around"


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).clone()
        y[:, 0] = 0
        return self.conv(y.abs())


def test_memory_that_is_changed_in_place_is_gathered_first() -> None:
    step = check(InPlace(), torch.randn(2, 3, 9, 10), (2, 2))
    assert "changed in place" in step.barriers[0].reason


class Cleared(nn.Module):
    """It changes a part of what comes from the tiles of a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 1)

    def changed(self, y: Tensor) -> Tensor:
        y[..., 0] = 0
        return y

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.changed(self.first(x).sin()))


class Raised(Cleared):
    def changed(self, y: Tensor) -> Tensor:
        y[:, :3] += 1.0  # all of them
        return y


@pytest.mark.slow(2)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", [Cleared, Raised])
def test_what_is_changed_in_place_is_gathered_where_it_is_used(
    kind: type[Cleared], ranks: int
) -> None:
    """In its stage, or in the next one, which has no tiles."""
    given: dict[str, Any] = {"ranks": ranks, "tiles": ("2x1",)}
    if ranks == 3:
        given["cuts"] = ("second",)
    step = gemsc.compile(kind(), (torch.randn(2, 3, 8, 8),), loss=square, **given)
    assert step.plan.unchecked == ""


class ChannelsBehind(nn.Module):
    """The second tile has one column: with channels behind, as if they were last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 3, 1, 2), nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).movedim(1, -1))


def test_both_ends_lay_a_value_out_alike_whatever_a_tile_has_of_it() -> None:
    given: dict[str, Any] = {"ranks": 3, "tiles": ("1x2",), "cuts": ("second",)}
    x = torch.randn(2, 4, 7, 6)
    step = gemsc.compile(ChannelsBehind(), (x,), loss=square, **given)
    assert step.plan.unchecked == ""


class ActivatedInPlace(nn.Module):
    """As MONAI's V-Net: ELU, which has no twin, on a copy; channels repeated."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.repeat(1, 2, 1, 1)
        twice = F.elu_(y)
        kept = twice.clone()
        kept.add_(x.mean((2, 3)).repeat_interleave(2, 1)[:, :, None, None])
        middle = twice[:, 1:4].sigmoid()
        return torch.cat((middle, F.celu_(kept * 2), y.tile((2, 1, 1))), 1)


@pytest.mark.slow
def test_activations_in_place_on_copies_are_not_gathered() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 3, 3, padding=1), ActivatedInPlace(), nn.Conv2d(21, 1, 3)
    )
    step = check(net, torch.randn(2, 3, 9, 10), (2, 2))
    assert not step.barriers


class ChangedViews(nn.Module):
    """Views of what is changed see the change; a whole value takes up tiles."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        view = y[:, 1:]
        y.add_(1)
        whole = x.mean((2, 3), keepdim=True).expand_as(x).clone()
        other = whole.mul(1)
        row = other[:, :1]
        other.mul_(x)
        return torch.cat((view * y[:, :1], row + other), 1)


def test_views_of_what_is_changed_in_place_see_the_change() -> None:
    check(ChangedViews(), torch.randn(2, 3, 9, 10), (2, 2))


class OfGivenSize(nn.Module):
    """One layer, called twice, whose results have other rests."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(2, 2, 3, 2, 1)
        self.up = nn.ConvTranspose2d(2, 2, 3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        middle = self.up(self.down(x), output_size=x.shape[2:])
        small = middle[:, :, 1:, 1:]
        return middle[:, :, 1:, 1:] + self.up(self.down(small), small.shape[2:])


@pytest.mark.slow(1)
@pytest.mark.parametrize("grid", [(2, 2), (2, 1)])
def test_a_transposed_convolution_may_be_told_its_size(grid: tuple[int, ...]) -> None:
    assert not check(OfGivenSize(), torch.randn(2, 2, 12, 15), grid).barriers


@pytest.mark.slow
def test_norms_and_poolings_may_be_called_more_than_once() -> None:
    conv = nn.Conv2d(2, 2, 3, padding=1)
    layers = [
        nn.MaxPool2d(3, 1, 1),
        nn.AvgPool2d(3, 1, 1),
        nn.GroupNorm(2, 2),
        nn.InstanceNorm2d(2, affine=True),
        nn.InstanceNorm2d(2),
        nn.LayerNorm((12, 15)),
    ]
    net = nn.Sequential(*layers, conv, nn.Softplus(), *layers)
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    assert not check(net, torch.randn(2, 2, 12, 15), (2, 2)).barriers


def test_running_statistics_of_instances_are_those_of_the_whole_picture() -> None:
    norm = nn.InstanceNorm2d(2, track_running_stats=True)
    net = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), norm, nn.Conv2d(2, 2, 1))
    (barrier,) = check(net, torch.randn(2, 2, 12, 15), (2, 2)).barriers
    assert barrier.reason == "it keeps running statistics"


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.max_pool2d(x, 3, 2, 1),
        lambda x: F.pad(x, (1, 1, 2, 1), value=2.0),
        lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=5),
    ],
    ids=["largest", "padded", "mean", "sum"],
)
def test_what_lies_outside_of_numbers_below_zero(
    function: Callable[[Tensor], Tensor],
) -> None:
    x = -1 - torch.rand(2, 3, 12, 10)
    assert not check(Function(function), x, (2, 2)).barriers


class Embedded(nn.Module):
    """A position table that meets tiles, and a norm over pixels with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 3, 9, 10))
        self.norm = nn.LayerNorm((3, 9, 10))
        nn.init.normal_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x * self.table)


def test_parameters_of_the_size_of_the_picture_are_cut() -> None:
    step = check(Embedded(), torch.randn(2, 3, 9, 10), (2, 3))
    assert not step.barriers


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.repeat_interleave(torch.arange(8), 2, output_size=28),
        lambda x: x * (F.one_hot(x.argmax(1).flatten(), 3).sum(0) > 0).sum(),
    ],
    ids=["repeat_interleave", "unique"],
)
def test_what_is_advised_for_sizes_that_depend_on_data_runs_on_tiles(
    function: Callable[[Tensor], Tensor],
) -> None:
    check(Function(function), torch.randn(2, 3, 8, 8), (2, 2))


class Sorted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sort(x, dim=-1).values.cumsum(-2) * x.cumprod(-1)


def test_an_unknown_operation_is_gathered_and_reported() -> None:
    net = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), Sorted(), nn.Conv2d(3, 1, 3))
    step = check(net, torch.randn(2, 3, 9, 10), (2, 2))
    assert [barrier.num_bytes for barrier in step.barriers] == [4320] * 2
    assert "cut" in step.barriers[0].reason


def strided(x: Tensor) -> Tensor:
    return torch.as_strided(x, x.shape, (192, 64, 1, 8))


@pytest.mark.slow(5)
@pytest.mark.parametrize(
    "function",
    [
        strided,
        lambda x: x.narrow(2, torch.tensor(1), 4).repeat(1, 1, 2, 1),
        lambda x: x.reshape(torch.as_tensor(2) - torch.as_tensor(1), *x.shape)[0],
        lambda x: torch.block_diag(*x[0, 0].chunk(2)),
        lambda x: torch.frexp(x)[0],
    ],
    ids=["as_strided", "narrow from a tensor", "by a tensor", "rows of 2-d", "frexp"],
)
@pytest.mark.parametrize("grid", [(2, 1), (2, 2)])
def test_what_counts_all_of_the_memory_or_gives_several_values_is_gathered(
    function: Callable[[Tensor], Tensor], grid: tuple[int, ...]
) -> None:
    assert check(Function(function), torch.randn(2, 3, 8, 8), grid).barriers


@pytest.mark.slow(7)
@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(
            torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64), ignore_index=1
        ),
        nn.CrossEntropyLoss(label_smoothing=0.2),
        nn.MSELoss(),
        nn.MSELoss(reduction="sum"),
        nn.L1Loss(),
        nn.SmoothL1Loss(beta=0.3),
        nn.HuberLoss(),
        nn.BCEWithLogitsLoss(),
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0], dtype=torch.float64)),
        nn.BCEWithLogitsLoss(pos_weight=torch.arange(10.0, dtype=torch.float64)),
        lambda output, target: F.mse_loss(output, target, size_average=False),
        lambda output, target: F.binary_cross_entropy_with_logits(
            output, target, target + 1
        ),
    ],
    ids=lambda loss: type(loss).__name__,
)
def test_losses_over_pixels(loss: Callable[..., Tensor]) -> None:
    x, target = torch.randn(2, 3, 7, 10), torch.rand(2, 3, 7, 10)
    if isinstance(loss, nn.CrossEntropyLoss):
        target = torch.randint(3, (2, 7, 10))
    check(nn.Conv2d(3, 3, 3, padding=1), x, (2, 2), loss, target)


@pytest.mark.slow
def test_three_dimensions_and_rows_only() -> None:
    net = nn.Sequential(
        nn.Conv3d(2, 3, 3, padding=1),
        nn.BatchNorm3d(3),
        nn.ReLU(),
        nn.MaxPool3d(2),
        nn.ConvTranspose3d(3, 2, 2, stride=2),
    )
    x = torch.randn(1, 2, 8, 8, 8)
    for grid in ((2, 2, 2), (2, 1, 1), (1, 1, 3)):
        assert not check(net, x, grid).barriers


def test_dropout_is_the_part_of_the_whole_mask() -> None:
    layer = nn.Dropout(0.4)
    value = torch.randn(2, 3, 8, 8)
    torch.manual_seed(5)
    whole = layer(value)
    for rows in ((0, 4), (4, 8)):
        torch.manual_seed(5)
        box = (*everything((2, 3)), rows, (0, 8))
        part = value[:, :, slice(*rows)]
        result = dropout(part, layer.p, shape=(2, 3, 8, 8), box=box)
        assert torch.equal(result, whole[:, :, slice(*rows)])


def test_running_statistics_do_not_depend_on_how_unlike_the_tiles_are() -> None:
    """Mean 1e6 on one tile: E[x^2] - E[x]^2 would lose all digits in float32."""
    value = torch.randn(2, 4, 8, 8, dtype=torch.float32)
    value[:, :, 4:] += 1000
    whole = nn.BatchNorm2d(4, dtype=torch.float32)
    expected = whole(value)

    def main(transport: Any) -> Tensor:
        grid = Grid(DeviceTransport(transport, Streams()), (0, 1), transport.rank)
        layer = nn.BatchNorm2d(4, dtype=torch.float32)
        rows = slice(4 * transport.rank, 4 * transport.rank + 4)
        result = batch_norm(grid, value[:, :, rows].contiguous(), layer)
        assert torch.allclose(layer.running_var, whole.running_var, rtol=1e-6)
        return result.detach()

    result = torch.cat(run_local(2, main), 2)
    assert torch.allclose(result, expected, atol=1e-5)


def test_needs_at_an_aligned_cut() -> None:
    """Halo widths (left, right) for an output that begins at 8 and ends at 16."""

    def halo(**settings: int) -> tuple[int, int]:
        s = settings["stride"]
        start, stop = window((8, 16), **settings)
        return 8 * s - start, stop - 16 * s

    assert halo(kernel=3, stride=1, dilation=1, before=1) == (1, 1)
    assert halo(kernel=3, stride=2, dilation=1, before=1) == (1, 0)
    assert halo(kernel=7, stride=2, dilation=1, before=3) == (3, 2)
    assert halo(kernel=2, stride=2, dilation=1, before=0) == (0, 0)
    assert halo(kernel=1, stride=2, dilation=1, before=0) == (0, -1)


def test_needs_of_what_makes_larger() -> None:
    settings = {"size": 20, "dilation": 1}
    two = transposed((8, 16), kernel=2, stride=2, padding=0, **settings)
    assert (two.need, two.left, two.right) == ((4, 8), 0, 0)
    four = transposed((8, 16), kernel=4, stride=2, padding=1, **settings)
    assert four.need == (3, 9)
    assert support((8, 16), size=20, factor=2, reach=(0, 1)) == (3, 9)
    assert support((8, 16), size=20, factor=2, reach=(1, 2)) == (2, 10)
    assert mirrored((-2, 4), size=20, before=0, mode="reflect") == (0, 4)
    assert mirrored((-2, 1), size=20, before=0, mode="reflect") == (0, 3)
    assert mirrored((-2, 1), size=20, before=0, mode="replicate") == (0, 1)
    assert mirrored((17, 23), size=20, before=0, mode="reflect") == (16, 20)
