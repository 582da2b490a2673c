"""Start ranks on this machine, with all the settings that users should never meet."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO

from gemsc.base.process import end_with_parent
from gemsc.errors import GemscError
from gemsc.launch.hosts import UNREACHED, Host
from gemsc.launch.loopback import keep_to_loopback
from gemsc.launch.mpirun import Tell, in_our_words, is_hydra, mpirun_command
from gemsc.launch.torch_ranks import torch_command
from gemsc.runtime.process.hang import hang_report, is_hanging
from gemsc.runtime.process.progress import BAR_VARIABLE
from gemsc.runtime.process.scratch import scratch_folder
from gemsc.runtime.process.status import (
    REPORTED,
    STATUS_VARIABLE,
    read_states,
    read_status,
)
from gemsc.runtime.process.stop import (
    ECHO_SECONDS,
    STOPPED,
    STOPPING,
    signal_name,
)

TIMED_OUT = 124  # exit code, the same as that of timeout(1)
ENDING = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, *STOPPING)
LOOK_SECONDS = 5.0  # from one look whether the ranks hang to the next
LATER_SECONDS = 3.0  # than the ranks' own reports
GRACE_SECONDS = 5.0  # from asking mpirun to end to killing it
LONGEST_REPORT = 9  # lines, of which one may say that there are more
ENGINE_VARIABLE = "GEMSC_ENGINE"
COMMANDS = {"mpi": mpirun_command, "torch": torch_command}
STARTERS = {"mpi": "mpirun", "torch": "the process that started the ranks"}


@dataclass(frozen=True)
class Ending:
    """The exit code, and what is known beside it.

    how: what became of the rank that ended the others, "" if it said so itself.
    is_asked: whether this process was asked to end.
    step: the last step that any rank was in, None if no rank could say.
    """

    code: int
    how: str = ""
    is_asked: bool = False
    step: int | None = None

    @property
    def reason(self) -> str:
        """What the ranks ended with."""
        return self.how or f"the ranks ended with exit code {self.code}"


def launch(
    num_ranks: int,
    argv: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    stdout: int | IO[str] | None = None,
    stderr: int | IO[str] | None = None,
    computes: Callable[[int], list[str]] = lambda rank: [],
    hosts: Sequence[Host] = (),
    engine: str | None = None,
    at_end: Callable[[Ending], None] = lambda ending: None,
) -> int:
    """Start `argv` on every rank, pass its output on, and return the exit code.

    mpirun's own paragraphs about a failed rank become one line. If a rank could not say
    why it ended, what it was doing is added: every rank notes that in a file that
    outlives it; `computes(rank)` gives lines about the rank's part. Signals that end
    this process end the ranks first, and if it is killed, mpirun ends them. `hosts`
    take exactly these ranks; without any, all are on this machine. `engine` is "mpi" or
    "torch", by default what GEMSC_ENGINE says, or MPI. `env` adds to the
    environment; `stdout` and `stderr` are as for `subprocess.Popen`, less PIPE. The
    exit code is 124 after `timeout` seconds, and 128 + n after signal n; the first
    SIGTERM or SIGUSR1 only asks ranks that can save to leave, with exit code 75.
    `at_end` is told more of how they ended.

    Raises:
        GemscError: the engine is not there, or cannot do that.
    """
    engine = chosen_engine(engine)
    starter = STARTERS[engine]
    target = _descriptor(stderr)
    with scratch_folder(num_ranks) as scratch:
        notes = _Notes(scratch / "status", num_ranks, computes)
        notes.folder.mkdir()
        command, environment = COMMANDS[engine](
            num_ranks,
            argv,
            scratch=scratch,
            hosts=hosts,
            env={STATUS_VARIABLE: str(notes.folder)} | dict(env or {}),
        )
        with _forwarded_signals(notes.folder) as signals:
            process = subprocess.Popen(
                command,
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a signal for the group goes to mpirun alone
                preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),
            )
            signals.pass_on_to(process)
            if engine == "mpi" and not (hosts or is_hydra(Path(command[0]))):
                keep_to_loopback(process.pid)
            of_pipe = (process.stderr, target, notes.of_rank)
            reader = threading.Thread(target=_copy, args=of_pipe, daemon=True)
            reader.start()
            code = _wait(process, timeout, notes, target)
        seen = signals.seen
        reader.join(GRACE_SECONDS)
        if seen:
            _write(target, notes.of_all(f"stopped by {signal_name(seen[0])}"))
        elif code < 0:
            _write(target, notes.of_all(f"{starter} was ended by {signal_name(-code)}"))
        elif code not in (0, STOPPED, TIMED_OUT) and (text := notes.last_words):
            _write(target, f"{text}\n".encode())  # a mpirun that ends shows no more
            code = STOPPED
        elif code not in (0, STOPPED, TIMED_OUT) and notes.are_silent:
            is_lost = hosts and code == UNREACHED
            why = "as ssh when a host is lost" if is_lost else "it may be by a signal"
            _write(
                target, notes.of_all(f"{starter} ended with exit code {code}, {why}")
            )
        if seen:
            code = -seen[0]
        elif code == 0 and notes.told:  # mpirun says so where a host is lost
            code = 1
        code = 128 - code if code < 0 else code
        how = next(iter(notes.told), "")
        at_end(Ending(code, how, is_asked=bool(seen), step=notes.last_step))
    return code


def chosen_engine(engine: str | None) -> str:
    """Return the engine asked for, or else that of the environment, or MPI.

    Raises:
        GemscError: there is no such engine.
    """
    engine = engine or os.environ.get(ENGINE_VARIABLE) or "mpi"
    if engine not in COMMANDS:
        raise GemscError(f"{ENGINE_VARIABLE} is '{engine}', not mpi or torch")
    return engine


def bar_settings() -> dict[str, str]:
    """Return the environment in which ranks show their progress, on a terminal."""
    if not sys.stdout.isatty():
        return {}
    return {BAR_VARIABLE: "1", "COLUMNS": str(shutil.get_terminal_size().columns)}


def _descriptor(stderr: int | IO[str] | None) -> int:
    if stderr is None:
        sys.stderr.flush()
        return 2
    return stderr if isinstance(stderr, int) else stderr.fileno()


@dataclass(frozen=True)
class _Notes:
    """What the ranks of a job noted in `folder` of what they do."""

    folder: Path
    num_ranks: int
    computes: Callable[[int], list[str]]
    told: list[str] = field(default_factory=list)  # what ended ranks without a word

    @property
    def last_step(self) -> int | None:
        """The last step that any rank has begun, None if none has said so."""
        doing = (read_status(self.folder, rank) for rank in range(self.num_ranks))
        steps = (re.search(r"step (\d+)$", text) for text in doing if text is not None)
        return max((int(step[1]) for step in steps if step), default=None)

    def of_rank(self, rank: int | None, how: str) -> str:
        """Return the report of a rank that could not say itself how it ended."""
        if how.endswith(f" exit code {STOPPED}"):
            return ""  # it has said so
        if how.endswith(" exit code 1") and self._is_reported and not self.last_words:
            return ""  # why all end was said
        if rank is None:
            self.told.append(how)
            return f"error: {how}"
        self.told.append(f"rank {rank} {how}")
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

    def of_hang(self, now: float) -> bytes:
        """Return the report of ranks that hang and cannot say so, b"" if they can."""
        states = read_states(self.folder)
        if not is_hanging(states, now - LATER_SECONDS) or self._is_reported:
            return b""
        return (hang_report(states, now) + "\n").encode()

    @property
    def are_silent(self) -> bool:
        """Whether ranks have run, and nothing was said of how they ended."""
        ranks = range(self.num_ranks)
        has_run = any(read_status(self.folder, rank) for rank in ranks)
        return has_run and not self.told and not self._is_reported

    @property
    def last_words(self) -> str:
        """What the ranks said as they left with a checkpoint; "" if one was ended."""
        if self.told or not self._is_reported:
            return ""
        return (self.folder / REPORTED).read_text(encoding="utf-8")

    @property
    def _is_reported(self) -> bool:
        return (self.folder / REPORTED).exists()


def _wait(
    process: subprocess.Popen[bytes],
    timeout: float | None,
    notes: _Notes,
    target: int,
) -> int:
    """Return mpirun's exit code; end it after a time, or if it hangs unsaid."""
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    looked = time.monotonic()
    while (now := time.monotonic()) < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(LOOK_SECONDS, deadline - now))
        is_awake = now - looked < 2 * LOOK_SECONDS  # else all may have been stopped
        looked = now
        if is_awake and (report := notes.of_hang(now)):
            (notes.folder / REPORTED).touch()
            _write(target, report)
            _end(process)
            return 1
    _end(process)
    return TIMED_OUT


