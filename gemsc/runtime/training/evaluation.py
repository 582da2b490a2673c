"""Evaluation on held-out data: means of the loss and of the user's metrics."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gemsc.base.dtypes import cast
from gemsc.runtime.data.shared import SharedData
from gemsc.runtime.training.run_record import RunRecord
from gemsc.runtime.training.trainer import Trainer
from gemsc.user_model import UserModel

__all__ = ["Evaluator"]

Sums = dict[str, float]


@dataclass
class Evaluator:
    """Runs all samples of a dataset in evaluation mode."""

    trainer: Trainer
    user: UserModel
    data: SharedData
    record: RunRecord

    def __post_init__(self) -> None:
        self.loss = self.user.make_loss()
        if isinstance(self.loss, torch.nn.Module) and self.loss.state_dict():
            self.loss = None  # it is trained: only the ranks that do know its weights

    def run(self) -> dict[str, float]:
        """Return the means over all samples, the same on every rank."""
        total: Sums = defaultdict(float)
        count: Sums = defaultdict(float)
        transport = self.trainer.transport
        everyone: list[Any] = transport.all_gather_object(self._sums())
        for sums, counts in everyone:
            for name, value in sums.items():
                total[name] += value
                count[name] += counts[name]
        means = {name: value / count[name] for name, value in total.items()}
        self.record.add_figures({n: (m, int(count[n])) for n, m in means.items()})
        return means

    def _sums(self) -> tuple[Sums, Sums]:
        """Return sums over samples of loss and metrics on this rank, and their number.

        The ranks compute the loss of full batches. What is left at the end is filled
        up; its loss is that of the whole outputs, without the samples that fill it.
        """
        batches, talks = self.data.batches, self.trainer.transport.rank == 0
        window, size = batches.window, batches.size
        sums: Sums = defaultdict(float)
        counts: Sums = defaultdict(float)
        for batch, seen in self.trainer.worker.status.while_reading(self.data.epoch(0)):
            self.record.add_evaluated(seen)
            input, target = batch.data
            with self.record.draws():
                result = self.trainer.evaluate(input, target, window=window)
            if result.loss is not None and batch.is_full and talks:
                sums["loss"] += result.loss * size
                counts["loss"] += size
            if result.output is None or not batch.real:
                continue
            if window is not None and not window.is_whole:
                continue  # the target is not here as a whole
            if (dtype := self.trainer.worker.float_dtype) is not None:
                target = cast(target, dtype)  # as in training
            cut = [_first(value, batch.real) for value in (result.output, target)]
            found = dict(self.user.metrics(*cut)) if self.user.metrics else {}
            if not batch.is_full and self.loss is not None:
                with torch.no_grad():
                    found["loss"] = self.loss(*cut)
            for name, value in found.items():
                sums[name] += float(value) * batch.real
                counts[name] += batch.real
        return dict(sums), dict(counts)


def _first(value: Any, count: int) -> Any:
    """Return the first `count` samples of every tensor in a structure."""

    def first(leaf: Any) -> Any:
        return leaf[:count] if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf

    return pytree.tree_map(first, value)
