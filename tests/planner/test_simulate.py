"""`gemsc simulate`: models and programs on machines that are not there."""

from __future__ import annotations

import gc
import json
import re
import resource
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from command_line import DEEP, MODEL, Gemsc, gemsc_here
from torch import nn

from gemsc.costs.hardware import read_hardware
from gemsc.costs.sharing import SharedDevice
from gemsc.errors import GemscError
from gemsc.ir import meta
from gemsc.options import CompileOptions
from gemsc.passes.share_device import share
from gemsc.schedules import SCHEDULES
from gemsc.simulate.show import draw_curve
from gemsc.simulate.simulation import (
    Unfilled,
    powers_of_two,
    read_counts,
    simulate,
    trace_unfilled,
)
from gemsc.user_model import load_user_model

HUGE = """\
import torch
from torch import nn

WIDTH = 60_000  # each layer has 14.4 GB of weights

def model():
    rates = torch.linspace(0, 0.3, 3).tolist()
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(r)) for r in rates]
    return nn.Sequential(*layers, nn.BatchNorm1d(WIDTH))

def example_inputs():
    return (torch.randn(2, WIDTH),)

def example_target():
    return torch.zeros(2, WIDTH)

loss = nn.MSELoss()
"""


@pytest.fixture
def gemsc(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Gemsc:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "deep.py").write_text(DEEP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return gemsc_here(monkeypatch, capfd)


# the command


@pytest.mark.slow
def test_a_model_is_simulated_and_its_curve_drawn(gemsc: Gemsc, tmp_path: Path) -> None:
    words = (
        "--ranks",
        "256",
        "--data",
        "64",
        "--hardware",
        "v100",
        "-o",
        "a/curve.svg",
    )
    outcome = gemsc("simulate", "deep.py", *words)
    assert outcome.code == 0, outcome.err
    assert "Sequential on 256 ranks of NVIDIA V100" in outcome.out
    assert "64 replicas of 4 ranks" in outcome.out
    rows = re.findall(r"^│ +([\d,]+) │ +([\d,]+) │", outcome.out, re.MULTILINE)
    assert [int(ranks) for ranks, _ in rows] == [4, 8, 16, 32, 64, 128, 256]
    assert re.search(r"scaling efficiency \d+\.\d+% on 256 ranks", outcome.out)
    assert "assumed, not measured" in outcome.out
    ElementTree.parse(tmp_path / "a" / "curve.svg")


@pytest.mark.slow
def test_a_precision_is_simulated_and_a_program_has_its_own(gemsc: Gemsc) -> None:
    def step(*words: str) -> float:
        done = gemsc("simulate", *words, "--hardware", "h100", "--json")
        assert done.code == 0, done.err
        points = json.loads(done.out)["points"]
        return float(points[0]["busy_seconds"])

    Path("deep.py").write_text(DEEP.replace('"16"', '"4096"').replace("256", "4096"))
    half = ("--precision", "bfloat16")
    assert step("deep.py", *half) < 0.5 * step("deep.py")
    done = gemsc("compile", "model.py", *half, "--no-check", "-o", "program")
    assert done.code == 0, done.err
    assert step("program") == step("program", *half)
    assert step("program") != step("program", "--precision", "float32")


@pytest.mark.slow
def test_a_program_keeps_its_ranks_and_its_stages(gemsc: Gemsc) -> None:
    assert gemsc("compile", "deep.py", "--blocks", "2,15", "-o", "program").code == 0
    outcome = gemsc("simulate", "program", "--data", "8", "--curve", "2,8")
    assert outcome.code == 0, outcome.err
    assert "8 replicas of 2 ranks" in outcome.out
    rows = re.findall(r"^│ +([\d,]+) │ +([\d,]+) │", outcome.out, re.MULTILINE)
    assert [int(ranks) for ranks, _ in rows] == [4, 16]
    wrong = gemsc("simulate", "program", "--ranks", "5")
    assert wrong.code == 1
    assert "each replica of this program has 2 ranks" in wrong.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--ranks", "10", "--data", "4"),
            "--ranks 10 is not a multiple of --data 4",
        ),
        (("--hardware", "v1000"), "unknown hardware 'v1000'"),
        (("--allreduce", "rings"), "unknown algorithm 'rings'"),
        (("--curve", "1,two"), "--curve 1,two is not a list of numbers"),
        (("-o", "curve.png"), "cannot draw curve.png"),
        (("--schedule", "1f2b"), "--schedule does not take '1f2b'"),
        (("--ranks", "64"), "64 stages need at least 64 blocks"),
        (
            ("--ranks", "8", "--data", "4", "--branches", "3"),
            "--branches 3 does not divide the 2 ranks of a replica",
        ),
    ],
)
def test_mistakes_are_named(words: tuple[str, ...], message: str, gemsc: Gemsc) -> None:
    outcome = gemsc("simulate", "model.py", *words)
    assert outcome.code == 1 + ("--schedule" in words)
    assert message in outcome.err
    assert "help: " in outcome.err


