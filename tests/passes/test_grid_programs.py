"""What else a program on grids must get right: evaluation, checkpoints, mistakes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models import MODELS
from parity_support import GRID_PLANS, lowered, options, worst_error
from plan_support import metered_peaks
from program_support import mse, on_ranks
from program_support import written as written_of
from threads import run_on_threads
from torch import Tensor, nn

from gemsc import compile
from gemsc.codegen.package import write_directory
from gemsc.errors import GemscError
from gemsc.options import CompileOptions
from gemsc.plan import Plan
from gemsc.runtime.training.trainer import Trainer
from gemsc.verify.one_process import reference_steps


def programs(name: str, directory: Path, **choices: object) -> int:
    """Write a program; return its ranks."""
    program = lowered(name, options(**choices))
    write_directory(program.compilation, directory)
    return program.plan.ranks


@pytest.mark.nightly
def test_halos_are_fused_if_that_is_asked_for() -> None:
    def exchanges(layers: int) -> int:
        plan = options(ranks=2, tiles="2x1", micro_batches=1, fuse_halos=layers)
        (stage,) = lowered("unet", plan).plan.stages
        assert stage.unfused_exchanges == 17
        return stage.exchanges

    assert exchanges(9) < 5
    assert exchanges(0) == CompileOptions().fuse_halos + 17 == 17


@pytest.mark.nightly
def test_local_batchnorm_fuses_no_halos() -> None:
    for how in (3, 0):
        plan = options(ranks=2, tiles="2x1", local_batchnorm=True, fuse_halos=how)
        (stage,) = lowered("unet", plan).plan.stages
        assert stage.exchanges == stage.unfused_exchanges == 17


@pytest.mark.slow
@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    "plan",
    [
        options(ranks=4, tiles="2x2", micro_batches=2),
        options(ranks=3, tiles="2x1", micro_batches=2),
        options(ranks=3, tiles="1x2", micro_batches=2, placement="folded"),
    ],
    ids=CompileOptions.command_line,
)
@pytest.mark.parametrize("name", ["resnet10", "unet"])
def test_evaluation_gives_the_whole_output_once(
    name: str, plan: CompileOptions, tmp_path: Path
) -> None:
    case = MODELS[name]
    program = lowered(name, plan)
    write_directory(program.compilation, tmp_path)
    inputs, target = case.inputs(2, torch.float64)
    model = case.build().double().eval()
    with torch.no_grad():
        expected = model(*inputs)
        loss = case.loss(expected, target)

    def work(trainer: Trainer) -> tuple[float | None, Tensor | None]:
        result = trainer.evaluate(inputs, target)
        return result.loss, result.output

    evaluated = on_ranks(tmp_path, plan.ranks, work, dtype=torch.float64)
    outputs = [output for _, output in evaluated if output is not None]
    assert len(outputs) == 1
    torch.testing.assert_close(outputs[0], expected, rtol=1e-9, atol=1e-12)
    if name == "resnet10":  # the mean over micro-batches is that over the batch
        assert all(value == pytest.approx(float(loss)) for value, _ in evaluated)
    assert len({value for value, _ in evaluated}) == 1


@pytest.mark.slow
def test_norms_of_gradients_count_each_parameter_once(tmp_path: Path) -> None:
    case = MODELS["unet"]
    ranks = programs("unet", tmp_path, ranks=5, tiles="2x2", micro_batches=2)
    inputs, target = case.inputs(2, torch.float64)

    def norm(trainer: Trainer) -> float:
        sums: list[float] = []

        def note() -> None:
            named = trainer.stages.parameters.values()
            squares = [p.grad.square().sum() for p in named if p.grad is not None]
            sums.append(float(sum(squares)))

        trainer.worker.updates.before = note
        trainer.step(inputs, target)
        return sums[0]

    squares = on_ranks(tmp_path, ranks, norm, dtype=torch.float64, clip_norm=0.01)
    assert squares[0] + squares[4] == pytest.approx(0.01**2, rel=1e-4)
    assert squares[:4] == pytest.approx([squares[0]] * 4)


def test_what_both_tiles_of_a_replica_have_seen_counts_once(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3)).double()
    x, target = torch.randn(8, 2, 6, 6), torch.randn(8, 3, 6, 6)
    given = {"ranks": 4, "data": 2, "tiles": ("2x1",), "micro_batches": 2}
    written_of(tmp_path, net, (x[:2].double(),), mse, target[:2].double(), **given)
    batch = x.double(), target.double()

    def statistics(trainer: Trainer) -> dict[str, Tensor]:
        copy = trainer.worker.place.copy
        trainer.step(*(tensor.chunk(2)[copy] for tensor in batch))
        (stage,) = trainer.worker.stages.values()
        return dict(stage.named_buffers())

    sgd, double = partial(torch.optim.SGD, lr=0.01), torch.float64
    steps = [((batch[0],), batch[1])]
    expected = reference_steps(net, mse, steps, 4, double, sgd).state
    for buffers in on_ranks(tmp_path, 4, statistics, dtype=double, optimizer=sgd):
        for name, tensor in buffers.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_a_checkpoint_of_tiles_goes_on_where_it_was(tmp_path: Path) -> None:
    case = MODELS["resnet10"]
    ranks = programs("resnet10", tmp_path / "p", ranks=3, tiles="2x1", micro_batches=2)
    first, second = (case.inputs(2, torch.float64) for _ in range(2))
    torch.set_default_dtype(torch.float64)

    def straight(trainer: Trainer) -> float:
        trainer.step(*first)
        trainer.save(tmp_path / "saved")
        return trainer.step(*second)

    def resumed(trainer: Trainer) -> float:
        trainer.resume(tmp_path / "saved")
        return trainer.step(*second)

    expected = on_ranks(tmp_path / "p", ranks, straight, dtype=torch.float64)
    assert on_ranks(tmp_path / "p", ranks, resumed, dtype=torch.float64) == expected


@pytest.mark.slow
def test_local_batchnorm_is_another_model(tmp_path: Path) -> None:
    plan = options(ranks=4, tiles="2x2", micro_batches=1, local_batchnorm=True)
    assert worst_error("resnet10", plan, tmp_path) > 1e-3


@pytest.mark.slow
def test_a_tile_holds_its_part_of_the_activations() -> None:
    whole = lowered("unet", options(ranks=1, micro_batches=1)).plan
    tiles = lowered("unet", options(ranks=4, tiles="2x2", micro_batches=1)).plan
    assert tiles.activation_bytes[0] <= 0.5 * whole.activation_bytes[0]


def written(options: CompileOptions, folder: Path) -> tuple[Plan, Any]:
    """Write the program of a U-Net; return its plan, and a batch for it."""
    program = lowered("unet", options)
    write_directory(program.compilation, folder)
    count = program.plan.data * program.plan.micro_batches
    return program.plan, MODELS["unet"].inputs(count, torch.float32)


@pytest.mark.slow
@pytest.mark.by_day(1)
@pytest.mark.parametrize("plan", GRID_PLANS[::4], ids=CompileOptions.command_line)
def test_peaks_on_tiles_are_the_predicted_ones(
    plan: CompileOptions, tmp_path: Path
) -> None:
    made, batch = written(plan, tmp_path)
    record = run_on_threads(tmp_path, made.ranks, [batch], dtype=torch.float32)
    held = made.by_rank(made.activation_bytes) * made.data
    assert record.activation_bytes == held
    assert record.peak_bytes == made.by_rank(metered_peaks(made)) * made.data


# Mistakes


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        ({"ranks": 2, "tiles": "2x2"}, "--tiles 2x2 needs 4 ranks, --ranks is 2"),
        ({"ranks": 5, "tiles": "2x2,2x1"}, "--tiles 2x2,2x1 needs 6 ranks"),
        ({"ranks": 4, "tiles": "2x"}, "'2x' is not a grid"),
        ({"ranks": 4, "tiles": "2x2x2"}, "needs 8 ranks"),
        ({"ranks": 4, "local_batchnorm": True}, "has no effect without --tiles"),
        ({"ranks": 2, "fuse_halos": 3}, "--fuse-halos 3 has no effect"),
        ({"ranks": 4, "tiles": "2x2", "fuse_halos": -1}, "--fuse-halos is -1"),
    ],
)
def test_options_that_no_model_could_have(
    choices: dict[str, object], says: str
) -> None:
    with pytest.raises(GemscError, match=says):
        options(**choices)


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    ("name", "choices", "says"),
    [
        ("unet", {"ranks": 2, "tiles": "2"}, "splits 1 axes, but input 'x' has 2"),
        ("unet", {"ranks": 8, "tiles": "2x2x2"}, "splits 3 axes, but input 'x' has 2"),
        ("unet", {"ranks": 64, "tiles": "64x1"}, "the height into 64 tiles"),
        (
            "mlp",
            {"ranks": 2, "tiles": "2x1"},
            "splits images, but no input of the model is an image",
        ),
        ("unet", {"ranks": 5, "tiles": "2x2", "placement": "0,1,5"}, "groups of ranks"),
    ],
)
def test_grids_that_do_not_fit_the_model(
    name: str, choices: dict[str, object], says: str
) -> None:
    with pytest.raises(GemscError, match=says) as caught:
        lowered(name, options(micro_batches=1, **choices))
    if name == "unet" and "placement" not in choices:
        assert "model.py" in str(caught.value)  # where the picture is used


def test_the_grid_that_is_advised_for_a_volume_needs_as_many_ranks() -> None:
    net, volume = nn.Conv3d(1, 1, 3, padding=1), torch.zeros(1, 1, 8, 8, 8)
    with pytest.raises(GemscError, match="for example --tiles 2x2x1"):
        compile(net, (volume,), ranks=4, micro_batches=1, tiles="2x2")


@pytest.mark.slow
def test_mirrored_grids_stay_and_lone_ranks_change_places() -> None:
    plan = options(ranks=6, tiles="2x2", schedule="mast", micro_batches=2)
    placement = lowered("unet", plan).compilation.program.placement
    assert placement is not None
    grid = (0, 1, 2, 3)
    assert placement.ranks == ((grid, (4,), (5,)), (grid, (5,), (4,)))


@pytest.mark.nightly
def test_a_split_stage_takes_more_of_the_work() -> None:
    plan = lowered("resnet10", options(ranks=5, tiles="2x2")).plan
    assert plan.stages[0].flops > 2 * plan.stages[1].flops
    assert plan.groups == [[0, 1, 2, 3], [4]]
