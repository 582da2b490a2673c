"""What is recorded of a step on a simulated device: its times, and no wait more."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from command_line import Gemsc, gemsc_here
from device_programs import SIZE, Program, compiled
from sim_cuda import DEVICE, on_device

from gemsc.runtime.training import trainer
from gemsc.runtime.training.recording import (
    ON_DEVICE,
    Record,
    Recorder,
    _outside,
    record_timed_steps,
)
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.transport.local import LocalTransport, run_local
from gemsc.runtime.transport.streams import CudaStreams

MILLISECOND = 1_000_000  # of an operator of the simulated device
MODEL = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())

def example_inputs():
    return (torch.randn(8, 4),)

def example_target():
    return torch.randn(8, 4)

def loss(output, target):
    return (output - target).square().mean()
"""

gemsc = pytest.fixture(gemsc_here)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return compiled(tmp_path_factory.mktemp("program"), "1f1b", "offload")


def second_step(
    program: Program, *, is_recorded: bool
) -> list[tuple[int, list[Record]]]:
    """Return how often the host waited for the device on each rank, and the records."""
    x, target = torch.randn(8, 1, SIZE, SIZE), torch.zeros(8, dtype=torch.long)

    def rank(inner: LocalTransport) -> tuple[int, list[Record]]:
        with on_device(inner.rank, "copies last") as device:
            streams = CudaStreams(DEVICE, device)
            trainer = Trainer(program.directory, inner, streams=streams)
            trainer.step(x, target)
            recorder = Recorder(trainer.worker) if is_recorded else None
            if recorder is not None:
                recorder.begin()
            before = device.num_synchronized
            trainer.step(x, target)
            waits = device.num_synchronized - before
            return waits, recorder.take() if recorder is not None else []

    return run_local(program.ranks, rank)


@pytest.mark.slow
def test_who_records_does_not_wait_for_the_device(program: Program) -> None:
    recorded = second_step(program, is_recorded=True)
    plain = second_step(program, is_recorded=False)
    assert [waits for waits, _ in recorded] == [waits for waits, _ in plain]


def test_the_device_tells_when_it_computed_what(program: Program) -> None:
    for _, records in second_step(program, is_recorded=True):
        computed = [record for record in records if record[0] in ON_DEVICE]
        kinds = [kind for kind, *_ in computed]
        assert kinds.count("forward") == kinds.count("backward") == 4
        assert kinds[-1] == "update"
        first = computed[0][4]
        times = [time - first for *_, begin, end in computed for time in (begin, end)]
        assert times == sorted(times)
        assert all(time % MILLISECOND == 0 for time in times)
        lengths = {end - begin for kind, *_, begin, end in computed if kind[0] == "f"}
        assert len(lengths) == 1
        assert min(lengths) >= 3 * MILLISECOND
        assert all(one[5] <= other[4] for one, other in pairwise(records))


@pytest.mark.parametrize(
    ("begin", "end", "left"),
    [
        (0, 10, [(0, 10)]),
        (12, 18, []),
        (5, 15, [(5, 10)]),
        (15, 25, [(20, 25)]),
        (5, 50, [(5, 10), (20, 30), (40, 50)]),
        (20, 30, [(20, 30)]),
        (45, 50, [(45, 50)]),
    ],
)
def test_the_host_is_seen_while_the_device_is_idle(
    begin: int, end: int, left: list[tuple[int, int]]
) -> None:
    parts = _outside(("wait", -1, -1, -1, begin, end), [(10, 20), (30, 40)])
    assert list(parts) == [("wait", -1, -1, -1, *span) for span in left]


@pytest.mark.slow
def test_steps_are_timed_on_the_device_of_the_rank(
    tmp_path: Path, gemsc: Gemsc, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    words = tmp_path / "model.py", "--ranks", 1, "-o", tmp_path / "program"
    made = gemsc("compile", *words)
    assert made.code == 0, made.err

    def rank(inner: LocalTransport) -> None:
        with on_device(0, "copies last") as device:
            make = partial(CudaStreams, cuda=device)
            monkeypatch.setattr(trainer, "streams_for", make)
            record_timed_steps(tmp_path / "program", inner, tmp_path, 2, DEVICE)
            assert device.num_run > 0

    run_local(1, rank)
    steps = json.loads((tmp_path / "times0.json").read_text())["steps"]
    assert len(steps) == 2
    for records in steps:
        computed = [record for record in records if record[0] in ON_DEVICE]
        assert computed[-1][0] == "update"
        assert all((record[5] - record[4]) % MILLISECOND == 0 for record in computed)
