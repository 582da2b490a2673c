"""Stages on grids of real processes: dropout, and the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from command_line import Gemsc, gemsc_here, start

from gemsc.launch.launch import launch
from gemsc.plan import Plan

pytestmark = pytest.mark.mpi
gemsc = pytest.fixture(gemsc_here)

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(1, 4, 3, padding=1)
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm3d(4)
        self.last = nn.Conv3d(4, 1, 3, padding=1)

    def forward(self, x):
        return self.last(self.drop(self.norm(self.conv(x)).relu()))

def model():
    torch.manual_seed(0)
    return Net()

def example_inputs():
    return (torch.randn(1, 1, 8, 6, 7),)

def example_target():
    return torch.randn(1, 1, 8, 6, 7)

def loss(output, target):
    return nn.functional.mse_loss(output, target)
"""

LOOP = """
import json, sys
import torch
import gemsc

trainer = gemsc.load(sys.argv[1])
torch.manual_seed(1)
x, y = torch.randn(2, 2, 1, 8, 6, 7)
losses = [trainer.step((x,), y) for _ in range(3)]
if trainer.transport.rank == 0:
    open(sys.argv[2], "w").write(json.dumps(losses))
trainer.transport.close()
"""


def compiled(gemsc: Gemsc, folder: Path, name: str, *words: str) -> Path:
    (folder / "model.py").write_text(MODEL)
    path = folder / name
    done = gemsc(
        "compile", folder / "model.py", "-o", path, "--micro-batches", "2", *words
    )
    assert done.code == 0, done.err
    return path


def test_dropout_on_tiles_is_that_of_one_rank(tmp_path: Path, gemsc: Gemsc) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    found = []
    tiles = ["--ranks", "2", "--tiles", "2x1x1"]
    for name, words in (
        ("one", ["--ranks", "1"]),
        ("tiles", tiles),
        ("leaner", [*tiles, "--recompute", "all"]),
    ):
        path = compiled(gemsc, tmp_path, name, *words)
        result = tmp_path / f"{name}.json"
        loop = [sys.executable, str(tmp_path / "loop.py"), str(path), str(result)]
        assert launch(Plan.read(path / "plan.toml").ranks, loop, timeout=120) == 0
        found.append(json.loads(result.read_text()))
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[2] == found[1]
    assert "recompute(" in (tmp_path / "leaner" / "rank0.py").read_text()


def test_compile_and_verify_from_the_command_line(tmp_path: Path, gemsc: Gemsc) -> None:
    path = compiled(
        gemsc, tmp_path, "p", "--ranks", "4", "--tiles", "2x1x2", "--schedule", "gpipe"
    )
    done = start("verify", path, "--steps", "1", "--dtype", "float64")
    assert done.code == 0, done.out + done.err
    assert "exact" in done.out
    shown = gemsc("show", path)
    assert "2 x 1 x 2" in shown.out