def _end(process: subprocess.Popen[bytes]) -> None:
    _signal_group(process, signal.SIGTERM)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        _signal_group(process, signal.SIGKILL)
        process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@dataclass
class _Signals:
    """What shall end this process, and the mpirun that it is passed on to.

    What is `seen` before mpirun runs is passed on once it does.
    """

    folder: Path  # of the ranks' states
    seen: list[int] = field(default_factory=list)
    asked_at: float | None = None
    process: subprocess.Popen[bytes] | None = None
    killer: threading.Timer | None = None

    def pass_on_to(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        if self.seen:
            self._pass_on(self.seen[0])

    def catch(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number in STOPPING:
            if self.asked_at is None and self._ask(number):
                self.asked_at = now
                return
            if self.asked_at is not None and now - self.asked_at < ECHO_SECONDS:
                return
        self.seen.append(number)
        self._pass_on(number)

    def _ask(self, number: int) -> bool:
        """Ask the ranks to leave with a checkpoint; whether there are any.

        It ends those that cannot, and so the job.
        """
        states = read_states(self.folder).values()
        for state in states:
            with contextlib.suppress(ProcessLookupError):
                os.kill(state.pid, number)
        return bool(states)

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
def _forwarded_signals(folder: Path) -> Iterator[_Signals]:
    """Catch what shall end this process: only the main thread can."""
    signals = _Signals(folder)
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


def _copy(pipe: IO[bytes], target: int, tell: Tell) -> None:
    """Copy the ranks' stderr, less mpirun's paragraphs."""
    for text in in_our_words(iter(lambda: os.read(pipe.fileno(), 65536), b""), tell):
        _write(target, text)


def _write(target: int, data: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody reads any more: a terminal was closed
        while data:
            data = data[os.write(target, data) :]
