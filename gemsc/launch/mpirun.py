"""The command that starts ranks, with the settings that users should never meet."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from gemsc.base.process import num_cores
from gemsc.errors import GemscError

__all__ = ["MALLOC_SETTING", "find_mpirun", "mpirun_command"]

# glibc: large pages for tensors. Copies from process to process are twice as fast, and
# training a convolution was 15 % faster, one that unfolds 50 % (CPU, one thread). What
# a step frees, up to 16 GiB, is kept for the next one, and not cleared by the system
MALLOC_SETTING = ":".join(
    (
        "glibc.malloc.hugetlb=1",
        f"glibc.malloc.mmap_threshold={2**30}",
        f"glibc.malloc.trim_threshold={2**34}",
    )
)


def find_mpirun() -> Path:
    """Return the mpirun of this Python's environment, or else the one on the path.

    Raises:
        GemscError: there is none.
    """
    places = [str(Path(sys.executable).parent), sys.prefix + "/bin", None]
    for place in places:
        for name in ("mpirun", "mpiexec"):
            if found := shutil.which(name, path=place):
                return Path(found)
    raise GemscError(
        "no mpirun beside this Python, nor on the path",
        help="pip install 'gemsc[mpi]'",
    )


@cache
def _is_hydra(mpirun: Path) -> bool:
    """Whether this is the mpirun of MPICH and its relatives, not of Open MPI."""
    answer = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, check=False
    )
    return "hydra" in (answer.stdout + answer.stderr).lower()


def mpirun_command(
    num_ranks: int, argv: Sequence[str], *, scratch: Path | None = None
) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts `argv` on every rank, and its environment.

    Settings of the user's own environment win. Open MPI keeps its files in `scratch`.
    """
    mpirun = find_mpirun()
    settings = {
        "GEMSC_NUM_RANKS": str(num_ranks),
        # torch would start a thread per core in every rank
        "OMP_NUM_THREADS": str(max(1, num_cores() // num_ranks)),
        "PYTHONUNBUFFERED": "1",
        "GLIBC_TUNABLES": MALLOC_SETTING,
    }
    command = [str(mpirun), "-n", str(num_ranks)]
    if _is_hydra(mpirun):
        command += ["-launcher", "fork", "-bind-to", "none"]
    else:
        command += ["--host", f"localhost:{num_ranks}", "--bind-to", "none"]
        settings |= _open_mpi_settings(scratch, num_ranks)
    return [*command, *argv], settings | dict(os.environ)


def _open_mpi_settings(scratch: Path | None, num_ranks: int) -> dict[str, str]:
    """Settings for one machine; versions 4 (OMPI) and 5 (PRTE) read different names."""
    settings = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_ALLOW_RUN_AS_ROOT": "1",
        "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "true",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        # Shared memory only. To look for networks costs a second at every start. What
        # is left out is named, not what is kept: a build with CUDA has parts of its own
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "^tcp,ofi,uct,usnic,openib,ugni",
        # Where one process may not read another's memory (containers), messages go
        # through shared memory in pieces. 16 MiB take 1 ms in pieces of 512 KiB; in the
        # usual 32 KiB, 90 ms, as a polite rank moves a piece or two at each turn
        "OMPI_MCA_btl_sm_max_send_size": str(512 * 2**10),
    }
    if scratch is not None:
        settings["PRTE_MCA_prte_tmpdir_base"] = str(scratch)
        settings["OMPI_MCA_orte_tmpdir_base"] = str(scratch)
        settings["OMPI_MCA_btl_sm_backing_directory"] = str(scratch)
    return settings
