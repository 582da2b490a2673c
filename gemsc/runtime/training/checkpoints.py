"""When checkpoints are saved: each epoch, every so many steps or minutes, or never.

At the end of an epoch it is done after the evaluation, so that a checkpoint holds what
that has found; then also if it is the best one so far. The run ends with one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from gemsc.runtime.training.best import Best
from gemsc.runtime.training.callback import Callback
from gemsc.runtime.training.trainer import StepReport, Trainer


class Checkpoints(Callback):
    """Saves into a folder, and keeps the newest `keep` checkpoints and the best one.

    `every` is a number of steps, seconds as a float, or "epoch". An epoch has `each`
    steps, the run `total`. It comes after the callbacks whose state it saves.
    """

    def __init__(
        self,
        folder: Path,
        *,
        each: int,
        total: int,
        every: int | float | str = "epoch",
        keep: int = 3,
        best: Best | None = None,
        background: bool = False,
    ) -> None:
        self.folder = folder
        self.each, self.total = each, total
        self.every = every
        self.keep = keep
        self.best = best
        self.background = background
        self._step = -1  # that was saved last
        self._due = 0.0  # by the clock of the first rank

    def on_start(self, trainer: Trainer) -> None:
        """Start the clock."""
        self._step = trainer.step_number
        self._start_clock()

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        """Save if it is time; at the end of an epoch, that waits for the evaluation."""
        if self._is_time(trainer, report.step) and not self._ends(trainer):
            self.save(trainer)

    def on_epoch(
        self, trainer: Trainer, epoch: int, figures: Mapping[str, float]
    ) -> None:
        """Save if it is time, or if the evaluation was the best one."""
        is_best = self.best is not None and self.best.is_new
        is_time = self.every == "epoch" or self._is_time(trainer, trainer.step_number)
        if is_time or is_best:
            self.save(trainer, is_best=is_best)

    def save(self, trainer: Trainer, *, is_best: bool = False) -> None:
        """Save now, unless that is done."""
        if self._step == trainer.step_number:
            return
        self._step = trainer.step_number
        trainer.requests.done("save")
        trainer.save(
            self.folder, keep=self.keep, best=is_best, background=self.background
        )
        self._start_clock()

    def _is_time(self, trainer: Trainer, step: int) -> bool:
        if isinstance(self.every, int):
            return step % self.every == 0
        asks = isinstance(self.every, float) and trainer.transport.rank == 0
        if asks and time.monotonic() >= self._due:
            trainer.requests.ask("save")
        return trainer.requests.agreed("save")

    def _ends(self, trainer: Trainer) -> bool:
        step = trainer.step_number
        return step % self.each == 0 or step == self.total or trainer.is_stopping

    def _start_clock(self) -> None:
        if isinstance(self.every, float):
            self._due = time.monotonic() + self.every
