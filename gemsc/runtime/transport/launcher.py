"""Start MPI, in a process that its launcher and MPI both take for a rank of one job.

Where they do not, every process is rank 0 of a job of its own. That is found before MPI
starts: Open MPI leaves 16 MiB of shared memory behind from each such process.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gemsc.base.process import (
    SCRATCH_VARIABLE,
    is_started_by_mpirun,
    is_started_by_torch,
)
from gemsc.errors import GemscError

NUM_RANKS_VARIABLE = "GEMSC_NUM_RANKS"  # set by gemsc.launch
TRANSPORTS = "OMPI_MCA_btl"
SLURM_TASKS = "SLURM_STEP_NUM_TASKS"  # set by srun, in each task
OF_OPEN_MPI = {"OMPI_COMM_WORLD_RANK", "PMIX_RANK"}
RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")


def is_first_started() -> bool:
    """Whether the launcher calls this process the first one, or there is none."""
    names = ("RANK",) if is_started_by_torch() else RANKS
    return next((os.environ[n] for n in names if n in os.environ), "0") == "0"


def check_launcher() -> None:
    """Make sure that this process does not take itself for the only one.

    Raises:
        GemscError: srun started it, which gives ranks of MPI nothing to find each
            other by.
    """
    tasks = os.environ.get(SLURM_TASKS, "1")
    if tasks != "1" and not is_started_by_mpirun():
        raise GemscError(
            f"srun started {tasks} processes, and MPI cannot connect them",
            help=f"use srun --mpi=pmix -n {tasks} ...; `srun --mpi=list` shows what it "
            "supports",
        )


def start_mpi() -> Any:
    """Return the module of mpi4py, with MPI started.

    Raises:
        GemscError: there is none, or it is of another MPI than the launcher.
    """
    check_launcher()
    try:
        import mpi4py

        mpi4py.rc(initialize=False, finalize=True)
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py finds no libmpi
        what = str(error).partition("\n")[0]
        raise GemscError(
            f"no MPI library for Python: {what}",
            help="pip install 'gemsc[mpi]', or LD_LIBRARY_PATH=<folder of libmpi.so>",
        ) from error
    if not MPI.Is_initialized():  # the user's script may have done so
        _check_library(MPI.Get_library_version())
        is_alone = not is_started_by_mpirun() and TRANSPORTS not in os.environ
        if is_alone:  # it has nobody to share memory with
            os.environ[TRANSPORTS] = "^sm"
        with _files_of_the_job():
            MPI.Init_thread()
        if is_alone:
            del os.environ[TRANSPORTS]
    return MPI


@contextmanager
def _files_of_the_job() -> Iterator[None]:
    """Let what MPI leaves as it starts lie with the job's own files.

    Where mpirun dies just then, Open MPI makes a folder that nobody would remove. Where
    these files are gone already, so is the job.
    """
    folder, before = os.environ.get(SCRATCH_VARIABLE), os.environ.get("TMPDIR")
    if folder is None:  # of several hosts
        yield
        return
    if not Path(folder).is_dir():
        sys.exit(128 + signal.SIGTERM)
    os.environ["TMPDIR"] = folder
    try:
        yield
    finally:
        del os.environ["TMPDIR"]
        if before is not None:
            os.environ["TMPDIR"] = before


def _check_library(version: str) -> None:
    is_open_mpi = version.startswith("Open MPI")
    ours = OF_OPEN_MPI & os.environ.keys()
    if is_open_mpi and not ours and "PMI_RANK" in os.environ:
        how, cure = "by PMI, as for MPICH", "--mpi=pmix"
    elif not is_open_mpi and "OMPI_COMM_WORLD_RANK" in ours:
        how, cure = "by Open MPI's mpirun", "--mpi=pmi2"
    else:
        return
    raise GemscError(
        f"the ranks were started {how}, but mpi4py uses {_short(version)}",
        help=f"start them with the mpirun of that library, or srun {cure}",
    )


def check_size(size: int, version: str) -> None:
    """Make sure that MPI counts as many ranks as were started.

    Raises:
        GemscError: it does not.
    """
    names = (NUM_RANKS_VARIABLE, "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", SLURM_TASKS)
    expected = next((os.environ[n] for n in names if n in os.environ), "")
    if expected.isdecimal() and int(expected) != size:
        raise GemscError(
            f"{expected} ranks were started, but MPI counts {size}",
            help=f"mpi4py uses {_short(version)}: start the ranks with its own mpirun",
        )


def _short(version: str) -> str:
    return version.strip("\0").split(",")[0].split("\n")[0]
