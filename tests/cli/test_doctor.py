"""`gemsc doctor`, and the names that a shell completes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import GEMSC, Gemsc, gemsc_here

from gemsc.cli.command import COMMANDS
from gemsc.launch import mpirun

gemsc = pytest.fixture(gemsc_here)


def row(out: str, name: str) -> str:
    return next(line for line in out.splitlines() if line.startswith(name))


@pytest.mark.slow
def test_it_says_what_is_there(gemsc: Gemsc) -> None:
    outcome = gemsc("doctor", "--no-trial")
    assert outcome.code == 0, outcome.err
    assert torch.__version__ in row(outcome.out, "torch")
    assert sys.prefix in row(outcome.out, "Python")
    assert "core" in row(outcome.out, "CPU")


def test_what_is_missing_has_advice(
    gemsc: Gemsc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(mpirun.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(mpirun.sys, "prefix", str(tmp_path))
    broken = tmp_path / "dot"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    out = gemsc("doctor", "--no-trial").out
    assert "pip install 'gemsc[mpi]'" in row(out, "mpirun")
    assert "none that starts" in row(out, "dot")
    assert "a cluster with Slurm" in row(out, "sbatch")


@pytest.mark.mpi
@pytest.mark.nightly
def test_two_ranks_train(gemsc: Gemsc) -> None:
    outcome = gemsc("doctor")
    assert outcome.code == 0, outcome.err
    assert "Open MPI" in row(outcome.out, "MPI of mpi4py")
    assert "2 ranks train a small network exactly" in outcome.out


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("gemsc com", {"compile", "compare"}),
        ("gemsc ", set(COMMANDS)),
        ("gemsc verify --dt", {"--dtype"}),
    ],
)
def test_a_shell_completes(typed: str, wanted: set[str]) -> None:
    asked = {
        "_GEMSC_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split(" ")) - 1),
    }
    done = subprocess.run(
        [GEMSC], env=os.environ | asked, capture_output=True, text=True, check=False
    )
    assert set(done.stdout.split()) == wanted, done.stderr
