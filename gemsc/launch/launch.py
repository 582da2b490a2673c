"""Start ranks on this machine, with all the settings that users should never meet."""

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
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import IO

from gemsc.base.process import end_with_parent, num_cores
from gemsc.errors import GemscError
from gemsc.runtime.process.progress import REPORTED, STATUS_VARIABLE, read_status

__all__ = [
    "MALLOC_SETTING",
    "TIMED_OUT",
    "find_mpirun",
    "launch",
    "mpirun_command",
]

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
TIMED_OUT = 124  # exit code, the same as that of timeout(1)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
Tell = Callable[[int, str], str]

GRACE_SECONDS = 5.0  # from asking mpirun to end to killing it
LONGEST_REPORT = 9  # lines, of which one may say that there are more
SHARED_MEMORY = Path("/dev/shm")
LOCK = "lock"  # file in a scratch folder, locked while its job runs
SEGMENT_BYTES = 32 * 2**20  # of shared memory for each rank; half of it is Open MPI's


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


@contextlib.contextmanager
def _scratch_folder(num_ranks: int) -> Iterator[Path]:
    """A folder for one job's sockets and shared memory, gone after it.

    Its path is short: sockets cannot have a path of over 107 characters. It lies in
    shared memory if there is room, and does not outlast ranks that were killed.
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
            yield folder
        finally:
            _remove(folder)


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


def launch(
    num_ranks: int,
    argv: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    stdout: int | IO[str] | None = None,
    stderr: int | IO[str] | None = None,
    show_all: bool = False,
    computes: Callable[[int], list[str]] = lambda rank: [],
) -> int:
    """Start `argv` on every rank, pass its output on, and return the exit code.

    mpirun's own paragraphs about a failed rank become one line, unless `show_all`. If a
    rank could not say why it ended, what it was doing is added: every rank notes that
    in a file that outlives it; `computes(rank)` gives lines about the rank's part.
    Signals that end this process end the ranks first, and if it is killed, mpirun ends
    them. `env` adds to the environment; `stdout` and `stderr` are as for
    `subprocess.Popen`, less PIPE. The exit code is 124 after `timeout` seconds, and
    128 + n after signal n.
    """
    target = _descriptor(stderr)
    with _scratch_folder(num_ranks) as scratch:
        notes = _Notes(scratch / "status", num_ranks, computes)
        notes.folder.mkdir()
        command, environment = mpirun_command(num_ranks, argv, scratch=scratch)
        with _forwarded_signals() as signals:
            process = subprocess.Popen(
                command,
                cwd=cwd,
                env=environment
                | {STATUS_VARIABLE: str(notes.folder)}
                | dict(env or {}),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr if show_all else subprocess.PIPE,
                start_new_session=True,  # a signal for the group goes to mpirun alone
                preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),
            )
            signals.pass_on_to(process)
            reader = _start_reader(process, target, notes.of_rank)
            code = _wait(process, timeout)
        seen = signals.seen
        if reader is not None:
            reader.join(GRACE_SECONDS)
        if seen:
            _write(target, notes.of_all(f"stopped by {_named(seen[0])}"))
        elif code < 0:
            _write(target, notes.of_all(f"mpirun was ended by {_named(-code)}"))
    if seen:
        return 128 + seen[0]
    return 128 - code if code < 0 else code


def _descriptor(stderr: int | IO[str] | None) -> int:
    if stderr is None:
        sys.stderr.flush()
        return 2
    return stderr if isinstance(stderr, int) else stderr.fileno()


def _named(number: int) -> str:
    return f"signal {number} ({signal.strsignal(number)})"


@dataclass(frozen=True)
class _Notes:
    """What the ranks of a job noted in `folder` of what they do."""

    folder: Path
    num_ranks: int
    computes: Callable[[int], list[str]]

    def of_rank(self, rank: int, how: str) -> str:
        """Return the report of a rank that could not say itself how it ended."""
        doing = read_status(self.folder, rank)
        if doing is None or self._is_reported:
            return f"rank {rank} {how}"
        return "\n".join([f"error: rank {rank} {how} in {doing}", *self.computes(rank)])

    def of_all(self, what: str) -> bytes:
        """Return the report of a job that was ended from outside."""
        lines = [f"error: {what}"]
        for rank in range(self.num_ranks):
            doing = read_status(self.folder, rank)
            if doing is not None and not self._is_reported:
                lines.append(f"note: rank {rank} was in {doing}")
        if len(lines) > LONGEST_REPORT:
            lines[LONGEST_REPORT:] = [f"note: and {len(lines) - LONGEST_REPORT} more"]
        return ("\n".join(lines) + "\n").encode()

    @property
    def _is_reported(self) -> bool:
        return (self.folder / REPORTED).exists()


def _wait(process: subprocess.Popen[bytes], timeout: float | None) -> int:
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        _signal_group(process, signal.SIGTERM)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        _signal_group(process, signal.SIGKILL)
        process.wait()
    return TIMED_OUT


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@dataclass
class _Signals:
    """What shall end this process, and the mpirun that it is passed on to.

    What is `seen` before mpirun runs is passed on once it does.
    """

    seen: list[int] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None
    killer: threading.Timer | None = None

    def pass_on_to(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        if self.seen:
            self._pass_on(self.seen[0])

    def catch(self, number: int, frame: FrameType | None) -> None:
        self.seen.append(number)
        self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        """End mpirun, which does not handle all signals; kill it if it goes on."""
        if self.process is None:
            return
        if self.killer is None:
            ends = (self.process, signal.SIGKILL)
            self.killer = threading.Timer(GRACE_SECONDS, _signal_group, ends)
            self.killer.daemon = True
            self.killer.start()
        ends_by = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        _signal_group(self.process, ends_by)


@contextlib.contextmanager
def _forwarded_signals() -> Iterator[_Signals]:
    """Catch what shall end this process: only the main thread can."""
    signals = _Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    is_kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # by nohup
    caught = [n for n in ENDING if n is not signal.SIGHUP or not is_kept]
    before = {n: signal.signal(n, signals.catch) for n in caught}
    try:
        yield signals
    finally:
        if signals.killer is not None:
            signals.killer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def _start_reader(
    process: subprocess.Popen[bytes], target: int, tell: Tell
) -> threading.Thread | None:
    """Copy the ranks' stderr in a thread, less mpirun's paragraphs."""
    pipe = process.stderr
    if pipe is None:
        return None
    thread = threading.Thread(target=_copy, args=(pipe, target, tell), daemon=True)
    thread.start()
    return thread


# What mpirun and MPI_Abort say, between two lines of dashes: Open MPI 5 has no --quiet.
# A rank that fails has said why; only what it could not say itself (a signal, an exit
# code) is worth a line.

_RULE = rb"^-{60,}\r?\n"
_WORDS = (
    rb"(?:MPI_ABORT was invoked"
    rb"|(?:prterun|mpirun|mpiexec)\S* (?:noticed|detected|has exited)"
    rb"|Primary job +terminated normally)"
)
_PARAGRAPH = re.compile(_RULE + _WORDS + rb"[\s\S]*?" + _RULE, re.MULTILINE)
_BEGUN = re.compile(  # what may become one
    rb"^-+\r?\Z|" + _RULE + rb"(?:[^\n]*\Z|" + _WORDS + rb")", re.MULTILINE
)
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
        for pattern, how in _ENDS:
            if found := re.search(pattern, paragraph[0]):
                rank, *rest = (group.decode() for group in found.groups())
                return f"{tell(int(rank), how.format(*rest))}\n".encode()
        return b""

    held = b""
    for piece in pieces:
        held = _PARAGRAPH.sub(summary, held + piece.replace(b"\0", b""))
        begun = _BEGUN.search(held)
        end = begun.start() if begun else len(held)
        yield held[:end]
        held = held[end:]
    yield held


def _copy(pipe: IO[bytes], target: int, tell: Tell) -> None:
    for text in in_our_words(iter(lambda: os.read(pipe.fileno(), 65536), b""), tell):
        _write(target, text)


def _write(target: int, data: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody reads any more: a terminal was closed
        while data:
            data = data[os.write(target, data) :]
