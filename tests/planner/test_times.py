"""The time model: what it is fitted to it finds again, and it predicts sensibly."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from program_support import mean, run_passes
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from gemsc.calibrate.kernels import fit_seconds, least_squares
from gemsc.calibrate.samples import FAMILIES, Draw, attention
from gemsc.compiler import schedule_stages, trace
from gemsc.costs.hardware import read_hardware, shipped_hardware
from gemsc.costs.operators import roofline, seconds, work_of
from gemsc.frontend import record
from gemsc.ir import meta
from gemsc.options import CompileOptions
from gemsc.passes.annotate import Annotate
from gemsc.passes.canonicalize import Canonicalize
from gemsc.passes.manager import Runs

ATEN = torch.ops.aten


def test_known_coefficients_are_found_again() -> None:
    rng = random.Random(0)
    known = {"calls": 5e-6, "flops": 2e-11, "read": 1e-10, "written": 0.0}
    rows = [
        {
            "calls": 1.0,
            "flops": 10 ** rng.uniform(4, 9),
            "read": 10 ** rng.uniform(3, 8),
            "written": 10 ** rng.uniform(3, 8),
        }
        for _ in range(60)
    ]
    times = [sum(known[name] * value for name, value in row.items()) for row in rows]
    fitted = fit_seconds(rows, times)
    assert fitted.keys() == {"calls", "flops", "read"}
    assert all(fitted[name] == pytest.approx(known[name], rel=1e-6) for name in fitted)


def test_noise_and_an_outlier_move_the_fit_a_little() -> None:
    rng = random.Random(1)
    rows = [{"calls": 1.0, "flops": 10 ** rng.uniform(5, 9)} for _ in range(80)]
    times = [(1e-5 + 2e-11 * row["flops"]) * rng.uniform(0.95, 1.05) for row in rows]
    times[7] *= 20
    fitted = fit_seconds(rows, times)
    assert fitted["flops"] == pytest.approx(2e-11, rel=0.05)


def test_least_squares_agrees_with_trying_all_sets_of_variables() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        matrix, right = rng.normal(size=(12, 4)), rng.normal(size=12)
        best = float(np.linalg.norm(right))
        for mask in range(1, 16):
            free = [i for i in range(4) if mask >> i & 1]
            part = np.linalg.lstsq(matrix[:, free], right, rcond=None)[0]
            if part.min() >= 0:
                residual = right - matrix[:, free] @ part
                best = min(best, float(np.linalg.norm(residual)))
        x = least_squares(matrix, right)
        assert x.min() >= 0
        assert np.linalg.norm(right - matrix @ x) == pytest.approx(best, rel=1e-9)


def convolved(channels: int, size: int, batch: int, kernel: int) -> float:
    x, weight = (
        torch.zeros(batch, channels, size, size),
        torch.zeros(64, channels, kernel, kernel),
    )
    shape = ([1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], 1)
    args = (x, weight, None, *shape)
    operator = ATEN.convolution.default
    _, (work,) = work_of(operator, args, {}, operator(*args))
    return sum(seconds(read_hardware(name).device, work) for name in shipped_hardware())


def test_a_larger_convolution_takes_longer() -> None:
    usual = convolved(16, 16, 2, 3)
    assert usual > 0
    assert usual < convolved(32, 16, 2, 3)
    assert usual < convolved(16, 24, 2, 3)
    assert usual < convolved(16, 16, 4, 3)
    assert usual < convolved(16, 16, 2, 5)


def test_a_gpu_does_not_time_the_attention_of_a_cpu() -> None:
    draw = Draw(random.Random(0), largest=1e9, device="cuda")
    assert not [call for _ in range(9) for call in attention(draw)]


@pytest.mark.slow(1)
@pytest.mark.parametrize("hardware", shipped_hardware())
def test_every_sampled_operator_takes_some_time(hardware: str) -> None:
    device = read_hardware(hardware).device
    draw = Draw(random.Random(0), largest=1e7)
    seen = set()
    for _, source, _ in FAMILIES:
        calls = [call for _ in range(9) for call in source(draw)]
        assert calls
        for call in calls:
            result = call.operator(*call.args)
            _, works = work_of(call.operator, call.args, {}, result)
            (work,) = works
            seen.add(work.kind)
            assert seconds(device, work) > 0
    assert "other" not in seen
    if device.fit:
        assert seen <= set(device.fit)


def test_the_roofline_is_the_longer_of_computing_and_moving() -> None:
    device = read_hardware("v100").device
    operator = ATEN.mm.default
    a, b = torch.zeros(64, 4096), torch.zeros(4096, 4096)
    _, (thin,) = work_of(operator, (a[:1], b), {}, torch.zeros(1, 4096))
    _, (thick,) = work_of(operator, (b, b), {}, b)
    moved = 4 * (4096 + 4096**2 + 4096)
    assert roofline(device, thin) == pytest.approx(moved / (900e9 * 0.8))
    flops = 2 * 4096**3 + device.half_flops
    assert roofline(device, thick) == pytest.approx(flops / (15.7e12 * 0.75))


def facts_of(model: nn.Module, x: Tensor) -> list[meta.Facts]:
    program = record(model, (x,), loss=mean)
    program = run_passes(program, (Canonicalize(), Annotate()))
    return [meta.facts(node) for node in program.compute_nodes]


def test_backward_is_that_of_the_gradients_that_are_needed() -> None:
    def convolution() -> nn.Module:
        return nn.Conv2d(16, 16, 3, padding=1)

    first, second, *_ = facts_of(
        nn.Sequential(convolution(), convolution()), torch.randn(2, 16, 32, 32)
    )
    assert first.forward_seconds == second.forward_seconds
    # the picture needs no gradient
    assert first.backward_seconds < 0.75 * second.backward_seconds
    frozen = convolution().requires_grad_(False)
    facts = facts_of(nn.Sequential(frozen, convolution()), torch.randn(2, 16, 32, 32))
    assert facts[0].backward_seconds == 0
    assert 0 < facts[1].backward_seconds < 0.75 * second.backward_seconds


def test_nothing_takes_time_backward_without_a_loss() -> None:
    program = record(nn.Linear(4, 4), (torch.randn(2, 4),), training=False)
    program = run_passes(program, (Canonicalize(), Annotate(training=False)))
    assert all(meta.facts(n).backward_seconds == 0 for n in program.compute_nodes)


def test_the_backward_of_each_node_is_booked_on_it() -> None:
    facts = facts_of(
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Softmax(-1)),
        torch.randn(256, 64),
    )
    assert all(fact.backward_seconds > 0 for fact in facts[:4])
    assert facts[2].backward_seconds > 3 * facts[1].backward_seconds


def seconds_of_a_stage(offload: str = "off", **changes: Any) -> tuple[float, float]:
    """Return what a small network takes, forward and backward, as one stage."""
    base = read_hardware("v100")
    hardware = replace(base, device=replace(base.device, **changes))
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    chosen = () if offload == "off" else (offload,)
    options = CompileOptions(ranks=1, micro_batches=1, offload=chosen)
    x = torch.randn(8, 64)
    traced = trace(model, (x,), loss=mean, check=False, hardware=hardware)
    done = schedule_stages(traced, options, Runs(None), hardware=hardware)
    return done.task.stages[0].forward, done.task.stages[0].backward


@pytest.mark.slow
def test_launches_and_kernels_of_an_asynchronous_device_overlap() -> None:
    slow = {"forward_overhead": 1.0, "backward_overhead": 2.0}
    none = {"forward_overhead": 0.0, "backward_overhead": 0.0}
    for way in range(2):
        both = seconds_of_a_stage(**slow, asynchronous=False)[way]
        kernels = seconds_of_a_stage(**none)[way]
        launches = seconds_of_a_stage(**slow)[way]
        assert kernels > 0
        assert launches == pytest.approx(both - kernels, rel=1e-12)
        assert launches == round(launches)  # each launch takes a second, or two
        few = {name: cost * 1e-12 for name, cost in slow.items()}
        assert seconds_of_a_stage(**few)[way] == pytest.approx(kernels, rel=1e-3)


@pytest.mark.slow
def test_copies_of_an_asynchronous_device_hide_under_what_it_computes() -> None:
    slow, fast = {"host_bandwidth": 1.0}, {"host_bandwidth": 1e15}
    for way in range(2):
        alone = seconds_of_a_stage()[way]
        added = seconds_of_a_stage("all", **slow, asynchronous=False)[way]
        assert seconds_of_a_stage("all", **fast)[way] == alone
        assert seconds_of_a_stage("all", **slow)[way] > 1000.0 > alone  # bytes
        assert added > seconds_of_a_stage("all", **slow)[way]


@pytest.mark.parametrize("heads", [4, 2, 1])
def test_heads_that_share_a_key_cost_what_others_do(heads: int) -> None:
    """PyTorch counts the attention of CUDA, in 2.11 with a key for each head only."""
    query, key = torch.randn(2, 4, 5, 8), torch.randn(2, heads, 7, 8)
    backward = "_scaled_dot_product_efficient_attention_backward"
    attention = "_scaled_dot_product_efficient_attention"
    for name, before in ((attention, ()), (backward, (query,))):
        operator = getattr(ATEN, name).default
        args = (*before, query, key, key, None)
        flops, _ = work_of(operator, args, {}, (query,))
        keys = key.expand(2, 4, 7, 8) if heads == 1 else key.repeat(1, 4 // heads, 1, 1)
        counted = flop_registry[operator.overloadpacket](
            *before, query, keys, keys, out_val=(query,)
        )
        assert flops == counted
