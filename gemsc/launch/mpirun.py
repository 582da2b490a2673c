"""The command that starts ranks, and what it prints of a failed one, in our words."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from gemsc.base.process import SCRATCH_VARIABLE, rank_settings
from gemsc.errors import GemscError
from gemsc.launch.hosts import Host, listed

OF_MPI = ("OMPI_", "PRTE_", "PMIX_", "OPAL_")  # mpirun carries those of the user itself
NVIDIA_DRIVER = Path("/proc/driver/nvidia")
OF_A_HOST = re.compile(
    r"HOSTNAME|HOME|USER|LOGNAME|SHELL|MAIL|PWD|OLDPWD|SHLVL|_|TMPDIR|DISPLAY|TERM"
    r"|(SSH|XDG|DBUS|SLURM)_\w+"
)

# settings everywhere; versions 4 (OMPI) and 5 (PRTE) read different names
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "true",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    # Where one process may not read another's memory (containers), messages go through
    # shared memory in pieces. 16 MiB take 1 ms in pieces of 512 KiB; in the usual
    # 32 KiB, 90 ms, as a polite rank moves a piece or two at each turn
    "OMPI_MCA_btl_sm_max_send_size": str(512 * 2**10),
}


def find_mpirun() -> Path:
    """Return the mpirun of this Python's environment, or else the one on the path.

    Raises:
        GemscError: there is none.
    """
    places = [str(Path(sys.executable).parent), sys.prefix + "/bin", None]
    for place in places:
        for name in ("mpirun", "mpiexec"):
            if path := shutil.which(name, path=place):
                return Path(path)
    raise GemscError(
        "no mpirun next to this Python or on the path",
        help="pip install 'gemsc[mpi]'",
    )


@cache
def is_hydra(mpirun: Path) -> bool:
    """Whether this is the mpirun of MPICH and its relatives, not of Open MPI."""
    answer = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, check=False
    )
    return "hydra" in (answer.stdout + answer.stderr).lower()


@cache
def _is_built_with_cuda(mpirun: Path) -> bool:
    """Whether this Open MPI carries GPU memory; no, on a machine without a GPU."""
    info = mpirun.resolve().with_name("ompi_info")
    if not NVIDIA_DRIVER.exists() or not info.exists():
        return False
    answer = subprocess.run(
        [info, "--parsable", "--all"], capture_output=True, text=True, check=False
    )
    return "built_with_cuda_support:value:true" in answer.stdout


def mpirun_command(
    num_ranks: int,
    argv: Sequence[str],
    *,
    scratch: Path | None = None,
    hosts: Sequence[Host] = (),
    env: Mapping[str, str] | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts `argv` on every rank, and its environment.

    `hosts` take exactly these ranks; without any, all are on this machine, and Open MPI
    keeps its files in `scratch`. Settings of the user's own environment win, and `env`
    over them.
    """
    mpirun = find_mpirun()
    settings = {
        "GEMSC_NUM_RANKS": str(num_ranks),
        "HOME": os.path.expanduser("~"),  # Open MPI does not start without
        **rank_settings(num_ranks, is_alone=not hosts),
    }
    is_open_mpi = not is_hydra(mpirun)
    if is_open_mpi:
        settings |= OPEN_MPI
        settings |= {} if hosts else _one_machine_settings(scratch)
        if _is_built_with_cuda(mpirun):  # what carries GPU memory may be another part
            settings.pop("OMPI_MCA_pml", None)
    settings |= dict(os.environ) | dict(env or {})
    where = _hydra_options(hosts)
    if is_open_mpi:
        where = _open_mpi_options(num_ranks, hosts, settings)
    return [str(mpirun), "-n", str(num_ranks), *where, *argv], settings


def _hydra_options(hosts: Sequence[Host]) -> list[str]:
    """Options of MPICH, which brings all of the environment to every host."""
    where = ["-launcher", "fork"]
    if hosts:
        where = ["-launcher", "ssh", "-hosts", listed(hosts)]
    return [*where, "-bind-to", "none"]


