"""Where a run is among its samples, whatever size its batches have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gemsc.errors import GemscError
from gemsc.runtime.data.batches import Batches
from gemsc.runtime.training.callback import Callback
from gemsc.runtime.training.trainer import Trainer


class Position(Callback):
    """Lets a run that goes on with batches of another size go on at the same sample.

    Its steps are then counted as if all batches had had the size that they have now.
    """

    def __init__(self, trainer: Trainer, batches: Batches) -> None:
        self.trainer = trainer
        self.batches = batches

    def state_dict(self) -> dict[str, Any]:
        """Return epoch and sample, of how many."""
        epoch, first = divmod(self.trainer.step_number, len(self.batches))
        size = self.batches.size
        return {
            "num_samples": self.batches.num_samples,
            "batch_size": size,
            "epoch": epoch,
            "sample": first * size,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the sample that comes next.

        Raises:
            GemscError: the dataset has another length.
        """
        batches, steps = self.batches, self.trainer.worker.steps
        if state["num_samples"] != batches.num_samples:
            raise GemscError(
                f"the checkpoint is of a run over {state['num_samples']} samples, "
                f"dataset() now has {batches.num_samples}",
                help="go on with the same data; or `gemsc export` the checkpoint and "
                "--resume from that file: a new run that starts from its weights",
            )
        first = min(state["sample"] // batches.size, len(batches))
        steps.done = state["epoch"] * len(batches) + first
