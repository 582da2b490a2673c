"""Several ranks on a GPU: which, under whose daemon; the GPUs and the daemon are fake.

The fake `nvidia-cuda-mps-control` writes what it is asked to a log; it runs as long as
its folder holds a file `control`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command_line import GEMSC, MODEL, Gemsc, gemsc_here, start

from gemsc.costs.sharing import SharedDevice
from gemsc.errors import GemscError
from gemsc.options import AUTO, CompileOptions
from gemsc.plan import Plan
from gemsc.runtime.process import sharing
from gemsc.runtime.process.device import claim_device
from gemsc.runtime.process.sharing import (
    LOCAL_RANKS,
    LocalPlace,
    check_sharing,
    local_place,
    shared_device,
)
from gemsc.search.sharing import choose_sharing

gemsc = pytest.fixture(gemsc_here)

CONTROL = """\
#!/bin/sh
at="${CUDA_MPS_PIPE_DIRECTORY:-$MPS_LOG.default}"
if [ "$1" = -d ]; then
  echo "start ${CUDA_VISIBLE_DEVICES-all} $at" >> "$MPS_LOG"
  [ -z "$MPS_FAILS" ] || { echo "An error: $MPS_FAILS"; exit 1; }
  touch "$at/control"; exit 0
fi
read -r words
[ "$words" = get_server_list ] || echo "$words $at" >> "$MPS_LOG"
[ -e "$at/control" ] || exit 1
[ "$words" != quit ] || rm "$at/control"
"""
GPUS = """\
import os, sys
import torch
if "keep" not in sys.argv and any("program" in word for word in sys.argv):
    from gemsc.runtime.process import device
    def claimed(transport, wanted=None):
        pipes = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
        with open(os.environ["MPS_LOG"], "a") as log:
            print("rank", transport.rank, wanted, pipes, file=log)
        return torch.device("cpu")
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 2
    torch.cuda.set_device = lambda device: None
    torch.cuda.set_per_process_memory_fraction = lambda share, device: None
    device.choose_device = claimed
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log of a fake daemon, which is first on the path."""
    bin = tmp_path / "bin"
    bin.mkdir()
    (bin / sharing.CONTROL).write_text(CONTROL)
    (bin / sharing.CONTROL).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin}:{os.environ['PATH']}")
    monkeypatch.setenv("MPS_LOG", str(tmp_path / "log"))
    monkeypatch.delenv(sharing.PIPES, raising=False)
    return tmp_path / "log"


@pytest.fixture
def fake_gpus(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Two GPUs, and what of them was claimed."""
    claimed: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", claimed.append)
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda share, device: claimed.append((share, device)),
    )
    for name in (*LOCAL_RANKS, *LOCAL_RANKS.values(), "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    return claimed


def place(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", str(rank))
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", str(size))
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", str(rank))


# which ranks share a GPU


@pytest.mark.parametrize(
    ("per_device", "copy_ranks", "expected"),
    [
        (2, 1, [0, 0, 1, 1, 2, 2, 3, 3]),  # copies of one rank
        (4, 1, [0, 0, 0, 0, 1, 1, 1, 1]),
        (2, 4, [0, 1, 2, 3, 3, 2, 1, 0]),  # stages s and 3 - s
        (2, 2, [0, 1, 1, 0, 2, 3, 3, 2]),
        (4, 2, [0, 1, 1, 0, 0, 1, 1, 0]),
        (1, 4, [0, 1, 2, 3, 4, 5, 6, 7]),
        (4, 4, [0, 0, 0, 0, 1, 1, 1, 1]),  # two copies: neighbours share
    ],
)
def test_copies_share_gpus(
    per_device: int, copy_ranks: int, expected: list[int]
) -> None:
    devices = [shared_device(rank, per_device, copy_ranks, 8) for rank in range(8)]
    assert devices == expected


@pytest.mark.parametrize("per_device", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("copy_ranks", [1, 2, 3, 4, 6, 12])
def test_each_gpu_has_as_many_ranks(per_device: int, copy_ranks: int) -> None:
    devices = [shared_device(r, per_device, copy_ranks, 12) for r in range(12)]
    gpus = 12 // per_device
    assert sorted(devices) == sorted([*range(gpus)] * per_device)


def test_launchers_tell_how_many_ranks_a_machine_has() -> None:
    slurm = {"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}
    assert local_place(slurm | {"SLURM_NODEID": "1"}) == LocalPlace(1, 4)
    assert local_place(slurm | {"SLURM_NODEID": "2"}) == LocalPlace(1, 3)
    hydra = {"MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "8"}
    assert local_place(hydra) == LocalPlace(2, 8)
    assert local_place({"PMI_LOCAL_RANK": "2"}) == LocalPlace(2, 0)
    assert local_place({}) is None


def test_what_does_not_fill_the_gpus_is_refused() -> None:
    check_sharing(2, 4, 2)
    check_sharing(2, 4, 0)
    with pytest.raises(GemscError) as caught:
        check_sharing(2, 4, 4)
    assert str(caught.value) == (
        "error: --per-device 2 on 4 GPUs is for 8 ranks, and 4 are on this machine\n"
        "help: use --per-device 1, or set CUDA_VISIBLE_DEVICES=0,1, or compile for 8 "
        "ranks, with more --data"
    )
    with pytest.raises(GemscError, match="is for 2 ranks, and 3 are on"):
        check_sharing(2, 3, 1)
    with pytest.raises(GemscError) as caught:
        check_sharing(4, 6, 0)
    assert "does not divide the 6 ranks" in str(caught.value)
    assert "use --per-device 1 or 2 or 3 or 6" in str(caught.value)


def test_a_rank_gets_its_gpu_and_its_part_of_the_memory(
    fake_gpus: list[object],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # without MPS
    place(monkeypatch, 3, 4)
    gpu = torch.device("cuda", 0)
    assert claim_device(per_device=2, copy_ranks=2) == gpu
    assert fake_gpus == [gpu, (0.5, gpu)]
    assert capfd.readouterr().err == ""  # the first rank says it for all
    place(monkeypatch, 0, 4)
    claim_device(per_device=2, copy_ranks=2)
    assert capfd.readouterr().err == (
        "note: no MPS (there is no nvidia-cuda-mps-control here): the 2 ranks on a GPU "
        "take turns; expect no gain over one\n"
    )
    claim_device()
    assert capfd.readouterr().err == (
        "note: 4 ranks take turns on 2 GPUs; --per-device lets them share\n"
    )
    assert claim_device(torch.device("cpu"), per_device=2) == torch.device("cpu")
    place(monkeypatch, 0, 2)
    claim_device()
    assert capfd.readouterr().err == ""
    with pytest.raises(GemscError, match="is for 4 ranks, and 2 are on"):
        claim_device(per_device=2)


def test_a_launcher_that_tells_nothing_is_named(
    fake_gpus: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMI_RANK", "1")
    with pytest.raises(GemscError, match="does not say which ranks"):
        claim_device(per_device=2)


# the daemon


def test_a_daemon_of_the_site_is_used_and_left_alone(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "control").touch()
    monkeypatch.setenv(sharing.PIPES, str(tmp_path))
    assert sharing.use_mps() == ""
    assert not log.exists()
    assert os.environ[sharing.PIPES] == str(tmp_path)
    (tmp_path / "control").unlink()
    with pytest.raises(GemscError, match="no MPS daemon answers in CUDA_MPS_PIPE"):
        sharing.use_mps()


def test_a_daemon_that_does_not_start_is_told(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "_daemon_folder", lambda launcher: tmp_path / "own")
    monkeypatch.setenv("MPS_FAILS", "no permission")
    expected = "nvidia-cuda-mps-control -d: An error: no permission"
    assert sharing.use_mps() == expected
    assert sharing.use_mps() == expected  # to the next rank
    assert log.read_text().count("start") == 1
    assert sharing.PIPES not in os.environ
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho Exclusive_Process\n")
    smi.chmod(0o755)
    with pytest.raises(GemscError, match="only one process, and MPS did not start"):
        sharing.use_mps()


@pytest.fixture
def program(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gemsc: Gemsc
) -> Path:
    """A program of four copies, where two GPUs seem to be."""
    (tmp_path / "model.py").write_text(MODEL)
    done = gemsc(
        *("compile", tmp_path / "model.py", "-o", tmp_path / "program"),
        *("--ranks", 4, "--data", 4, "--micro-batches", 1),
    )
    assert done.code == 0, done.err
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "sitecustomize.py").write_text(GPUS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    return tmp_path / "program"


@pytest.mark.slow
@pytest.mark.mpi
def test_the_daemon_starts_once_and_outlives_no_launcher(
    program: Path, log: Path
) -> None:
    """Not even one that is killed; the next one sees to what killed keepers left."""
    folders = Path("/tmp").glob(f"{sharing.PREFIX}{os.getuid()}-*")
    others = {f"quit {folder}" for folder in folders}  # of tests that were killed

    def lines_told() -> list[str]:
        return [line for line in log.read_text().splitlines() if line not in others]

    stale = Path("/tmp") / f"{sharing.PREFIX}{os.getuid()}-{os.getpid()}-1"
    stale.mkdir(exist_ok=True)
    (stale / "control").touch()
    words = ("run", program, "--per-device", 2, "--epochs", 1_000_000)
    with (log.parent / "said").open("w") as said:
        command = [str(word) for word in (GEMSC, *words)]
        job = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
    try:
        until(lambda: log.exists() and log.read_text().count("rank") == 4)
        until(lambda: (program / "runs" / "1" / "log.jsonl").exists())
    finally:
        job.send_signal(signal.SIGKILL)
        job.wait()
    until(lambda: str(lines_told()).count("quit") == 2)
    lines = lines_told()
    assert lines[0] == f"quit {stale}"
    assert not stale.exists()
    word, visible, folder = lines[1].split()
    assert (word, visible) == ("start", "all")
    assert sorted(lines[2:6]) == [f"rank {r} cuda:{r // 2} {folder}" for r in range(4)]
    assert lines[6:] == [f"quit {folder}"]
    until(lambda: not Path(folder).exists())


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.mpi
@pytest.mark.nightly
def test_the_daemon_ends_with_the_run(program: Path, log: Path) -> None:
    done = start("run", program, "--per-device", 2, "--epochs", 1)
    assert done.code == 0, done.err
    until(lambda: "quit" in log.read_text())


def test_gemsc_run_refuses_before_anything_starts(
    program: Path, fake_gpus: list[object], gemsc: Gemsc
) -> None:
    done = gemsc("run", program, "--per-device", 4)
    assert done.code == 1
    assert done.err.startswith(
        "error: --per-device 4 on 2 GPUs is for 8 ranks, and 4 are on this machine"
    )
    assert not (program / "runs").exists()


@pytest.mark.slow
def test_on_a_cpu_ranks_that_do_not_divide_are_refused(
    program: Path, gemsc: Gemsc
) -> None:
    done = gemsc("run", program, "--device", "cpu", "--per-device", 3)
    assert done.code == 1
    assert "--per-device 3 does not divide the 4 ranks" in done.err


@pytest.mark.mpi
@pytest.mark.nightly
def test_on_a_cpu_the_run_is_the_same(program: Path) -> None:
    words = ("run", program, "--device", "cpu", "--epochs", 1)
    plain = start(*words, PYTHONPATH="")
    shared = start(*words, "--per-device", 2, PYTHONPATH="")
    assert shared.code == plain.code == 0, shared.err
    losses = [out.split("loss")[1].split()[0] for out in (plain.out, shared.out)]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_the_number_that_was_compiled_is_that_of_the_run(
    tmp_path: Path, fake_gpus: list[object], gemsc: Gemsc
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    words = ("compile", tmp_path / "model.py", "-o", tmp_path / "p", "--ranks", 3)
    shares = ("--data", 3, "--per-device", 3, "--hardware", "a100")
    done = gemsc(*words, *shares, "--device-memory", "6GiB")
    assert done.code == 0, done.err
    assert "note: 3 ranks share each device: predicted +" in done.out
    assert Plan.read(tmp_path / "p" / "plan.toml").rank_memory == 2 * 2**30
    done = gemsc("run", tmp_path / "p")
    assert "--per-device 3 on 2 GPUs is for 6 ranks, and 3 are" in done.err
    done = gemsc(*words, "--data", 3, "--per-device", 2)
    assert "error: --per-device 2 does not divide --data 3" in done.err
    done = gemsc(*words, "--data", "auto", "--per-device", "auto")
    assert "--per-device auto needs numbers for --data" in done.err


def chosen(gain: float, fits: int, cap: int | None = None) -> int:
    """Return the number that is chosen where so many fit, for `gain` seconds idle."""
    shared = SharedDevice(launch=gain, kernels=1.0, full=1.0, sum_seconds=0.01)

    def stage(options: CompileOptions) -> None:
        assert options.rank_memory == (cap and cap // options.per_device)
        if options.per_device > fits:
            raise GemscError("too large")

    asked = CompileOptions(data=8, per_device=AUTO, device_memory=cap)
    choice = choose_sharing(asked, shared, lambda o: ((), o), stage)  # type: ignore[arg-type]
    return choice[1].per_device


def test_auto_takes_the_fewest_that_gain_most_and_fit() -> None:
    assert chosen(1.0, fits=8) == 1  # the device is full
    assert chosen(2.0, fits=8) == 2
    assert chosen(4.0, fits=8) == 4
    assert chosen(100.0, fits=8) == 8
    assert chosen(100.0, fits=7, cap=2**30) == 4
    assert chosen(1.05, fits=8) == 1  # the sums cost more
    with pytest.raises(GemscError, match="too large"):
        chosen(4.0, fits=0)
    with pytest.raises(GemscError, match="nothing to choose") as caught:
        CompileOptions(ranks=2, per_device=AUTO)
    assert caught.value.help == (
        "give the replicas that are to share: --ranks 8 --data 4"
    )
