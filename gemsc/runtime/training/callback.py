"""What happens beside the steps of training: logs, checkpoints, users' hooks, ...

    on_load                              the program and its weights are loaded
    on_start                             and the checkpoint, if there is one
      on_step on_step on_step ...        after each step
      on_evaluation_start, on_evaluation where there is held-out data
      on_epoch                           the end of an epoch, or of the run within one
        on_save                          a checkpoint is complete
    on_end                               or on_failure, on the rank that fails

All ranks call all callbacks, in the same order and after the same step: a callback may
communicate, and what only one rank shall do asks for `trainer.transport.rank`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gemsc.runtime.training.trainer import StepReport, Trainer


class Callback:
    """Something that follows training; override what it needs."""

    def on_load(self, trainer: Trainer) -> None:
        """Called once, before a checkpoint is resumed from: make room for `tensors`."""

    def on_start(self, trainer: Trainer) -> None:
        """Called once before the first step."""

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        """Called after each step."""

    def on_evaluation_start(self, trainer: Trainer) -> None:
        """Called before the held-out samples are evaluated."""

    def on_evaluation(self, trainer: Trainer, figures: Mapping[str, float]) -> None:
        """Called with the means of loss and metrics over all held-out samples."""

    def on_epoch(
        self, trainer: Trainer, epoch: int, figures: Mapping[str, float]
    ) -> None:
        """Called once an epoch, counted from 0, has ended and was evaluated.

        `figures` are those of `on_evaluation`, none without held-out data.
        """

    def on_save(self, trainer: Trainer, folder: Path) -> None:
        """Called once a checkpoint is complete in its folder."""

    def on_end(self, trainer: Trainer) -> None:
        """Called after the last step."""

    def on_failure(self, trainer: Trainer, error: BaseException) -> None:
        """Called on a rank that fails, before it ends the others: do not wait."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint shall hold of it, as JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave."""

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Return tensors of this rank that a checkpoint shall hold, and gives back.

        By kind, then by the name of the parameter whose shape each has on this rank:
        `{"average": {"conv.weight": tensor, ...}}`. Resuming copies into them.
        """
        return {}
