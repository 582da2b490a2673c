"""The second engine, torch.distributed, as users start it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from command_line import GEMSC, MODEL, compile_here, is_alive, start

from gemsc.runtime.checkpoint.folder import check_checkpoint

pytestmark = pytest.mark.mpi

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
SLOW = MODEL.replace("Data(24)", "Data(24_000)")
FAILING = """

class Failing(Data):
    def __getitem__(self, index):
        import os
        if os.environ.get("RANK") == "1":
            FAIL
        return super().__getitem__(index)


def dataset():
    return Failing(24)
"""
DEADLINE = 90.0


def written(folder: Path, text: str, *words: object) -> Path:
    """Return a program of two ranks."""
    (folder / "model.py").write_text(text)
    compile_here(folder / "model.py", "--ranks", 2, *words, "-o", folder / "program")
    return folder / "program"


def curve(folder: Path) -> list[tuple[int, float]]:
    """Return the figures of each step and evaluation of a run, without times."""
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


@pytest.mark.slow
@pytest.mark.parametrize(
    "at_night", [False, pytest.param(True, marks=pytest.mark.nightly)]
)
def test_a_run_goes_on_under_the_other_engine_bit_for_bit(
    at_night: bool, tmp_path: Path
) -> None:
    """From the command line to saved weights; each rank has half of Adam's state."""
    options = "--data", 2, "--shard-optimizer", "--micro-batches", 2
    program = written(tmp_path, MODEL, *options)
    alone, mixed = tmp_path / "alone", tmp_path / "mixed"
    words = "run", program, "--clip-norm", 0.5, "--workers", int(at_night), "--save"
    engines = enumerate(("torch", "mpi", "torch") if at_night else ("torch", "mpi"), 1)
    for epochs, engine in engines:
        more = "--epochs", epochs, "--engine", engine, *["--resume"] * (epochs > 1)
        assert start(*words, mixed, *more).code == 0
    assert start(*words, alone, "--epochs", epochs, "--engine", "mpi").code == 0
    both = [(run / "model.safetensors").read_bytes() for run in (alone, mixed)]
    assert both[0] == both[1]
    assert curve(mixed) == curve(alone)
    assert len(curve(alone)) >= epochs


def under_torchrun(program: Path, *words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*TORCHRUN, str(program), *map(str, words)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def ours(report: str) -> list[str]:
    """Return the errors in a report that are not torchrun's own."""
    return re.findall(r"^(?:\S+:\d+: )?error: .*", report, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "says"),
    [
        (
            "raise ValueError('no sample')",
            "sample 12 cannot be read: ValueError: no sample",
        ),
        ("os.kill(os.getpid(), 9)", "error: rank 1 has ended before the others, and "),
    ],
)
def test_a_rank_that_fails_under_torchrun_is_reported_once(
    how: str, says: str, tmp_path: Path
) -> None:
    program = written(tmp_path, MODEL + FAILING.replace("FAIL", how))
    job = under_torchrun(program, "--save", tmp_path / "saved")
    _, report = job.communicate(timeout=DEADLINE)
    assert job.returncode != 0
    (line,) = ours(report)
    assert says in line, report


@pytest.mark.slow
@pytest.mark.parametrize("starter", ["gemsc", "torchrun"])
def test_a_signal_saves_a_checkpoint_and_leaves_nothing(
    starter: str, tmp_path: Path
) -> None:
    program = written(tmp_path, SLOW)
    saved = tmp_path / "saved"
    words = [str(program), "--save", str(saved), "--checkpoint-every", "2"]
    command = [str(GEMSC), "run", *words, "--engine", "torch"]
    with subprocess.Popen(
        command if starter == "gemsc" else [*TORCHRUN, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        began = time.monotonic()
        while not (saved / "latest").exists():
            assert time.monotonic() - began < DEADLINE
            assert job.poll() is None
            time.sleep(0.05)
        everyone = family(job.pid)
        if starter == "gemsc":  # torchrun itself listens on all addresses
            assert listening(everyone) == {"0100007F"}  # 127.0.0.1
        job.send_signal(signal.SIGTERM)
        report, _ = job.communicate(timeout=DEADLINE)
    assert len(everyone) > 2
    assert not any(map(is_alive, everyone))
    if starter == "gemsc":
        assert job.returncode == 75
    assert "stopped on request at step " in report
    manifest = check_checkpoint(saved).manifest
    assert manifest is not None
    assert f"stopped on request at step {manifest.step};" in report


def family(pid: int) -> list[int]:
    """Return a process and all that came of it."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    pids = [int(word) for word in path.read_text().split()] if path.exists() else []
    return [pid, *(member for child in pids for member in family(child))]


def listening(pids: Sequence[int]) -> set[str]:
    """Return the addresses that processes listen on, in the system's own numbers."""
    sockets = set()
    for pid in pids:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            if (name := os.readlink(path)).startswith("socket:["):
                sockets.add(name[8:-1])
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in sockets:
                addresses.add(words[1].partition(":")[0])
    return addresses
