"""The hooks of the user's file: `on_step` and `on_epoch`, plain functions."""

from __future__ import annotations

from collections.abc import Mapping

from gemsc.runtime.training.callback import Callback
from gemsc.runtime.training.trainer import StepReport, Trainer
from gemsc.user_model import UserModel


class Hooks(Callback):
    """Calls what the user's file defines, on every rank."""

    def __init__(self, user: UserModel) -> None:
        self.user = user

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        """Call the user's `on_step(trainer, report)`."""
        self.user.call("on_step", trainer, report)

    def on_epoch(
        self, trainer: Trainer, epoch: int, figures: Mapping[str, float]
    ) -> None:
        """Call the user's `on_epoch(trainer, epoch, figures)`."""
        self.user.call("on_epoch", trainer, epoch, figures)