@pytest.mark.slow
def test_the_algorithm_of_the_sums_can_be_chosen(gemsc: Gemsc) -> None:
    for name in ("ring", "tree", "halving-doubling"):
        words = ("--ranks", "32", "--data", "16", "--allreduce", name)
        outcome = gemsc("simulate", "deep.py", *words)
        assert outcome.code == 0, outcome.err
        assert re.search(rf"│ {name} +│", outcome.out)


@pytest.mark.slow
def test_ranks_of_a_replica_can_share_its_layers(gemsc: Gemsc) -> None:
    words = ("--ranks", "4", "--data", "2", "--curve", "2", "--shards", "2")
    outcome = gemsc("simulate", "model.py", *words, "--trunk", "whole")
    assert outcome.code == 0, outcome.err
    assert "2 replicas of 2 ranks" in outcome.out


# from Python


@pytest.mark.slow
def test_every_schedule_can_be_simulated(tmp_path: Path) -> None:
    (tmp_path / "deep.py").write_text(DEEP)
    traced = trace_unfilled(
        load_user_model(str(tmp_path / "deep.py")), read_hardware("v100")
    )
    for schedule in (*SCHEDULES, "auto"):
        options = CompileOptions(ranks=16, data=4, schedule=schedule, hardware="v100")
        simulated = simulate(traced, options)
        assert [point.copies for point in simulated.points] == [1, 2, 4]
        assert 0 < simulated.efficiency <= 1
        assert simulated.fits


@pytest.mark.slow
def test_whole_backwards_keep_the_ranks_before_them_waiting(tmp_path: Path) -> None:
    (tmp_path / "deep.py").write_text(DEEP)
    traced = trace_unfilled(
        load_user_model(str(tmp_path / "deep.py")), read_hardware("v100")
    )
    options = CompileOptions(ranks=4, schedule="basic", hardware="v100")
    deferred, whole = (
        simulate(traced, options, defers=defers).last for defers in (True, False)
    )
    assert deferred.step_seconds < whole.step_seconds


@pytest.mark.slow
def test_more_weights_than_memory_take_none(tmp_path: Path) -> None:
    (tmp_path / "huge.py").write_text(HUGE)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    traced = trace_unfilled(
        load_user_model(str(tmp_path / "huge.py")), read_hardware("h200")
    )
    simulated = simulate(traced, CompileOptions(ranks=3, hardware="h200"))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 2**20  # 1 GiB in KiB, where weights alone are 43 GB
    assert max(simulated.timeline.peak_bytes) > 2 * 60_000**2 * 4
    del traced, simulated
    gc.collect()  # no process forks beside so much that nobody has written to


