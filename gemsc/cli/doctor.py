"""`gemsc doctor`: what of this machine gemsc can use, and whether two ranks train."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated

import torch
import typer
from rich.markup import escape
from rich.table import Table
from torch import nn

from gemsc.base.cores import Topology
from gemsc.base.process import usable_cores
from gemsc.cli.terminal import Answer, console, gives_json, tell
from gemsc.compiler import compile
from gemsc.errors import GemscError
from gemsc.launch.mpirun import find_mpirun
from gemsc.verify.steps import verify_compiled

Row = tuple[str, str, str]  # what it is, what is there, what to do where nothing is
LIBRARY = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
from gemsc.runtime.transport.trial import library_takes_cuda
print(MPI.Get_library_version())
if MPI.get_vendor()[0] == "Open MPI":  # others end a process that asks before MPI_Init
    print("CUDA-aware" if library_takes_cuda() else "without CUDA")
"""
EXTRAS = {  # package: (extra, what it is for)
    "mpi4py": ("mpi", "ranks"),
    "onnx": ("onnx", "gemsc import x.onnx, gemsc export --to onnx"),
    "h5py": ("keras", "gemsc import x.keras"),
}


@gives_json
def doctor_command(
    trial: Annotated[
        bool, typer.Option(help="train a small network on 2 ranks for one step")
    ] = True,
) -> Answer:
    """Check what gemsc can use on this machine, and train one step on two ranks."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    rows = list(_rows())
    for row in rows:
        table.add_row(*map(escape, row), style="yellow" if row[2] else "")
    console.print(table)
    if trial:
        tell(_trial())
    facts = [dict(zip(("name", "found", "advice"), row, strict=True)) for row in rows]
    return {"machine": facts, "trial": "exact" if trial else None}, 0


def _rows() -> Iterator[Row]:
    yield "gemsc", version("gemsc"), ""
    yield "Python", f"{sys.version.split()[0]} in {sys.prefix}", ""
    yield "torch", torch.__version__, ""
    yield from _packages()
    yield _row("mpirun", _mpirun, "pip install 'gemsc[mpi]', or load your site's MPI")
    yield _row("MPI of mpi4py", _library, "pip install 'gemsc[mpi]'")
    yield _row("torch.distributed", _torch_engine, "a PyTorch that has it")
    yield _cores()
    yield from _gpus()
    yield _program("dot", "-V", "graph.svg: install graphviz")
    yield _program("sbatch", "--version", "job.sbatch: a cluster with Slurm")
    yield _program("c++", "--version", "--torch-compile: install g++")


def _packages() -> Iterator[Row]:
    for package, (extra, purpose) in EXTRAS.items():
        try:
            yield package, version(package), ""
        except PackageNotFoundError:
            yield package, "none", f"{purpose}: pip install 'gemsc[{extra}]'"


def _row(what: str, look: Callable[[], str], advice: str) -> Row:
    """Return a row of what `look` says; with the advice, where it finds nothing."""
    try:
        return what, look(), ""
    except (GemscError, OSError, subprocess.SubprocessError) as error:
        said = error.message if isinstance(error, GemscError) else "none that starts"
        return what, said, advice


def _mpirun() -> str:
    path = find_mpirun()
    return f"{_first_line(str(path), '--version')}, {path}"


def _library() -> str:
    """Return the library that ranks load, which may not be that of mpirun."""
    name, *_, last = _output(sys.executable, "-c", LIBRARY).splitlines()
    name = " ".join(name.split(",")[0].rstrip("\0").split())
    return f"{name}, {last}" if "CUDA" in last else name


def _torch_engine() -> str:
    """Return what `--engine torch` goes by."""
    dist = torch.distributed
    if not dist.is_available() or not dist.is_gloo_available():
        raise GemscError("none: no --engine torch")
    return "gloo, NCCL" if dist.is_nccl_available() else "gloo; no NCCL"


def _cores() -> Row:
    cores, there = usable_cores(), os.cpu_count() or 1
    given, domains = len(cores), len(Topology.read().domains_in(cores))
    text = f"{given} cores" if given == there else f"{given} of {there} cores"
    return "CPU", text + (f" in {domains} NUMA domains" if domains > 1 else ""), ""


def _gpus() -> Iterator[Row]:
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = "torch is built for CPUs" if built is None else "no driver or no GPU"
        yield "CUDA", f"none: {why}", ""
        return
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        memory = f"{facts.total_memory / 2**30:.0f} GiB"
        yield f"cuda:{index}", f"{facts.name}, {memory}", ""
    yield _program(
        "nvidia-cuda-mps-control", "", "several ranks on a GPU take turns without it"
    )


def _program(name: str, word: str, advice: str) -> Row:
    path = shutil.which(name)
    if path is None:
        return name, "none", advice
    return _row(name, lambda: _first_line(path, word) if word else path, advice)


def _first_line(*command: str) -> str:
    return _output(*command).splitlines()[0]


def _output(*command: str) -> str:
    """Return what a command prints.

    Raises:
        SubprocessError: it fails, prints nothing, or takes too long.
    """
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True
    )
    if not (text := (done.stdout + done.stderr).strip()):
        raise subprocess.SubprocessError
    return text


def _trial() -> str:
    """Train a small network on two ranks and compare; return a line about it.

    Raises:
        GemscError: the ranks fail, or compute something else than one process.
    """
    start = perf_counter()
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    inputs, target, loss = (torch.rand(4, 8),), torch.rand(4, 4), nn.MSELoss()
    with TemporaryDirectory(prefix="gemsc-doctor-") as folder:
        program = Path(folder) / "program"
        compile(model, inputs, loss=loss, example_target=target, ranks=2).write(program)
        verify_compiled(
            *(program, model, inputs), loss=loss, example_target=target, num_steps=1
        )
    seconds = perf_counter() - start
    return f"2 ranks train a small network exactly as one process does: {seconds:.0f} s"
