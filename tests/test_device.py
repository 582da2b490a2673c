"""Which device a rank computes on, on a machine that seems to have GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_line import Gemsc, gemsc_here
from local_transport import LocalTransport, run_local
from program_support import Net, written

from gemsc.errors import GemscError
from gemsc.runtime.process import device as module
from gemsc.runtime.process.device import choose_device, claim_device

gemsc = pytest.fixture(gemsc_here)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Two GPUs, no launcher; what was made the current device."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name in module.LOCAL_RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return chosen


def gpu(index: int) -> torch.device:
    return torch.device("cuda", index)


@pytest.mark.parametrize("name", module.LOCAL_RANK_VARIABLES)
def test_each_launcher_tells_the_gpu_before_mpi_starts(
    name: str, current: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "3")
    claim_device()
    claim_device(torch.device("cuda"))
    claim_device(gpu(0))
    claim_device(torch.device("cpu"))
    assert current == [gpu(1), gpu(1), gpu(0)]


def test_with_one_visible_gpu_it_is_that(
    current: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("SLURM_LOCALID", "5")
    claim_device()
    assert current == [gpu(0)]


def test_the_launchers_number_comes_before_that_of_the_job(
    current: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under mpirun in an interactive job step, all ranks see the step's one number."""
    monkeypatch.setenv("SLURM_LOCALID", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "1")
    claim_device()
    assert current == [gpu(1)]


def test_without_a_launcher_nothing_is_chosen_early(
    current: list[torch.device],
) -> None:
    claim_device()
    assert current == []


def test_a_gpu_without_a_number_is_that_of_the_rank(
    current: list[torch.device],
) -> None:
    def choose(transport: LocalTransport) -> list[torch.device]:
        wanted = None, torch.device("cuda"), gpu(1), torch.device("cpu")
        return [choose_device(transport, device) for device in wanted]

    cpu = torch.device("cpu")
    assert run_local(3, choose) == [
        [gpu(rank % 2), gpu(rank % 2), gpu(1), cpu] for rank in range(3)
    ]
    assert len(current) == 9


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(GemscError, match="PyTorch finds no GPU here"):
        run_local(1, lambda transport: choose_device(transport, torch.device("cuda")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_started(tmp_path: Path, gemsc: Gemsc) -> None:
    written(tmp_path / "program", Net(lambda self, x: self.a(x)), ranks=1)
    done = gemsc("run", tmp_path / "program", "--device", "cuda")
    assert done.code == 1
    assert "error: --device cuda: PyTorch finds no GPU here" in done.err
    assert "rank" not in done.err
