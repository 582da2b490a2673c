"""Ema: an average of the weights, in which older ones count less and less.

    average = decay * average + (1 - decay) * weights        after each update

It is torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn, on each rank for
what it holds. An evaluation sees the averages; buffers are those of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gemsc.runtime.checkpoint.holdings import EMA_KEY
from gemsc.runtime.training.callback import Callback
from gemsc.runtime.training.trainer import StepReport, Trainer


class Ema(Callback):
    """Averages the weights; `average` has this rank's, by name."""

    def __init__(self, decay: float) -> None:
        """Let the weights of an update count `1 - decay`, those before it less."""
        self.decay = decay
        self.average: dict[str, Tensor] = {}
        self.count = 0  # of the updates in the average
        self._weights: dict[str, Tensor] = {}
        self._seen = 0  # updates

    def on_load(self, trainer: Trainer) -> None:
        """Make room for the averages."""
        named = trainer.stages.parameters.items()
        self._weights = {n: p for n, p in named if p.is_floating_point()}
        self.average = {n: p.detach().clone() for n, p in self._weights.items()}

    def on_start(self, trainer: Trainer) -> None:
        """Begin with the weights, unless a checkpoint had averages."""
        self._seen = trainer.worker.updates.count
        if not self.count:
            self._copy()

    @torch.no_grad()
    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        """Add the weights if they are new."""
        if self._seen == trainer.worker.updates.count:
            return
        self._seen = trainer.worker.updates.count
        if not self.count:
            self._copy()
        else:
            for name, average in self.average.items():
                average.lerp_(self._weights[name], 1.0 - self.decay)
        self.count += 1

    def on_evaluation_start(self, trainer: Trainer) -> None:
        """Let the evaluation see the averages."""
        self.swap()

    def on_evaluation(self, trainer: Trainer, figures: Mapping[str, float]) -> None:
        """Train on with the weights."""
        self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange weights and averages."""
        for name, average in self.average.items():
            weights = self._weights[name]
            kept = weights.clone()
            weights.copy_(average)
            average.copy_(kept)

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the averages: a checkpoint holds them as it holds the weights."""
        return {EMA_KEY.rstrip("/"): self.average}

    def state_dict(self) -> dict[str, Any]:
        """Return how many updates are in the averages."""
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the averages of a checkpoint."""
        self.count = state["count"]

    @torch.no_grad()
    def _copy(self) -> None:
        for name, average in self.average.items():
            average.copy_(self._weights[name])