def test_small_tensors_have_their_values_while_large_ones_have_none() -> None:
    with Unfilled():
        small = torch.linspace(0, 1, 3).tolist()
        layer = nn.Linear(512, 512)
    assert small == [0.0, 0.5, 1.0]
    assert layer.weight.shape == (512, 512)
    assert layer.bias.abs().max() > 0
    assert nn.Linear(512, 512).weight.abs().max() > 0  # as ever afterwards


def test_numbers_of_copies() -> None:
    assert powers_of_two(1) == (1,)
    assert powers_of_two(12) == (1, 2, 4, 8, 12)
    assert read_counts("", 4) == (1, 2, 4)
    assert read_counts("3, 9", 4) == (3, 9)
    with pytest.raises(GemscError, match="not a list of numbers"):
        read_counts("0,1", 4)


def test_a_curve_of_one_point_can_be_drawn(tmp_path: Path) -> None:
    (tmp_path / "deep.py").write_text(DEEP)
    traced = trace_unfilled(load_user_model(str(tmp_path / "deep.py")), read_hardware())
    points = simulate(traced, CompileOptions(ranks=2)).points
    root = ElementTree.fromstring(draw_curve("a < b", points).encode())
    assert len(points) == 1
    assert root.find("{http://www.w3.org/2000/svg}title").text == "a < b"  # type: ignore[union-attr]


# processes that share a device


SHARED = SharedDevice(launch=10.0, kernels=6.0, full=4.0, sum_seconds=1.0)


def test_a_shared_device_is_bound_by_launches_kernels_or_what_fills_it() -> None:
    assert [SHARED.seconds(k) for k in (1, 2, 4)] == [10, 10, 16]
    assert [SHARED.gain(k) for k in (1, 2, 4)] == [0, 1, 1.5]
    assert SHARED.gain(4, sums=True) == 4 * 10 / (16 + 4) - 1
    assert SHARED.gain(1, sums=True) == 0
    assert [SHARED.gain_of_batch(k) for k in (1, 2, 4)] == [0, 1, 4 * 10 / 18 - 1]
    assert [SHARED.utilisation(k) for k in (1, 2, 4)] == [0.4, 0.8, 1]


@pytest.mark.slow
def test_launches_and_kernels_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "deep.py").write_text(DEEP)
    machine = read_hardware("a100")
    traced = trace_unfilled(load_user_model(str(tmp_path / "deep.py")), machine)
    alone = share(traced.program, machine.device)
    facts = [meta.facts(node) for node in traced.program.compute_nodes]
    total = sum(fact.forward_seconds + fact.backward_seconds for fact in facts)
    assert alone.launch + alone.kernels == pytest.approx(total)
    launches = alone.launch / machine.device.forward_overhead
    assert launches == pytest.approx(round(launches))
    products = 2 * 17 + 16  # forward, and for weights; inputs, but for the first
    peak = machine.device.peak_flops["float32"] * machine.device.efficiency["matmul"]
    small = products * machine.device.half_flops / peak
    assert 0 < alone.kernels - alone.full <= small
    both = share(traced.program, machine.device, 2)
    assert both.kernels == 2 * alone.kernels
    assert both.sum_seconds == alone.sum_seconds


@pytest.mark.slow
def test_the_command_prints_processes_that_share_a_device(
    tmp_path: Path, gemsc: Gemsc
) -> None:
    (tmp_path / "deep.py").write_text(DEEP)
    words = ("simulate", tmp_path / "deep.py", "--hardware", "a100", "--per-device", 4)
    done = gemsc(*words, "--ranks", 1, "--micro-batches", 2)
    assert done.code == 0, done.err
    assert "processes that share a device, a step of 32 samples each" in done.out
    assert "Sequential on 1 rank of " in done.out
    assert "1 replica of 1 rank\n" in done.out
    refused = gemsc(*words, "--ranks", 2)
    assert refused.code == 1
    assert "only for replicas of one rank, but these have 2" in refused.err
