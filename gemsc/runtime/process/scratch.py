"""A folder for one job's sockets and shared memory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
LOCK = "lock"  # file in a scratch folder, locked while its job runs
SEGMENT_BYTES = 32 * 2**20  # of shared memory for each rank; half of it is Open MPI's
# reads until who made the folder says a word, or is gone: then ranks take a moment, too
SWEEP = """\
read -r _ || sleep 1
for each in "$0"/status/worker*; do rm -f /dev/shm/torch_"${each##*worker}"_*; done
for _ in 1 2 3; do rm -rf "$0"; test -e "$0" || exit; sleep 1; done
"""


@contextlib.contextmanager
def scratch_folder(num_ranks: int) -> Iterator[Path]:
    """A folder for one job's sockets and shared memory, gone after it.

    Its path is short: sockets cannot have a path of over 107 characters. It lies in
    shared memory if there is room, and does not outlast processes that were killed: a
    shell removes it when this process ends, or the next job if that was killed, too.
    The shell also removes what killed processes of data loaders (`status/worker<pid>`)
    have in shared memory: PyTorch makes a file there for each tensor that they send.
    """
    parent = Path("/tmp") if Path("/tmp").is_dir() else Path(tempfile.gettempdir())
    if (
        os.access(SHARED_MEMORY, os.W_OK)
        and shutil.disk_usage(SHARED_MEMORY).free > num_ranks * SEGMENT_BYTES
    ):
        parent = SHARED_MEMORY
    _remove_stale_folders(parent)
    folder = Path(tempfile.mkdtemp(prefix="gemsc-", dir=parent))
    unlocked = folder / f".{LOCK}"
    with unlocked.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        unlocked.rename(folder / LOCK)  # nobody finds it before it is locked
        try:
            with _swept(folder):
                yield folder
        finally:
            _remove(folder)


@contextlib.contextmanager
def _swept(folder: Path) -> Iterator[None]:
    """Let a shell, in a session of its own, remove a folder when this process ends."""
    shell = subprocess.Popen(
        ["sh", "-c", SWEEP, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        shell.communicate(b"\n")  # a process that was forked may hold the pipe open


def _remove(folder: Path) -> None:
    """Remove a folder; try again if a rank that is being ended still writes there."""
    for _ in range(10):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.05)


def _remove_stale_folders(parent: Path) -> None:
    """Remove what killed jobs have left: nobody holds the lock of their folders."""
    for folder in parent.glob("gemsc-*"):
        with contextlib.suppress(OSError):
            if not (folder / LOCK).exists():
                if time.time() - folder.stat().st_mtime > 60:
                    folder.rmdir()
                continue
            with (folder / LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)
