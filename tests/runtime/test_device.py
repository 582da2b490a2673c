"""Which device a rank computes on, on a machine that seems to have GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_line import Gemsc, gemsc_here
from program_support import Net, X, mse, written
from sim_cuda import DEVICE, SimDevice

from gemsc.base.process import MALLOC_SETTING
from gemsc.errors import GemscError
from gemsc.runtime.process.device import (
    cap_memory,
    choose_device,
    claim_device,
    exact_arithmetic,
)
from gemsc.runtime.process.sharing import LOCAL_RANKS
from gemsc.runtime.training import trainer
from gemsc.runtime.transport import torch_distributed
from gemsc.runtime.transport.local import LocalTransport, run_local
from gemsc.verify.one_process import reference_steps

gemsc = pytest.fixture(gemsc_here)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Two GPUs, no launcher; what was made the current device."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for names in LOCAL_RANKS.items():
        for name in names:
            monkeypatch.delenv(name, raising=False)
    return chosen


def gpu(index: int) -> torch.device:
    return torch.device("cuda", index)


@pytest.mark.parametrize("name", LOCAL_RANKS)
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
    with pytest.raises(GemscError, match="PyTorch does not find a GPU"):
        run_local(1, lambda transport: choose_device(transport, torch.device("cuda")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_started(tmp_path: Path, gemsc: Gemsc) -> None:
    written(tmp_path / "program", Net(lambda self, x: self.a(x)), ranks=1)
    done = gemsc("run", tmp_path / "program", "--device", "cuda")
    assert done.code == 1
    assert "error: --device cuda: PyTorch does not find a GPU" in done.err
    assert "rank" not in done.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_verify_without_a_gpu_is_refused(tmp_path: Path, gemsc: Gemsc) -> None:
    written(tmp_path / "program", Net(lambda self, x: self.a(x)), ranks=1)
    for words in ((), ("--run", "2")):
        done = gemsc("verify", tmp_path / "program", "--device", "cuda", *words)
        assert done.code == 1
        assert "PyTorch does not find a GPU" in done.err
    done = gemsc("verify", tmp_path / "program", "--device", "tpu")
    assert "unknown device 'tpu'" in done.err


def test_two_runs_on_a_gpu_are_compared_without_tf32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = matmul.fp32_precision, conv.fp32_precision
    matmul.fp32_precision = conv.fp32_precision = "tf32"
    try:
        with exact_arithmetic(torch.device("cuda")):
            assert matmul.fp32_precision == conv.fp32_precision == "ieee"
            assert torch.are_deterministic_algorithms_enabled()
            assert torch.is_deterministic_algorithms_warn_only_enabled()
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert matmul.fp32_precision == conv.fp32_precision == "tf32"
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        matmul.fp32_precision, conv.fp32_precision = before


@pytest.mark.parametrize("given", [None, "LL128"])
def test_deterministic_runs_pin_what_nccl_adds_by(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO"):
        monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv("NCCL_PROTO", given)
    benchmark = torch.backends.cudnn.benchmark
    try:
        claim_device(torch.device("cpu"), deterministic=True)
        settings = os.environ["NCCL_ALGO"], os.environ["NCCL_PROTO"]
        assert settings == ("Ring", given or "Simple")
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = benchmark
        for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"):
            os.environ.pop(name, None)
        if given is None:
            os.environ.pop("NCCL_PROTO", None)


def test_one_process_trains_on_a_device_as_on_the_cpu() -> None:
    seen = []

    def forward(self: Net, x: torch.Tensor) -> torch.Tensor:
        seen.append(x.device)
        return self.b(self.a(x))

    model = Net(forward)
    given = (model, mse, [((X,), X)] * 2, 2, torch.float64)
    expected = reference_steps(*given)
    with SimDevice(0):
        actual = reference_steps(*given, device=DEVICE)
    assert set(seen[4:]) == {DEVICE}
    assert actual.losses == expected.losses
    for name, tensor in expected.state.items():
        assert actual.state[name].device.type == "cpu"
        assert torch.equal(actual.state[name], tensor)


@pytest.mark.parametrize(
    ("cap", "before", "share"),
    [
        (2**30, 1.0, 0.125),
        (2**32 + 2**29, 1.0, 1.0),
        (2**29, 1.0, 0.0625),
        (2**32, 0.5, 0.5),
        (None, 1.0, None),
    ],
)
def test_pytorch_hands_out_what_a_rank_was_compiled_for(
    cap: int | None,
    before: float,
    share: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The GPU has 4 GiB, of which CUDA takes half a GiB."""
    shares: list[float] = []
    facts = SimpleNamespace(total_memory=2**32)
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(cuda, "get_per_process_memory_fraction", lambda device: before)
    monkeypatch.setattr(
        cuda,
        "set_per_process_memory_fraction",
        lambda fraction, device: shares.append(fraction),
    )
    cap_memory(torch.device("cpu"), cap)
    assert not shares
    cap_memory(gpu(0), cap)
    assert shares == ([] if share is None else [share])


