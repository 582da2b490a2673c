"""Convolutions while their halo travels: exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import MODELS
from parity_support import lowered, options, worst_error
from plan_support import metered_peaks
from program_support import on_ranks
from random_networks import is_fixed, random_case, seeds
from tile_support import assert_same, eager, on_tiles
from torch import Tensor, nn

from gemsc.codegen.package import write_directory
from gemsc.compiler import lower, trace
from gemsc.ir import meta
from gemsc.ir.flow import exchange_of, is_overlapped
from gemsc.ir.program import Program
from gemsc.messages.exchange import Exchange
from gemsc.passes.annotate import annotate
from gemsc.runtime.tiles.convolution import reach
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.training.verification import metered

pytestmark = pytest.mark.usefixtures("in_double")


def square(output: Tensor) -> Tensor:
    return (output**2).mean()


def overlapped_layers(program: Program) -> tuple[str, ...]:
    return tuple(meta.layer(n) for n in program.compute_nodes if is_overlapped(n))


def check(seed: int) -> int:
    """Compare a random network on tiles with itself; return how many layers overlap."""
    model, inputs, loss, target, grid = random_case(seed)
    expected = eager(model, inputs, loss, target)
    if not expected.is_finite:
        return 0
    try:
        step = on_tiles(model, inputs, loss, target, grid, overlaps=True)
        assert_same(step, expected)
    except BaseException as error:
        error.add_note(f"seed {seed}, grid {grid}: {model}")
        raise
    return len(overlapped_layers(step.programs[0]))


@pytest.mark.slow
@pytest.mark.parametrize("first", seeds(10, 60, 10))
def test_random_networks_are_the_networks(first: int) -> None:
    layers = sum(map(check, range(first, first + 10)))
    assert not is_fixed(first) or layers > 1


@pytest.mark.parametrize("mode", ["circular", "replicate", "reflect", "zeros"])
def test_what_wraps_or_is_mirrored_does_not_overlap(mode: str) -> None:
    conv = nn.Conv2d(3, 3, 3, padding=1, padding_mode=mode)
    model, x = nn.Sequential(nn.Conv2d(2, 3, 1), conv), torch.randn(2, 2, 12, 10)
    step = on_tiles(model, (x,), square, None, (2, 2), overlaps=True)
    assert_same(step, eager(model, (x,), square, None))
    assert overlapped_layers(step.programs[0]) == ("1",) * (mode == "zeros")


@pytest.mark.slow(2)
@pytest.mark.parametrize("grid", [(2, 2), (1, 4), (3, 2)])
@pytest.mark.parametrize("needs_gradient", [True, False])
def test_layers_of_all_strides_are_the_layers(
    grid: tuple[int, int], needs_gradient: bool
) -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 1),
        nn.Conv2d(4, 4, 5, padding=2),
        nn.Conv2d(4, 4, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(3, 1, padding=1),
        nn.Conv2d(4, 4, 3, padding=2, dilation=2),
        nn.AvgPool2d(3, 1, padding=1),
        nn.Conv2d(4, 3, (1, 3), padding=(0, 1)),
    )
    model[0].requires_grad_(needs_gradient)  # else nothing travels back at first
    x = torch.randn(2, 2, 41, 38)
    step = on_tiles(model, (x,), square, None, grid, overlaps=True)
    assert overlapped_layers(step.programs[0]) == ("1", "5", "7")
    assert_same(step, eager(model, (x,), square, None))


def test_what_is_kept_is_predicted_to_the_byte() -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.SiLU(),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, stride=2, padding=1),
    )
    x = torch.randn(2, 2, 32, 32)
    tiles = on_tiles(model, (x,), square, None, (2, 2), facts=True, overlaps=True)
    predicted = []
    for program in tiles.programs:
        annotate(program)
        nodes = program.compute_nodes
        predicted.append(sum(meta.facts(node).saved_bytes for node in nodes))
    assert tiles.saved == predicted


# Programs


@pytest.mark.nightly
def test_a_program_is_exact_and_its_memory_is_predicted(tmp_path: Path) -> None:
    plan = options(ranks=4, tiles="2x2", micro_batches=2)
    assert worst_error("unet", plan, tmp_path / "exact") <= 1e-9
    with torch.random.fork_rng(devices=[]):
        torch.set_default_dtype(torch.float32)
        program = lowered("unet", plan)
    (stage,) = program.plan.stages
    assert 0 < len(stage.overlapped) <= stage.exchanges
    write_directory(program.compilation, tmp_path / "p")
    text = (tmp_path / "p" / "rank0.py").read_text()
    assert text.count("tiles.convolution(") == len(stage.overlapped)
    assert "on its way meanwhile" in text
    inputs, target = MODELS["unet"].inputs(2, torch.float32)

    def peak(trainer: Trainer) -> int:
        meter = metered(trainer.worker)
        for _ in range(2):
            trainer.step(*inputs, target)
        return meter.peak_total_bytes

    measured = on_ranks(tmp_path / "p", 4, peak, dtype=torch.float32)
    predicted = program.plan.by_rank(metered_peaks(program.plan))
    assert measured == pytest.approx(predicted, rel=1e-3)


@pytest.mark.slow
def test_only_convolutions_that_keep_the_size_overlap() -> None:
    torch.set_default_dtype(torch.float32)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 1),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
        nn.AvgPool2d(3, 1, padding=1),
        nn.Conv2d(8, 1, 1),
    )
    traced = trace(model, (torch.zeros(1, 1, 32, 32),), loss=square, check=False)

    def layers(*, overlap_halos: bool) -> list[str]:
        plan = options(
            ranks=2, tiles="2x1", micro_batches=1, overlap_halos=overlap_halos
        )
        (stage,) = lower(traced, plan).plan.stages
        return stage.overlapped

    assert layers(overlap_halos=True) == ["1"]
    assert layers(overlap_halos=False) == []


@pytest.mark.nightly
def test_the_evaluation_overlaps_as_training_does() -> None:
    torch.set_default_dtype(torch.float32)
    plan = options(ranks=2, tiles="2x1", micro_batches=2)
    (tile, _) = lowered("unet", plan).compilation.tiles

    def num_overlapped(program: Program) -> int:
        return sum(map(is_overlapped, program.compute_nodes))

    assert num_overlapped(tile.program) == num_overlapped(tile.evaluation) > 0


@pytest.mark.slow(3)
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_a_convolution_that_keeps_the_size_copies_no_tile(
    dims: int, bias: bool
) -> None:
    """The whole tile is convolved, and rows of zeros with the halo."""
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    layer = conv(4, 6, 5, padding=4, dilation=2, groups=2, bias=bias)
    model = nn.Sequential(conv(2, 4, 1), layer)
    x = torch.randn(2, 2, *(24, 14, 10)[:dims])
    grid = (3, 2, 1)[:dims]
    step = on_tiles(model, (x,), square, None, grid, overlaps=True)
    (node,) = (n for n in step.programs[0].compute_nodes if is_overlapped(n))
    exchange = exchange_of(node)
    views = map(exchange.seen_from, range(len(exchange.held)))
    cut = tuple(4 if tiles > 1 else 0 for tiles in grid)
    assert [reach(layer, view) for view in views] == [cut] * len(exchange.held)
    assert_same(step, eager(model, (x,), square, None))


def test_a_halo_wider_than_the_tile_is_waited_for() -> None:
    held = tuple(((0, 1), (0, 1), (3 * t, 3 * t + 3)) for t in range(3))
    wanted = tuple((*box[:2], (box[2][0] - 4, box[2][1] + 4)) for box in held)
    exchange = Exchange(0, (1, 1, 9), held, wanted)
    assert reach(nn.Conv1d(1, 1, 9), exchange.seen_from(1)) == ()
    assert (
        reach(nn.Conv1d(1, 1, 9), Exchange(0, (1, 1, 9), held, held).seen_from(1)) == ()
    )
