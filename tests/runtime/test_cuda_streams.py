"""Programs on a simulated CUDA device: the numbers of the CPU, whatever comes first.

`pytest tests/runtime/test_cuda_streams.py --nightly` runs every schedule with all that
uses streams, through the host and with a CUDA-aware library, in eight orders each.
"""

from __future__ import annotations

from itertools import count, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_checks import CHECKS, ends
from device_programs import USES, assert_equal, compiled
from program_support import written
from sim_cuda import DEVICE, on_device
from torch import nn
from torch.nn import functional as F

from gemsc.errors import GemscError
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.transport import waiting
from gemsc.runtime.transport.device_transport import DEVICE_SLEEP, DeviceTransport
from gemsc.runtime.transport.local import LocalTransport, run_local
from gemsc.runtime.transport.streams import CudaStreams
from gemsc.schedules import SCHEDULES

SEEDS = 8
# Threads draw from one generator: where two ranks draw at a time, the order is any.
ALL = tuple(
    (schedule, use)
    for schedule, use in product(SCHEDULES, USES)
    if use != "dropout" or SCHEDULES[schedule].num_replicas == 1
)
FEW = (  # the checks have more
    ("1f1b", "recompute"),
    ("1f1b", "dropout"),
    ("zb-h1", "plain"),
    ("interleaved", "plain"),
    ("mast", "data 2"),
    ("bidirectional", "offload"),
    ("1f1b", "tiles 2x1"),
)


@pytest.mark.slow(3)
@pytest.mark.by_day(20)
@pytest.mark.parametrize(("schedule", "use"), ALL, ids=map(" ".join, ALL))
def test_a_device_gives_the_numbers_of_the_cpu(
    schedule: str, use: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    thorough = request.config.getoption("--nightly")
    if not thorough and (schedule, use) not in FEW:
        pytest.skip("only with --nightly")
    splits = SCHEDULES[schedule].policy.split_backward
    if splits and USES[use].keys() & {"tiles", "recompute", "offload"}:
        with pytest.raises(GemscError, match="cannot be used with"):
            compiled(tmp_path, schedule, use)
        return
    program = compiled(tmp_path, schedule, use)
    for seed in range(SEEDS) if thorough else (0, 1):
        for cuda_aware in (False, True):
            number = seed if thorough else 2 * seed + cuda_aware  # each order once
            simulated = program.simulated(number, cuda_aware=cuda_aware)
            assert_equal(simulated, program.on_cpu)


@pytest.mark.slow(1)
@pytest.mark.by_day(4)
@pytest.mark.parametrize("name", CHECKS)
def test_what_must_hold_however_far_the_host_is_ahead(name: str) -> None:
    """Without any of the waits a check fails: see test_cuda_mutants.py."""
    with ends():
        CHECKS[name]()


def test_what_starts_when_the_device_is_done_is_asked_for_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Elsewhere the sleeps of a wait grow with it."""
    slept: list[float] = []
    ticks = count()  # each sleep takes a second, each look at the clock 10 us
    clock = SimpleNamespace(perf_counter=lambda: len(slept) + next(ticks) * 1e-5)
    monkeypatch.setattr(waiting, "time", clock)
    monkeypatch.setattr(waiting, "_sleep", slept.append)

    class Late:
        looks = 0

        def done(self) -> bool:
            self.looks += 1
            return self.looks > 20

    waiting.wait(Late())
    assert slept[-1] == waiting.LONGEST_SLEEP
    slept.clear()

    def work(inner: LocalTransport) -> None:
        with on_device(0, "copies last") as device:
            transport = DeviceTransport(inner, CudaStreams(DEVICE, device))
            room = transport.receive((3,), torch.float32, 0, 0)
            x = torch.ones(3).to(DEVICE)
            for _ in range(100):
                x = x + 1
            transport.wait(transport.send(x, 0, 0))
            assert room.take().tolist() == [101.0] * 3

    run_local(1, work)
    assert max(slept) == DEVICE_SLEEP


def test_the_host_counts_updates_after_a_resume(tmp_path: Path) -> None:
    """Adam's counts on the device would be read there, one by one, in each step."""
    x, target = torch.zeros(2, 4), torch.zeros(2, 3)
    program = tmp_path / "program"
    written(program, nn.Linear(4, 3), (x,), F.mse_loss, target, ranks=1)

    def adam(named: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(named, lr=0.1)

    def work(inner: LocalTransport) -> list[bool]:
        with on_device(0) as device:
            streams = CudaStreams(DEVICE, device)
            trainer = Trainer(program, inner, optimizer=adam, streams=streams)
            size = 2 * trainer.worker.steps.num_micro_batches
            batch = torch.ones(size, 4), torch.ones(size, 3)
            trainer.step(*batch)
            trainer.save(tmp_path / "saved")
            again = Trainer(program, inner, optimizer=adam, streams=streams)
            again.resume(tmp_path / "saved")
            assert again.step(*batch) == trainer.step(*batch)
            assert again.optimizer is not None
            states = again.optimizer.state.values()
            assert all(s["exp_avg"].device == DEVICE for s in states)
            return [s["step"].device == torch.device("cpu") for s in states]

    (on_host,) = run_local(1, work)
    assert on_host == [True, True]
