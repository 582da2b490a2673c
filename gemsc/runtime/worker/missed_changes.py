"""What forward changes without data, for the micro-batches that other replicas run.

One process runs all micro-batches, one after the other, and each forward goes on from
what the one before it has left: a count of calls, the vectors of a spectral norm. A
stage of which there are several replicas makes these changes itself for the
micro-batches of the others (see gemsc.ir.changes): for those before its own before its
first forward of a step, for those behind at the step's end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import nn

from gemsc.base.dtypes import Autocast, autocasting
from gemsc.runtime.worker.program import Run
from gemsc.runtime.worker.stages import Stages
from gemsc.runtime.worker.steps import Steps


class MissedChanges:
    """Those of one step, of training or evaluation."""

    def __init__(self, stages: Stages, steps: Steps, autocast: Autocast | None) -> None:
        training = steps.is_training
        pairs = {run: _advance(stage, training) for run, stage in stages.items()}
        self._advances = {run: make for run, make in pairs.items() if make is not None}
        self._count, self._autocast = steps.count, autocast
        self._seen: Counter[Run] = Counter()  # micro-batches of which a stage knows

    def before(self, run: Run, number: int) -> None:
        """Make the changes of those before a micro-batch, which the stage runs next."""
        self._make(run, min(number, self._count))
        self._seen[run] = number + 1

    def finish(self, whole: Callable[[], AbstractContextManager[None]]) -> None:
        """Make the changes of those that are left, while all weights are `whole`."""
        if self._advances:
            with whole():
                for run in self._advances:
                    self._make(run, self._count)
            self._advances = {}

    def _make(self, run: Run, until: int) -> None:
        if run not in self._advances:
            return
        with torch.no_grad(), autocasting(self._autocast):
            for _ in range(self._seen[run], until):
                self._advances[run]()
        self._seen[run] = until


def _advance(stage: nn.Module, training: bool) -> Callable[[], None] | None:
    """Return the stage's method that makes the changes of one micro-batch, if any."""
    apart = not training and hasattr(stage, "forward_eval")
    advance: Callable[[], None] | None = getattr(
        stage, "advance_state_eval" if apart else "advance_state", None
    )
    return advance
