"""Stages on grids of real processes: dropout, and the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from command_line import Gemsc, gemsc_here
from program_support import on_ranks

from gemsc.launch.launch import launch
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.transport.choose import start_transport

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("engine")]
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


def compiled(gemsc: Gemsc, folder: Path, name: str, *words: str) -> Path:
    (folder / "model.py").write_text(MODEL)
    path = folder / name
    done = gemsc(
        "compile", folder / "model.py", "-o", path, "--micro-batches", "2", *words
    )
    assert done.code == 0, done.err
    return path


def losses(trainer: Trainer) -> list[float]:
    torch.manual_seed(1)
    x, y = torch.randn(2, 2, 1, 8, 6, 7)
    return [trainer.step((x,), y) for _ in range(3)]


@pytest.mark.nightly
def test_dropout_on_tiles_is_that_of_one_rank(tmp_path: Path, gemsc: Gemsc) -> None:
    one = compiled(gemsc, tmp_path, "one", "--ranks", "1")
    (expected,) = on_ranks(one, 1, losses)
    words = ("--ranks", "2", "--tiles", "2x1x1")
    tiles = compiled(gemsc, tmp_path, "tiles", *words)
    leaner = compiled(gemsc, tmp_path, "leaner", *words, "--recompute", "all")
    assert "recompute(" in (leaner / "rank0.py").read_text()
    job = [sys.executable, __file__, str(tiles), str(leaner)]
    support = str(Path(__file__).parents[1] / "support")
    assert launch(2, job, env={"PYTHONPATH": support}, timeout=120) == 0
    actual = json.loads(tiles.with_suffix(".json").read_text())
    assert actual == pytest.approx(expected, rel=1e-5)
    assert json.loads(leaner.with_suffix(".json").read_text()) == actual


@pytest.mark.nightly
def test_compile_and_verify_from_the_command_line(tmp_path: Path, gemsc: Gemsc) -> None:
    path = compiled(
        gemsc, tmp_path, "p", "--ranks", "2", "--tiles", "1x1x2", "--schedule", "gpipe"
    )
    done = gemsc("verify", path, "--steps", "1", "--dtype", "float64")
    assert done.code == 0, done.out + done.err
    assert "exact" in done.out
    shown = gemsc("show", path)
    assert "1 x 1 x 2" in shown.out


def main(*names: str) -> None:
    """What a rank runs: some steps of each program, in turn."""
    for name in names:
        transport = start_transport()
        figures = losses(Trainer(Path(name), transport))
        if transport.rank == 0:
            Path(name).with_suffix(".json").write_text(json.dumps(figures))
        transport.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
