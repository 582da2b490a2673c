"""What a process asks of its system: its cores, and to end with who started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

# where Open MPI has its shared memory, on one machine: in the scratch folder of the job
SCRATCH_VARIABLE = "OMPI_MCA_btl_sm_backing_directory"
# where ranks find each other that gemsc.launch.torch_ranks starts
STORE_VARIABLE = "GEMSC_TORCH_STORE"
ABORTED = ".aborted"  # beside that file: a rank has said why all end
THREADS = "OMP_NUM_THREADS"
OUR_THREADS = "GEMSC_NUM_THREADS"  # what we set it to, where the user has not
TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by torchrun, in each process
OF_MPI = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")  # in each rank
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

# Of tensors of many sizes, what is freed is often of no use for the next one: a U-Net
# on 1024 x 1024 pixels took 1.5 times as much. Below this size little is lost
LARGE_BLOCK = 2**23
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of <malloc.h>
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
WORKER_SECONDS = 30  # from a SIGTERM to the end of a data loader's process
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """Let the system send this process a signal as soon as its parent has ended.

    `parent` is the parent's number: it may have ended before this call. Nothing
    happens on other systems than Linux.
    """
    if _libc is not None:
        _libc.prctl(_PARENT_DEATH_SIGNAL, int(number), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(128 + number)


def outlast_signals() -> None:
    """Let a data loader's process go on where a scheduler signals all processes.

    The rank that reads from it is asked to leave after its step, and kills it then.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(WORKER_SECONDS))


def return_large_blocks() -> None:
    """Let glibc give what is freed back to the system, from 8 MiB on.

    It costs some time: new memory is cleared. A `GLIBC_TUNABLES` of the user wins.
    """
    setting = os.environ.get("GLIBC_TUNABLES", MALLOC_SETTING)
    if _libc is None or not hasattr(_libc, "mallopt"):  # not glibc
        return
    if setting == MALLOC_SETTING:
        _libc.mallopt(_MMAP_THRESHOLD, LARGE_BLOCK)


def end_with_launcher() -> None:
    """Let this rank be killed as soon as its launcher has ended, however that ended.

    So no rank trains on alone.
    """
    if is_started_by_mpirun() or is_started_by_torch():
        end_with_parent(os.getppid(), signal.SIGKILL)


def is_started_by_mpirun() -> bool:
    """Whether a launcher of MPI, of any kind, started this process."""
    return not set(OF_MPI).isdisjoint(os.environ)


def is_started_by_torch() -> bool:
    """Whether torchrun, or gemsc for torch.distributed, started this process.

    Not if its mpirun is the nearer one; srun, which calls its tasks ranks of MPI, too,
    starts torchrun, and not the other way round.
    """
    if STORE_VARIABLE not in os.environ and TORCHRUN not in os.environ:
        return False
    by_srun = "SLURM_PROCID" in os.environ and OF_MPI[0] not in os.environ
    return by_srun or not is_started_by_mpirun()


def rank_settings(num_ranks: int, *, is_alone: bool) -> dict[str, str]:
    """Return the environment of a rank; `is_alone`: all are on this machine."""
    settings = {"PYTHONUNBUFFERED": "1", "GLIBC_TUNABLES": MALLOC_SETTING}
    if is_alone:
        # torch would start a thread per core in every rank. On several hosts a rank
        # asks for its own
        threads = str(max(1, num_cores() // num_ranks))
        settings |= {THREADS: threads, OUR_THREADS: threads}
    return settings


def threads_are_chosen() -> bool:
    """Whether the user, or another launcher, says how many threads to use."""
    return os.environ.get(THREADS) != os.environ.get(OUR_THREADS)


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(usable_cores())


def usable_cores() -> frozenset[int]:
    """Return the numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))
