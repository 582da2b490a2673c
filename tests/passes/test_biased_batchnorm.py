"""BatchNorm that averages biased variances, and one that is frozen, wherever they run.

Every plan is compared with one process to 1e-9: gradients, and all averages.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from norm_models import NORM_MODELS
from parity_support import FLOAT64, lowered, options, trained, worst_error
from plan_support import metered_peaks
from torch import Tensor, nn

import gemsc.nn
from gemsc.frontend import export
from gemsc.frontend.check import check_against_eager
from gemsc.options import CompileOptions

BIASED = (gemsc.nn.BatchNorm1d, gemsc.nn.BatchNorm2d, gemsc.nn.BatchNorm3d)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    rows = x.detach().transpose(0, 1).flatten(1)
    mean = rows.mean(1)
    return mean, (rows - mean[:, None]).square().mean(1)


@pytest.mark.parametrize("momentum", [0.01, None])
@pytest.mark.parametrize("dims", [0, 1, 2, 3])
def test_averages_are_of_biased_variances(
    dims: int, momentum: float | None, in_double: None
) -> None:
    layer = BIASED[max(dims, 1) - 1](3, eps=1e-3, momentum=momentum)
    mean, variance = torch.zeros(3), torch.ones(3)
    for step in range(1, 4):
        x = torch.randn(2, 3, *range(2, 2 + dims), requires_grad=True)
        one, two = moments(x)
        y = layer(x)
        shape = (3, *(1,) * dims)
        wanted = (x - one.view(shape)) / (two.view(shape) + 1e-3).sqrt()
        assert torch.allclose(y, wanted, rtol=1e-9)
        share = 1 / step if momentum is None else momentum
        mean = mean * (1 - share) + one * share
        variance = variance * (1 - share) + two * share
        assert torch.allclose(layer.running_mean, mean, rtol=1e-9)
        assert torch.allclose(layer.running_var, variance, rtol=1e-9)
        assert layer.num_batches_tracked == step
        (y * torch.arange(y.numel()).view_as(y)).sum().backward()
    wanted = (x - mean.view(shape)) / (variance.view(shape) + 1e-3).sqrt()
    assert torch.allclose(layer.eval()(x), wanted, rtol=1e-9)


def test_gradients_are_those_of_pytorch_with_several_batches_in_flight() -> None:
    layers = gemsc.nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    batches = [torch.randn(2, 3, 4, 4, requires_grad=True) for _ in range(3)]
    gradients = []
    for layer in layers:
        results = [layer(x).pow(3).sum() for x in batches]  # all before any backward
        tensors = [*batches, *layer.parameters()]
        gradients.append(torch.autograd.grad(sum(results), tensors))
    assert all(map(torch.equal, *gradients))


def test_a_batch_of_one_value_has_no_variance() -> None:
    layer = gemsc.nn.BatchNorm1d(3, momentum=0.5)
    x = torch.randn(1, 3, requires_grad=True)
    y = layer(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.allclose(y, torch.zeros(1, 3), atol=1e-4)
    assert torch.allclose(gradient, torch.zeros(1, 3), atol=1e-4)
    assert torch.equal(layer.running_mean, x.detach()[0] / 2)
    assert torch.equal(layer.running_var, torch.full((3,), 0.5))


PLANS = (
    options(ranks=2, micro_batches=3),
    options(ranks=2, data=2, micro_batches=2),
    options(ranks=2, tiles="1x2", micro_batches=2),
    options(ranks=5, tiles="2x2", micro_batches=2),
    options(ranks=4, tiles="2x2", fuse_halos=2, micro_batches=2),
    options(ranks=6, tiles="2x1", data=2, micro_batches=2),
    options(ranks=2, shards="2", micro_batches=2),
    options(ranks=2, branches="2", micro_batches=2),
    options(ranks=2, schedule="mast", micro_batches=2),
    options(ranks=4, tiles="2x1", schedule="mast", micro_batches=2),
    options(ranks=2, schedule="zb-h1", micro_batches=3),
    options(ranks=2, micro_batches=2, recompute=("all",)),
    options(ranks=3, tiles="2x1", micro_batches=2, recompute=("all",)),
    options(ranks=2, schedule="chimera", micro_batches=4),
)


@pytest.mark.slow
@pytest.mark.by_day(3)
@pytest.mark.parametrize("plan", PLANS, ids=CompileOptions.command_line)
def test_every_plan_is_exact(plan: CompileOptions, tmp_path: Path) -> None:
    assert worst_error("normed", plan, tmp_path / "program", num_steps=2) <= FLOAT64


AVERAGES = (
    options(ranks=2, micro_batches=3),
    options(ranks=4, data=2, micro_batches=2),
    options(ranks=3, tiles="2x1", micro_batches=2),
    options(ranks=2, micro_batches=2, recompute=("all",)),
)


@pytest.mark.slow(2)
@pytest.mark.parametrize("plan", AVERAGES, ids=CompileOptions.command_line)
def test_means_of_the_statistics_of_all_batches_are_exact(
    plan: CompileOptions, tmp_path: Path
) -> None:
    assert worst_error("averaged", plan, tmp_path / "program", num_steps=2) <= FLOAT64


MEASURED = (
    options(ranks=2, micro_batches=3),
    options(ranks=3, tiles="2x1", micro_batches=2),
    options(ranks=2, shards="2", micro_batches=2),
    options(ranks=2, micro_batches=2, recompute=("all",)),
)


@pytest.mark.slow(1)
@pytest.mark.parametrize("plan", MEASURED, ids=CompileOptions.command_line)
def test_peaks_are_the_predicted_ones(plan: CompileOptions, tmp_path: Path) -> None:
    record, program = trained("normed", plan, tmp_path / "program", torch.float32)
    predicted = {
        "activation_bytes": program.plan.activation_bytes,
        "peak_bytes": metered_peaks(program.plan),
    }
    for name, of_stages in predicted.items():  # ranks of a grid are alike
        assert [*dict.fromkeys(getattr(record, name))] == of_stages


@pytest.mark.slow
def test_statistics_of_each_tile_are_another_model(tmp_path: Path) -> None:
    plan = options(ranks=4, tiles="2x2", micro_batches=1, local_batchnorm=True)
    assert worst_error("normed", plan, tmp_path / "program") > FLOAT64


@pytest.mark.slow
def test_torch_export_sees_the_same_network() -> None:
    case = NORM_MODELS["normed"]
    model, given = case.build(), (case.loss, case.example_target)
    program = export(
        model, case.example_inputs, loss=case.loss, target=case.example_target
    )
    check_against_eager(program, model, case.example_inputs, *given)


def test_a_rank_file_names_the_layers() -> None:
    text = lowered("normed", options(ranks=1)).rank_modules()["rank0.py"]
    assert "\nimport gemsc.nn\nfrom gemsc.runtime import" in text
    assert 'self.stem["1"] = gemsc.nn.BatchNorm2d(8, eps=0.001, momentum=0.2)' in text
    assert "self.frozen = gemsc.nn.FrozenBatchNorm(8, eps=0.001)" in text
