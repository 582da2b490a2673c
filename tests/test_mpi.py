"""A sample of the parity tests under real mpirun, one process a rank."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from models import MODELS
from test_parity import FLOAT32, FLOAT64, reference, traced

from gemsc.codegen.package import write_directory
from gemsc.compiler import lower
from gemsc.options import CompileOptions
from gemsc.runtime.launch import launch
from gemsc.verify import compare, read_record

SAMPLE = [
    ("unet", CompileOptions(ranks=4, schedule="master", times=2), torch.float64),
    ("unet", CompileOptions(ranks=2, placement="folded", data=2), torch.float64),
    ("encoder", CompileOptions(ranks=2, micro_batches=3), torch.float32),
    ("encoder", CompileOptions(ranks=2, schedule="mast", data=2), torch.float64),
    ("resnet18", CompileOptions(ranks=4, schedule="chimera"), torch.float64),
    ("resnet50", CompileOptions(ranks=3, schedule="zb-h1"), torch.float64),
    ("densecnn", CompileOptions(ranks=2, schedule="interleaved"), torch.float64),
]


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("name", "options", "dtype"),
    SAMPLE,
    ids=[f"{name} {options.command_line()}" for name, options, _ in SAMPLE],
)
def test_processes_compute_what_one_process_does(
    name: str, options: CompileOptions, dtype: torch.dtype, tmp_path: Path
) -> None:
    worst = check_under_mpirun(name, options, dtype, tmp_path)
    assert worst <= (FLOAT64 if dtype is torch.float64 else FLOAT32)


def check_under_mpirun(
    name: str, options: CompileOptions, dtype: torch.dtype, folder: Path
) -> float:
    """Return the worst error of two steps on processes against one process."""
    program = lower(traced(name), options)
    plan = program.plan
    directory = folder / "program"
    write_directory(program.compilation, directory)
    count = plan.data * plan.micro_batches
    torch.save([MODELS[name].inputs(count, dtype)] * 2, folder / "batches.pt")
    words = ["--verify-into", str(folder), "--dtype", str(dtype).split(".")[1]]
    code = launch(plan.ranks, [sys.executable, str(directory), *words], timeout=120)
    assert code == 0
    expected = reference(name, count, dtype, 2)
    return compare(read_record(folder, plan.ranks), expected).worst