def _open_mpi_options(
    num_ranks: int, hosts: Sequence[Host], settings: Mapping[str, str]
) -> list[str]:
    """Options of Open MPI, which brings its own settings to other hosts, and no more.

    All of the environment follows, as under MPICH and Slurm, less what is of a host.
    """
    where = listed(hosts) or f"localhost:{num_ranks}"
    given = [] if hosts == () else sorted(filter(_is_carried, settings))
    carried = [word for name in given for word in ("-x", name)]
    return ["--host", where, "--bind-to", "none", *carried]


def _is_carried(name: str) -> bool:
    is_local = name.startswith(OF_MPI) or OF_A_HOST.fullmatch(name) is not None
    return name.isidentifier() and not is_local


def _one_machine_settings(scratch: Path | None) -> dict[str, str]:
    """Settings for one machine: shared memory only, and files in `scratch`.

    To look for networks costs a second at every start. What is left out is named, not
    what is kept: a build with CUDA has parts of its own.
    """
    settings = {
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "^tcp,ofi,uct,usnic,openib,ugni",
    }
    if scratch is not None:
        settings["PRTE_MCA_prte_tmpdir_base"] = str(scratch)
        settings["OMPI_MCA_orte_tmpdir_base"] = str(scratch)
        settings[SCRATCH_VARIABLE] = str(scratch)
    return settings


Tell = Callable[[int | None, str], str]  # of a rank, or of all

# It stands between two lines of dashes, and Open MPI 5 has no --quiet. A rank that
# fails has said why; only what it could not say itself (a signal, an exit code) is
# worth a line.

_RULE = rb"^-{60,}\r?\n"
_WORDS = (
    rb"(?:MPI_ABORT was invoked"
    rb"|(?:prterun|mpirun|mpiexec)\S* (?:noticed|detected|has exited)"
    rb"|\S+ has lost communication with a remote daemon"
    rb"|Primary job +terminated normally)"
)
_PARAGRAPH = re.compile(_RULE + _WORDS + rb"[\s\S]*?" + _RULE, re.MULTILINE)
_BEGUN = re.compile(  # what may become one
    rb"^-+\r?\Z|" + _RULE + rb"(?:[^\n]*\Z|" + _WORDS + rb")", re.MULTILINE
)
_LOST = re.compile(rb"Remote daemon: +\[[^\]]*\] on node (\S+)")
_ENDS = (
    (
        rb"process rank (\d+) with PID \d+ on node \S+\s+"
        rb"exited\s+on\s+signal (\d+ \([^)]*\))",
        "was ended by signal {}",
    ),
    (rb"Process name: \[[^\]]*,(\d+)\]\s+Exit code: +(\d+)", "ended with exit code {}"),
    (
        rb"process rank (\d+) with PID \d+ on node \S+\s+exiting\s+improperly",
        "left before the others had ended",
    ),
)


def in_our_words(pieces: Iterable[bytes], tell: Tell) -> Iterator[bytes]:
    """Yield text as it comes, with a line of `tell` for a paragraph of mpirun's.

    `tell` adds to what has become of a rank what is known of it. Held back is only what
    may be the beginning of such a paragraph.
    """

    def summary(paragraph: re.Match[bytes]) -> bytes:
        if lost := _LOST.search(paragraph[0]):
            return f"{tell(None, f'host {lost[1].decode()} was lost')}\n".encode()
        for pattern, how in _ENDS:
            if match := re.search(pattern, paragraph[0]):
                rank, *details = (group.decode() for group in match.groups())
                told = tell(int(rank), how.format(*details))
                return f"{told}\n".encode() if told else b""
        return b""

    held = b""
    for piece in pieces:
        held = _PARAGRAPH.sub(summary, held + piece.replace(b"\0", b""))
        begun = _BEGUN.search(held)
        end = begun.start() if begun else len(held)
        yield held[:end]
        held = held[end:]
    yield held
