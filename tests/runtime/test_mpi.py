"""A sample of the parity tests under real mpirun and torchrun, one process a rank."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from parity_support import FLOAT32, FLOAT64, NETWORKS, lowered, options, reference

from gemsc.codegen.package import write_directory
from gemsc.launch.launch import launch
from gemsc.options import CompileOptions
from gemsc.verify.compare import compare, read_record

PROGRAM = Path(__file__).parents[1] / "support" / "mpi_parity_program.py"
DOUBLE = torch.float64
SAMPLE = [
    ("unet", options(ranks=4, schedule="master", times=2), DOUBLE),
    ("unet", options(ranks=4, placement="folded", data=2), DOUBLE),
    ("encoder", options(ranks=2, micro_batches=3), torch.float32),
    ("encoder", options(ranks=4, schedule="mast", micro_batches=2, data=2), DOUBLE),
    ("resnet18", options(ranks=4, schedule="chimera"), DOUBLE),
    ("unet", options(ranks=3, schedule="zb-h1"), DOUBLE),
    ("densecnn", options(ranks=2, schedule="interleaved"), DOUBLE),
    ("tiled", options(ranks=4, tiles="2x1", data=2, overlap_halos="on"), DOUBLE),
    ("tiled", options(ranks=4, tiles="2x2", micro_batches=2), DOUBLE),
    ("tiled", options(ranks=4, tiles="2x1,1x2", micro_batches=2), DOUBLE),
    ("unet", options(ranks=4, tiles="2x1", schedule="master", times=1), DOUBLE),
    ("densecnn", options(ranks=3, tiles="1x2", placement="folded"), DOUBLE),
    ("clip", options(ranks=3, micro_batches=2), DOUBLE),
    ("siamese", options(ranks=4, placement="0,1,0", data=2), DOUBLE),
    ("two encoders", options(ranks=4, schedule="gpipe"), DOUBLE),
    ("words", options(ranks=4, shards="2", trunk="batch", data=2), DOUBLE),
]


BY_PROCESSES = {
    processes: [case for case in SAMPLE if case[1].ranks == processes]
    for processes in (2, 3, 4)
}
# groups of some of the ranks, on tiles and on shards; data-parallel replicas
BY_DAY = [
    ("tiled", options(ranks=3, tiles="2x1,1", micro_batches=2), DOUBLE),
    ("features", options(ranks=3, shards="2,1", micro_batches=2), DOUBLE),
    ("tiled", options(ranks=3, data=3), DOUBLE),
]
OF_FOUR = BY_PROCESSES[4][5::5]  # on tiles; on shards with data-parallel replicas
# mirrored replicas; tiles with data-parallel replicas; shards with them
UNDER_TORCHRUN = BY_PROCESSES[4][2:5:2] + BY_PROCESSES[4][-1:]
TORCHRUN = "torch.distributed.run"


def by_torchrun(processes: int, words: list[str]) -> int:
    """Start a program under torchrun, as users do, and return the exit code."""
    command = [sys.executable, "-m", TORCHRUN, "--nproc-per-node", str(processes)]
    return subprocess.run([*command, *words], timeout=240, check=False).returncode


def by_mpirun(processes: int, words: list[str]) -> int:
    return launch(processes, [sys.executable, *words], timeout=240, engine="mpi")


@pytest.mark.slow(1)
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("start", "sample"),
    [
        pytest.param(by_torchrun, UNDER_TORCHRUN, id="by day, torchrun"),
        pytest.param(by_mpirun, BY_DAY, id="by day"),
        pytest.param(by_mpirun, OF_FOUR, id="by day, of four"),
        *(
            pytest.param(
                *(start, sample),
                id=f"{processes} {start.__name__}",
                marks=pytest.mark.nightly,
            )
            for processes, sample in BY_PROCESSES.items()
            for start in (by_mpirun, by_torchrun)
        ),
    ],
)
def test_processes_compute_what_one_process_does(
    start: Callable[[int, list[str]], int],
    sample: list[tuple[str, CompileOptions, torch.dtype]],
    tmp_path: Path,
) -> None:
    """Two steps of each program of so many ranks, in one job: starts take longest."""
    processes = sample[0][1].ranks
    assert (len(OF_FOUR), len(UNDER_TORCHRUN)) == (2, 3)
    words = []
    for index, (name, plan, dtype) in enumerate(sample):
        folder = tmp_path / str(index)
        write_directory(lowered(name, plan).compilation, folder / "program")
        batches = [NETWORKS[name].inputs(micro_batches(name, plan), dtype)] * 2
        torch.save(batches, folder / "batches.pt")
        words += [str(folder), str(dtype).split(".")[1]]
    assert start(processes, [str(PROGRAM), *words]) == 0
    wrong = {}
    for index, (name, plan, dtype) in enumerate(sample):
        expected = reference(name, micro_batches(name, plan), dtype, 2)
        comparison = compare(read_record(tmp_path / str(index), processes), expected)
        if not comparison.worst <= (FLOAT64 if dtype is torch.float64 else FLOAT32):
            wrong[f"{name} {plan.command_line()}"] = comparison.worst
    assert not wrong


def micro_batches(name: str, plan: CompileOptions) -> int:
    """Return how many of them all copies take in a step."""
    chosen = lowered(name, plan).plan
    return chosen.data * chosen.micro_batches