FREES = """
import sys
from pathlib import Path
import torch
from gemsc.runtime.process.device import cap_memory

def resident():
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096

cap_memory(torch.device("cpu"), {cap})
before = resident()
tensors = [torch.ones(2**22) for _ in range(8)]  # 16 MiB each
assert resident() - before > 7 * 2**24
last = torch.ones(2**10)  # behind them
del tensors
print(resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for its memory")
@pytest.mark.parametrize("cap", [None, 2**31])
def test_on_a_cpu_a_rank_with_a_cap_gives_back_what_it_frees(cap: int | None) -> None:
    environment = os.environ | {"GLIBC_TUNABLES": MALLOC_SETTING}
    words = [sys.executable, "-c", FREES.format(cap=cap)]
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, check=True
    )
    kept = int(done.stdout)
    assert kept < 2**24 if cap else kept > 7 * 2**24


def test_a_trainer_knows_what_it_was_compiled_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    caps: list[int | None] = []
    monkeypatch.setattr(trainer, "cap_memory", lambda device, cap: caps.append(cap))
    for cap in (None, 2**24):
        written(tmp_path, Net(lambda self, x: self.a(x)), ranks=1, device_memory=cap)
        run_local(1, lambda t: trainer.Trainer(tmp_path, t))
    assert caps == [None, 2**24]


class FakeNccl:
    """What torch.distributed has of NCCL where it is built with it."""

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(max_ctas=0)

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.most_blocks = options.config.max_ctas
        self.is_over = False

    def eager_connect_single_device(self, device: torch.device) -> None:
        assert device == torch.device("cuda", 0)

    def shutdown(self) -> None:
        self.is_over = True


@pytest.mark.parametrize(("sharing", "most"), [(1, 0), (2, 16), (4, 8), (64, 1)])
def test_the_blocks_of_all_ranks_on_a_gpu_fit(
    sharing: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's blocks wait for those of other ranks; several sums may be in flight."""
    gpu = SimpleNamespace(uuid="gpu", multi_processor_count=132)
    monkeypatch.setenv(torch_distributed.MANY_ON_A_GPU, "1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    dist = SimpleNamespace(
        is_nccl_available=lambda: True,
        PrefixStore=lambda name, store: store,
        ProcessGroupNCCL=FakeNccl,
    )
    monkeypatch.setattr(torch_distributed, "dist", dist)
    transport: Any = object.__new__(torch_distributed.TorchTransport)
    transport.rank, transport.size, transport._store = 0, 64, None
    transport.sums_on_device, transport._blocks_of_nccl = False, None
    others = [("host", str(number)) for number in range(1, 65 - sharing)]
    transport.all_gather_object = lambda mine: [mine] * sharing + others
    transport.try_device(SimpleNamespace(device=torch.device("cuda", 0)))
    assert transport.sums_on_device
    transport.connect = lambda name, ranks: None
    group = torch_distributed.TorchGroup(transport, (0, 1), "gradients")
    group.connect()
    assert group._nccl.most_blocks == most
    assert sharing * most <= 132
    group.close()
    assert group._nccl.is_over
