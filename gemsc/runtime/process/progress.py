"""What a rank is doing: for the report of a failure, and for people who wait."""

from __future__ import annotations

import mmap
import os
import sys
import time
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from gemsc.base.process import is_started_by_mpirun

__all__ = ["REPORTED", "STATUS_VARIABLE", "ProgressBar", "Status", "read_status"]

STATUS_VARIABLE = "GEMSC_STATUS_FOLDER"
REPORTED = "reported"  # file in that folder: a rank has said why all end
BAR_VARIABLE = "GEMSC_PROGRESS_BAR"
STATUS_BYTES = 256


class Status:
    """The action of the moment, in memory that outlives a killed process.

    If the launcher named a folder, the text is kept in a mapped file there: writing it
    costs a memory copy, and `gemsc run` can read what a killed rank was doing.
    """

    current: Status | None = None  # the one of this process, for its last report

    def __init__(self, rank: int | None = None) -> None:
        Status.current = self
        self.step = 0
        self.what = "the start"
        self.stage: object = ""
        self.micro_batch: int | None = None
        self._memory: mmap.mmap | None = None
        folder = os.environ.get(STATUS_VARIABLE)
        if folder and rank is not None and Path(folder).is_dir():  # on this host
            path = Path(folder) / f"rank{rank}"
            path.write_bytes(bytes(STATUS_BYTES))
            with path.open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), STATUS_BYTES)
            self._publish()

    def enter(
        self, what: str, stage: object = "", micro_batch: int | None = None
    ) -> None:
        """Say what begins."""
        self.what, self.stage, self.micro_batch = what, stage, micro_batch
        self._publish()

    def idle(self) -> None:
        """Say that a step has ended."""
        self.enter("between two steps")

    def __str__(self) -> str:
        """Return for example `backward of stage 2, micro-batch 3, step 17`."""
        text = self.what
        if self.stage:
            text += f" of {self.stage}"
        if self.micro_batch is not None:
            text += f", micro-batch {self.micro_batch}"
        return f"{text}, step {self.step}"

    def _publish(self) -> None:
        if self._memory is not None:
            text = str(self).encode()[: STATUS_BYTES - 1]
            self._memory[: len(text) + 1] = text + b"\0"


def read_status(folder: Path, rank: int) -> str | None:
    """Return what a rank was doing when it last said so."""
    try:
        data = (folder / f"rank{rank}").read_bytes()
    except OSError:
        return None
    return data.split(b"\0", 1)[0].decode(errors="replace") or None


class ProgressBar:
    """Loss, samples per second and step time: a bar on a terminal, else plain lines."""

    def __init__(self, total: int, title: str, *, started: float = 0.0) -> None:
        """Prepare for `total` steps; the first one began `started` seconds ago."""
        self.total = total
        self.title = title
        self._start = time.perf_counter() - started
        self._last_line = self._start
        self._done = 0
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if wants_bar(sys.stdout):
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[facts]}"),
                TimeRemainingColumn(),
                console=Console(force_terminal=True, width=_width()),
            )
            self._bar.start()
            self._task = self._bar.add_task(title, total=total, facts="")

    def step(self, loss: float | None, samples: int) -> None:
        """Count one step of `samples` samples."""
        self._done += 1
        now = time.perf_counter()
        seconds = (now - self._start) / self._done
        shown = "" if loss is None else f"loss {loss:.4f}  "
        facts = f"{shown}{samples / seconds:.1f} samples/s  {seconds * 1e3:.0f} ms/step"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=1, facts=facts)
        elif now - self._last_line > 2 or self._done in (1, self.total):
            self._last_line = now
            print(f"{self.title} {self._done}/{self.total}  {facts}", flush=True)  # noqa: T201

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._bar is not None:
            self._bar.stop()


def wants_bar(stream: TextIO) -> bool:
    """Whether rank 0 draws a bar: if it, or the launcher, writes to a terminal.

    mpirun gives ranks a terminal of its own even where its output goes to a file.
    """
    if is_started_by_mpirun():
        return os.environ.get(BAR_VARIABLE) == "1"
    return stream.isatty()


def _width() -> int:
    return int(os.environ.get("COLUMNS", "100"))
