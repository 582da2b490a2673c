"""The best evaluation so far: its checkpoint, patience, rates that fall on plateaus.

--best loss        the smallest loss over held-out data: so it is without the option
--best dice:max    the largest of a figure that `metrics` returns
--patience 5       stop once 5 evaluations in turn have brought nothing better
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from gemsc.errors import GemscError, SourceLocation
from gemsc.runtime.training.callback import Callback
from gemsc.runtime.training.trainer import StepReport, Trainer


class Best(Callback):
    """Follows one figure of the evaluations, and shows it to ReduceLROnPlateau.

    `value` is the best one, of step `step`; `since` counts the evaluations after it.
    """

    def __init__(self, rule: str | None = None, patience: int | None = None) -> None:
        """Follow `NAME`, `NAME:min` or `NAME:max`; stop after so many evaluations."""
        self.name, _, kind = (rule or "loss").partition(":")
        self.is_larger_better = kind == "max"
        self.is_asked_for = rule is not None or patience is not None
        self.patience = patience
        self.value: float | None = None
        self.step = self.since = 0
        self.is_new = False  # the last evaluation is the best
        self._problem: GemscError | None = None

    def check(self, names: Iterable[str], at: SourceLocation | None) -> None:
        """Make sure that the figure is one of those whose names begin so.

        Raises:
            GemscError: it is none of them.
        """
        names = ["loss", *names]
        if not any(f"{self.name}_".startswith(f"{name}_") for name in names):
            raise GemscError(
                f"--best {self.name}: an evaluation gives {', '.join(names)}",
                at=at,
                help="name one of them, or return it from metrics()",
            )

    def on_start(self, trainer: Trainer) -> None:
        """Refuse to go on where patience has ended already."""
        if self.patience is not None and self.since >= self.patience:
            raise GemscError(
                f"{self._reason}: --patience {self.patience} has ended this run",
                help="go on with a larger --patience, or without",
            )

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        """Say what is wrong, now that the epoch's checkpoint is saved."""
        self._check()

    def on_end(self, trainer: Trainer) -> None:
        """Say what is wrong, now that the last checkpoint is saved."""
        self._check()

    def on_evaluation(self, trainer: Trainer, figures: Mapping[str, float]) -> None:
        """Compare the figure with the best one."""
        self.is_new = False
        if self.name not in figures:
            if self.is_asked_for:
                self._problem = GemscError(
                    f"--best {self.name}: an evaluation gives {', '.join(figures)}",
                    help="name one of them, or return it from metrics(); the "
                    "checkpoints are complete: go on with --resume",
                )
            return
        if isinstance(trainer.scheduler, ReduceLROnPlateau):
            trainer.scheduler.step(figures[self.name])
        value, best = figures[self.name], self.value
        if self.is_larger_better:
            self.is_new = value == value if best is None else value > best
        else:
            self.is_new = value == value if best is None else value < best
        self.since = 0 if self.is_new else self.since + 1
        if self.is_new:
            self.value, self.step = value, trainer.step_number
        if self.patience is not None and self.since >= self.patience:
            trainer.stop(self._reason)

    def state_dict(self) -> dict[str, Any]:
        """Return the best figure, and how long ago it was."""
        return {
            "name": self.name,
            "value": self.value,
            "step": self.step,
            "since": self.since,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what was the best, if it is the same figure."""
        if state["name"] == self.name:
            self.value, self.step = state["value"], state["step"]
            self.since = state["since"]

    @property
    def _reason(self) -> str:
        evaluations = "evaluation" if self.since == 1 else f"{self.since} evaluations"
        if self.value is None:
            return f"{self.name} was no number in the last {evaluations}"
        return (
            f"{self.name} was not better than {self.value:.6g}, of step {self.step}, "
            f"in the last {evaluations}"
        )

    def _check(self) -> None:
        if self._problem is not None:
            raise self._problem
