"""What people who wait see of a run."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from gemsc.base.process import is_started_by_mpirun

BAR_VARIABLE = "GEMSC_PROGRESS_BAR"


class ProgressBar:
    """Loss, samples per second and step time: a bar on a terminal, else plain lines."""

    def __init__(
        self, total: int | None, title: str, *, before: int = 0, started: float = 0.0
    ) -> None:
        """Prepare for `total` steps; the next one began `started` seconds ago.

        Those `before` it were done when a run was resumed. Where nobody knows how many
        there will be, the last one is shown on `close`.
        """
        self.total = total
        self.title = title
        self._start = time.perf_counter() - started
        self._last_line = self._start
        self._before, self._done = before, before
        self._hidden = ""  # the last line, if it has not been shown
        self._bar: Progress | None = None
        if wants_bar(sys.stdout):
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[facts]}"),
                TimeRemainingColumn(),
                console=Console(
                    force_terminal=True, width=int(os.environ.get("COLUMNS", "100"))
                ),
            )
            self._bar.start()
            self._bar.add_task(title, total=total, completed=before, facts="")

    def step(self, loss: float | Mapping[str, float] | None, samples: int) -> None:
        """Count one step of `samples` samples, with a loss or several of them."""
        self._done += 1
        now = time.perf_counter()
        seconds = (now - self._start) / (self._done - self._before)
        losses = {"loss": loss} if isinstance(loss, float) else loss or {}
        shown = "".join(f"{name} {value:.4f}  " for name, value in losses.items())
        speed = samples / seconds
        digits = 1 if speed >= 1 else 3
        facts = f"{shown}{speed:.{digits}f} samples/s  {seconds * 1e3:.0f} ms/step"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], advance=1, facts=facts)
            return
        number = f"{self._done}" + ("" if self.total is None else f"/{self.total}")
        self._hidden = f"{self.title} {number}  {facts}"
        pause = max(2.0, (now - self._start) / 50)  # more of it the longer it goes on
        ends = self._before + 1, self.total
        if now - self._last_line > pause or self._done in ends:
            self._last_line = now
            self._print()

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._bar is not None:
            self._bar.stop()
        elif self.total is None and self._hidden:
            self._print()

    def _print(self) -> None:
        print(self._hidden, flush=True)  # noqa: T201
        self._hidden = ""


def wants_bar(stream: TextIO) -> bool:
    """Whether rank 0 draws a bar: if it, or the launcher, writes to a terminal.

    mpirun gives ranks a terminal of its own even where its output goes to a file.
    """
    if is_started_by_mpirun():
        return os.environ.get(BAR_VARIABLE) == "1"
    return stream.isatty()
