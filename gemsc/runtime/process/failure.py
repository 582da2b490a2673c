"""When something goes wrong on a rank: one clear report, and all ranks stop."""

from __future__ import annotations

import atexit
import os
import re
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from gemsc.errors import GemscError, SourceLocation, is_users, user_place
from gemsc.runtime.process.breakpoints import Breakpoints
from gemsc.runtime.process.status import REPORTED, STATUS_VARIABLE, Status
from gemsc.runtime.process.stop import STOPPED, StopSignal

if TYPE_CHECKING:
    from gemsc.runtime.transport.choose import JobTransport
    from gemsc.runtime.transport.transport import Transport

REPORT_SECONDS = 2.0  # for the first rank that fails, before another one ends it
RANK_FILE = re.compile(r"rank\d+\.py")

LOCATION = re.compile(r"^\s*# (\S+\.py:\d+(?: in \S+)?)  (.*)$")


def describe_failure(error: BaseException, rank: int, status: Status | None) -> str:
    """Return the report: rank, stage, micro-batch, the user's line, the traceback."""
    doing = f" in {status}" if status is not None else ""
    if isinstance(error, GemscError):
        error.at = error.at or user_place(error.__traceback__)
        return f"{error}\nnote: on rank {rank}{doing}"
    lines = [f"error: rank {rank} failed{doing}"]
    lines += _user_lines(error.__traceback__)
    lines.append("".join(traceback.format_exception(error)).rstrip())
    return "\n".join(lines)


def _user_lines(trace: TracebackType | None) -> list[str]:
    """Return the innermost line of the user's, and the generated line that ran it.

    A generated file names the user's line above its own.
    """
    innermost: list[str] = []
    generated: list[str] = []
    for frame in traceback.extract_tb(trace):
        path, number = Path(frame.filename), frame.lineno or 0
        if RANK_FILE.fullmatch(path.name):
            innermost, generated = [], generated_lines(path, number)
        elif is_users(path):
            innermost = [f"{SourceLocation(frame.filename, number)}: {frame.line}"]
    return innermost + [line for line in generated if line not in innermost]


def line_of(frames: traceback.StackSummary) -> str:
    """Return the innermost line of a stack that is the user's or a rank file's."""
    for frame in reversed(frames):
        path = Path(frame.filename)
        if RANK_FILE.fullmatch(path.name) or is_users(path):
            at = SourceLocation(frame.filename, frame.lineno or 0)
            return f"{at} in {frame.name}: {frame.line}"
    return ""


def generated_lines(path: Path, number: int) -> list[str]:
    """Return what a generated file says about one of its lines.

    In backward the line runs a whole stage: then that is the user's first and last line
    on that rank.
    """
    if not (source := _source(path)):
        return []
    for line in reversed(source[: number - 1]):
        match = LOCATION.match(line)
        if match:
            return [f"{match[1]}: {match[2]}", f"generated: {path}:{number}"]
        if line.startswith(("class ", "def ")):
            break
    return [*computed_lines(path), f"generated: {path}:{number}"]


def computed_lines(path: Path) -> list[str]:
    """Return one line that says which of the user's lines a rank's file computes."""
    named = [match[1] for match in map(LOCATION.match, _source(path)) if match]
    if not named:
        return []
    return ["this rank computes " + " to ".join(dict.fromkeys((named[0], named[-1])))]


def _source(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def stop_all(error: BaseException, transport: Transport) -> NoReturn:
    """Print the report, unless another rank was first, and end every rank."""
    stop = StopSignal.current
    if stop is not None and stop.number == signal.SIGTERM:
        time.sleep(REPORT_SECONDS)  # what ends a failed job sends it, then kills
    text = describe_failure(error, transport.rank, Status.current)
    if isinstance(error, KeyboardInterrupt):
        text = "interrupted"
    end_job(text, transport)


def end_job(text: str, transport: Transport, code: int = 1) -> NoReturn:
    """Print the report, unless another rank was first, and end every rank."""
    if is_first(REPORTED):
        sys.stderr.write(f"{text}\n")  # at once: mpirun's own words may come next
        sys.stderr.flush()
    else:  # leave it the time to
        time.sleep(REPORT_SECONDS)
    transport.abort(code)


def is_first(what: str, text: str = "") -> bool:
    """Whether no other rank has asked for this, as far as the status folder can say.

    `gemsc run` finds the text there.
    """
    try:
        if folder := os.environ.get(STATUS_VARIABLE):
            with (Path(folder) / what).open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:  # another one: better two reports than none
        return not isinstance(error, FileExistsError)
    return True


def watch_exit(transport: JobTransport) -> None:
    """Let `sys.exit` with an error end all ranks, as an exception does.

    No hook sees a SystemExit, so its code is noted on the way out. At the end MPI would
    wait for ranks that wait for this one: they are told, however it leaves.
    """
    exit_ = sys.exit
    codes: list[Any] = []

    def noting_exit(code: Any = None) -> NoReturn:
        codes[:] = [code]
        exit_(code)

    def at_end() -> None:
        if codes and codes[0] not in (None, 0, STOPPED):
            rank = transport.rank
            end_job(f"error: rank {rank} left with sys.exit({codes[0]!r})", transport)
        StopSignal.ignore()
        transport.leave()

    sys.exit = noting_exit
    atexit.register(at_end)


def install_hooks(transport: Transport) -> None:
    """Make an uncaught exception in a thread or in the user's own loop stop all ranks.

    Without this, the other ranks wait for ever for a rank that has left. `breakpoint()`
    waits for a terminal from then on.
    """

    def in_main(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        stop_all(error.with_traceback(trace), transport)

    def in_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            stop_all(args.exc_value, transport)

    Breakpoints.install(transport.rank)
    sys.excepthook = in_main
    threading.excepthook = in_thread
