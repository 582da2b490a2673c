"""Several ranks on one device: which ranks share it, on one machine.

Two copies of a pipeline of four stages, --per-device 2: a GPU holds stages s and 3 - s

    copy 0  stages 0 1 2 3  on GPUs 0 1 2 3
    copy 1  stages 0 1 2 3  on GPUs 3 2 1 0

NVIDIA's MPS, a daemon, lets their kernels run at once; without it, the processes that
share a GPU take turns. The first rank of a machine that asks starts the daemon, before
it calls CUDA, and all use it. The daemon would outlive them; so a small process of its
own, the keeper, ends it as soon as the launcher of the ranks has ended, however that
was. What killed keepers left is ended by the next start. A daemon that already answers
is the site's: it is used and left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from gemsc.base.process import is_started_by_torch
from gemsc.errors import GemscError

# A rank's number on its machine, and how many there are, as launchers tell it; the
# first that is set counts. A job step's own come before those of the job that it may
# run in.
LOCAL_RANKS = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_SIZE",  # Open MPI
    "MPI_LOCALRANKID": "MPI_LOCALNRANKS",  # MPICH, Intel MPI
    "PMI_LOCAL_RANK": "PMI_LOCAL_SIZE",
    "SLURM_LOCALID": "SLURM_STEP_TASKS_PER_NODE",  # 4(x2),3: of each node
}
OF_TORCH = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
OF_NODES = re.compile(r"(\d+)(?:\(x(\d+)\))?")


class LocalPlace(NamedTuple):
    """A rank among those of its machine; `size` is 0 where the launcher is silent."""

    rank: int
    size: int


def local_place(environment: Mapping[str, str] = os.environ) -> LocalPlace | None:
    """Return what the launcher tells of this rank; None if it tells nothing."""
    launchers = dict([OF_TORCH]) if is_started_by_torch() else LOCAL_RANKS
    for rank, size in launchers.items():
        if environment.get(rank, "").isdecimal():
            sizes = [
                int(number)
                for number, times in OF_NODES.findall(environment.get(size, ""))
                for _ in range(int(times or 1))
            ]
            node = int(environment.get("SLURM_NODEID", "0")) if len(sizes) > 1 else 0
            return LocalPlace(int(environment[rank]), sizes[node] if sizes else 0)
    return None


def check_sharing(per_device: int, num_ranks: int, num_gpus: int) -> None:
    """Make sure that so many ranks of a machine fill its GPUs, or groups of its cores.

    Raises:
        GemscError: they do not.
    """
    option = f"--per-device {per_device}"
    if num_gpus == 0:
        if num_ranks % per_device:
            fits = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
            raise GemscError(
                f"{option} does not divide the {num_ranks} ranks on this machine",
                help=f"use --per-device {' or '.join(map(str, fits))}",
            )
        return
    wanted = per_device * num_gpus
    if num_ranks == wanted:
        return
    ways = []
    if num_ranks % num_gpus == 0:
        ways.append(f"use --per-device {num_ranks // num_gpus}")
    if num_ranks % per_device == 0 and num_ranks < wanted:
        few = ",".join(map(str, range(num_ranks // per_device)))
        ways.append(f"set CUDA_VISIBLE_DEVICES={few}")
    ways.append(f"compile for {wanted} ranks, with more --data")
    raise GemscError(
        f"{option} on {num_gpus} GPU{'s' * (num_gpus > 1)} is for {wanted} ranks, and "
        f"{num_ranks} are on this machine",
        help=", or ".join(ways),
    )


def shared_device(
    local_rank: int, per_device: int, copy_ranks: int, num_ranks: int
) -> int:
    """Return the number of the GPU of one of `num_ranks` ranks on a machine.

    `per_device` copies of `copy_ranks` ranks each share that many GPUs, every second
    one in reverse order: stages that hold much lie beside stages that hold little, and
    work while these wait. Where the ranks are no such copies, neighbours share.
    """
    if num_ranks % (per_device * copy_ranks):
        return local_rank // per_device
    copy, place = divmod(local_rank, copy_ranks)
    if copy % per_device % 2:
        place = copy_ranks - 1 - place
    return copy // per_device * copy_ranks + place


CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
PREFIX = "gemsc-mps-"
REASON = "reason"  # file in a daemon's folder: why it did not start; empty if it did
START_SECONDS = 10.0
LOOK_SECONDS = 0.2


def use_mps() -> str:
    """Let this process, which has not called CUDA, use MPS; return why it cannot.

    Raises:
        GemscError: the GPUs take one process only, or the daemon that the environment
            names does not answer.
    """
    given = os.environ.get(PIPES)
    if shutil.which(CONTROL) is None:
        return "" if given else f"there is no {CONTROL} here"
    if _ask_daemon("get_server_list", dict(os.environ)):
        return ""
    if given:
        raise GemscError(
            f"no MPS daemon answers in {PIPES}={given}",
            help=f"start it with `{CONTROL} -d`, or unset {PIPES}",
        )
    launcher = os.getppid()
    try:
        reason = _started_daemon(_daemon_folder(launcher), launcher)
    except OSError as error:
        reason = f"no folder for its sockets: {error}"
    if reason and _is_exclusive():
        raise GemscError(
            f"each GPU accepts only one process, and MPS did not start: {reason}",
            help="run nvidia-smi -c DEFAULT, or use --per-device 1",
        )
    return reason


def _started_daemon(folder: Path, launcher: int) -> str:
    """Start the daemon, or wait until another rank has; return why it did not."""
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        note = folder / REASON
        if not note.exists():
            note.write_text(_start_daemon(folder, launcher))
        reason = note.read_text()
    if not reason:
        os.environ.update(_variables(folder))
    return reason


def _start_daemon(folder: Path, launcher: int) -> str:
    for stale in folder.parent.glob(f"{PREFIX}*"):
        if not _is_alive(stale):
            _end_daemon(stale)
    environment = os.environ | _variables(folder)
    environment.pop("CUDA_VISIBLE_DEVICES", None)  # it would number them once more
    output = folder / "output"
    with output.open("w") as file:  # a pipe would stay open as long as the daemon
        code = subprocess.call(
            [CONTROL, "-d"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    deadline = time.monotonic() + START_SECONDS
    while code == 0 and not _ask_daemon("get_server_list", environment):
        if time.monotonic() > deadline:
            _ask_daemon("quit", environment)
            return f"it does not answer after {START_SECONDS:.0f} s"
        time.sleep(LOOK_SECONDS)
    if code != 0:
        lines = output.read_text(errors="replace").strip().splitlines()
        return f"{CONTROL} -d: {lines[-1] if lines else f'exit code {code}'}"
    subprocess.Popen(
        [sys.executable, "-m", __name__, str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a signal for the ranks is none for it
    )
    return ""


def _variables(folder: Path) -> dict[str, str]:
    return {PIPES: str(folder), LOGS: str(folder)}


def _ask_daemon(command: str, environment: dict[str, str]) -> bool:
    """Give the daemon a command; return whether there is one that does it."""
    try:
        done = subprocess.run(
            [CONTROL],
            input=command.encode(),
            env=environment,
            capture_output=True,
            timeout=START_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _is_exclusive() -> bool:
    with contextlib.suppress(OSError):
        words = ["nvidia-smi", "--query-gpu=compute_mode", "--format=csv,noheader"]
        answer = subprocess.run(words, capture_output=True, text=True, check=False)
        return "Exclusive" in answer.stdout
    return False


def _daemon_folder(launcher: int) -> Path:
    """Return the folder of the ranks of a launcher; its path is short, for sockets."""
    parent = Path("/tmp") if Path("/tmp").is_dir() else Path(tempfile.gettempdir())
    return parent / f"{PREFIX}{os.getuid()}-{launcher}-{_began(launcher)}"


def _began(process: int) -> str:
    """Return when a process began: its number may be given again. "" if it is gone."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return ""
    state, *fields = text.rpartition(")")[2].split()
    return "" if state == "Z" else fields[18]


def _is_alive(folder: Path) -> bool:
    """Whether the launcher runs whose ranks use this folder."""
    *_, launcher, began = folder.name.split("-")
    return bool(began) and _began(int(launcher)) == began


def _end_daemon(folder: Path) -> None:
    """End the daemon of a folder, and remove that."""
    if os.access(folder, os.W_OK):
        _ask_daemon("quit", os.environ | _variables(folder))
        shutil.rmtree(folder, ignore_errors=True)


def _keep_daemon(folder: Path) -> None:
    """End the daemon once the ranks' launcher has ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    while _is_alive(folder):
        time.sleep(LOOK_SECONDS)
    _end_daemon(folder)


if __name__ == "__main__":
    _keep_daemon(Path(sys.argv[1]))
