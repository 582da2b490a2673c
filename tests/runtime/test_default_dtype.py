"""A run reads its data under the default dtype of the model's file."""

from __future__ import annotations

from pathlib import Path

import torch
from command_line import compile_here

from gemsc.runtime.training import train
from gemsc.runtime.training.arguments import parse_arguments
from gemsc.runtime.transport.local import run_local

FILE = """\
import torch
from torch import nn
from torch.utils.data import TensorDataset

torch.set_default_dtype(torch.float64)
model = nn.Linear(4, 2)
loss = nn.MSELoss()

def example_inputs():
    return (torch.randn(2, 4),)

def dataset():
    with open(__file__ + ".log", "a") as file:
        print(torch.get_default_dtype(), file=file)
    return TensorDataset(torch.randn(8, 4), torch.randn(8, 2))
"""


def test_a_file_that_makes_all_tensors_wide(tmp_path: Path) -> None:
    """They were drawn in float32, which gives other numbers from one seed."""
    file, program = tmp_path / "wide.py", tmp_path / "program"
    file.write_text(FILE)
    compile_here(file, "--ranks", "1", "-o", program)
    torch.set_default_dtype(torch.float32)
    log = Path(f"{file}.log")
    log.unlink()
    options = parse_arguments(["--steps", "1"])
    run_local(1, lambda transport: train.train(program, transport, options))
    assert log.read_text() == "torch.float64\n"
