"""What is recorded of a step on a simulated device: its times, and no wait more."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from device_programs import SIZE, Program, compiled
from local_transport import LocalTransport, run_local
from sim_cuda import DEVICE, on_device

from gemsc.runtime.training.recording import ON_DEVICE, Record, Recorder, _outside
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.transport.streams import CudaStreams

MILLISECOND = 1_000_000  # of an operator of the simulated device


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


def test_who_records_does_not_wait_for_the_device(program: Program) -> None:
    found = second_step(program, is_recorded=True)
    plain = second_step(program, is_recorded=False)
    assert [waits for waits, _ in found] == [waits for waits, _ in plain]


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
    assert list(parts) == [("wait", -1, -1, -1, *each) for each in left]
