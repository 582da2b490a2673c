"""When something goes wrong on a rank: one clear report, and all ranks stop."""

from __future__ import annotations

import os
import re
import sys
import threading
import traceback
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from gemsc.errors import GemscError
from gemsc.runtime.progress import STATUS_VARIABLE, Status
from gemsc.runtime.transport import Transport

__all__ = ["describe_failure", "install_hooks", "named_locations", "stop_all"]

LOCATION = re.compile(r"^\s*# (\S+\.py:\d+(?: in \S+)?)  (.*)$")


def describe_failure(error: BaseException, rank: int, status: Status | None) -> str:
    """Return the report: rank, stage, micro-batch, the user's line, the traceback."""
    doing = f" in {status}" if status is not None else ""
    if isinstance(error, GemscError):
        return f"{error}\nnote: on rank {rank}{doing}"
    lines = [f"error: rank {rank} failed{doing}"]
    lines += _user_lines(error.__traceback__)
    lines.append("".join(traceback.format_exception(error)).rstrip())
    return "\n".join(lines)


def _user_lines(trace: TracebackType | None) -> list[str]:
    """Return the user's line that a generated file names above the failing one.

    In backward the failing line runs a whole stage: then the lines that the file names
    first and last for that rank.
    """
    place: tuple[Path, int] | None = None
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        if re.fullmatch(r"rank\d+\.py", path.name):
            place = path, trace.tb_lineno
        trace = trace.tb_next
    if place is None:
        return []
    path, number = place
    try:
        source = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for line in reversed(source[: number - 1]):
        found = LOCATION.match(line)
        if found:
            return [f"{found[1]}: {found[2]}", f"generated: {path}:{number}"]
        if line.startswith(("class ", "def ")):
            break
    named = named_locations(path)
    if not named:
        return [f"generated: {path}:{number}"]
    span = f"{named[0]} to {named[-1]}"
    return [f"this rank computes {span}", f"generated: {path}:{number}"]


def named_locations(path: Path) -> list[str]:
    """Return the user's lines that a rank's file names, in order."""
    try:
        source = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [found[1] for found in map(LOCATION.match, source) if found]


def stop_all(
    error: BaseException, transport: Transport, status: Status | None
) -> NoReturn:
    """Print the report, unless another rank was first, and end every rank."""
    if _is_first():
        text = describe_failure(error, transport.rank, status)
        print(text, file=sys.stderr, flush=True)  # noqa: T201
    transport.abort(1)


def _is_first() -> bool:
    """Whether no other rank has reported (known only under `gemsc run`)."""
    folder = os.environ.get(STATUS_VARIABLE)
    if not folder:
        return True
    try:
        os.close(os.open(Path(folder) / "reported", os.O_CREAT | os.O_EXCL))
    except OSError:
        return False
    return True


def install_hooks(transport: Transport, status: Status | None) -> None:
    """Make an uncaught exception in a thread or in the user's own loop stop all ranks.

    Without this, the other ranks wait for ever for a rank that has left.
    """

    def in_main(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        stop_all(error.with_traceback(trace), transport, status)

    def in_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            stop_all(args.exc_value, transport, status)

    sys.excepthook = in_main
    threading.excepthook = in_thread
