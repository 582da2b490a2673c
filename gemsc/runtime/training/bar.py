"""The progress of a run on the terminal, an epoch at a time."""

from __future__ import annotations

from gemsc.runtime.process.progress import ProgressBar
from gemsc.runtime.training.callback import Callback
from gemsc.runtime.training.trainer import StepReport, Trainer


class Bar(Callback):
    """Shows the loss, samples per second and the time of a step."""

    def __init__(self, total: int, each: int) -> None:
        """Prepare for `total` steps, `each` of them in an epoch."""
        self.total = total
        self.each = each
        self._bar: ProgressBar | None = None

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        """Count the step; an epoch's first and last one begin and end a bar."""
        epoch, number = divmod(report.step - 1, self.each)
        if self._bar is None:
            size = min(self.each, self.total - epoch * self.each) - number
            title = f"epoch {epoch + 1}/{-(-self.total // self.each)}"
            self._bar = ProgressBar(size, title, started=report.seconds)
        self._bar.step(report.loss, report.samples)
        if number + 1 == self.each or report.step == self.total:
            self._close()

    def on_end(self, trainer: Trainer) -> None:
        """Leave the last state on the screen."""
        self._close()

    def on_failure(self, trainer: Trainer, error: BaseException) -> None:
        """Leave the last state on the screen, above the report."""
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
