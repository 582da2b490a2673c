"""Evaluation on held-out data: the loss and the user's metrics, of all samples.

Each copy of the model evaluates its part of a batch. The parts are brought together on
one rank, which scores the batch as one process would.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gemsc.base.dtypes import cast
from gemsc.errors import GemscError
from gemsc.runtime.data.metrics import Metrics, first_samples, is_texts
from gemsc.runtime.data.shared import SharedData
from gemsc.runtime.training.run_record import RunRecord
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.transport.transport import LARGEST_TAG, Transport
from gemsc.user_model import UserModel

__all__ = ["Evaluator"]


@dataclass
class Evaluator:
    """Runs all samples of a dataset in evaluation mode."""

    trainer: Trainer
    user: UserModel
    data: SharedData
    record: RunRecord

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.user.make_metrics(), self.user.line_of("metrics"))
        self.loss = self.user.make_loss()
        if isinstance(self.loss, torch.nn.Module) and self.loss.state_dict():
            self.loss = None  # it is trained: only the ranks that do know its weights
        self._holders: list[int] = []  # of outputs: a rank of each copy

    def run(self) -> dict[str, float]:
        """Return the figures of all samples, the same on every rank."""
        mean_loss = Metrics(lambda loss, _: {"loss": loss})
        self.metrics.reset()
        batches, status = self.data.batches, self.trainer.worker.status
        source = status.while_reading(self.data.epoch(0))
        for number, (batch, seen) in enumerate(source):
            self.record.add_evaluated(seen)
            input, target = batch.data
            with self.record.draws():
                result = self.trainer.evaluate(input, target, window=batches.window)
            self._find_holders(result.output)
            # The ranks compute the loss of full batches. What is left at the end is
            # filled up; its loss is that of the outputs without what fills it.
            is_full, count = batch.is_full, batches.count(number)
            if is_full and result.loss is not None:
                mean_loss.add(result.loss, None, count)
            if self.metrics.is_empty and (is_full or self.loss is None):
                continue
            status.enter("metrics")
            scored = self._together(result.output, batch.targets)
            if scored is None:
                continue
            output, target = (first_samples(value, count) for value in scored)
            self.metrics.add(output, target, count)
            if not is_full and self.loss is not None:
                with torch.no_grad():
                    mean_loss.add(self.loss(output, target), None, count)
        status.enter("metrics")
        own = self.metrics.figures()
        if "loss" in own:
            raise GemscError(
                "metrics gives a figure called 'loss', as the held-out loss is",
                at=self.user.line_of("metrics"),
                help="give it another name",
            )
        transport, scorer = self.trainer.transport, self._holders[0]
        found: Any = transport.broadcast_object(mean_loss.figures() | own, scorer)
        status.idle()
        self.record.add_figures(found)
        return {name: value for name, (value, _) in found.items()}

    def _find_holders(self, output: Any) -> None:
        """Note who has outputs, once; the others need no whole targets from then on."""
        if self._holders:
            return
        transport = self.trainer.transport
        has_output = transport.all_gather_object(output is not None)
        self._holders = [rank for rank, has in enumerate(has_output) if has]
        if output is None:
            self.data.batches.whole_targets = "none"

    def _together(self, output: Any, target: Any) -> tuple[Any, Any] | None:
        """Return the whole batch's on the rank that scores it, None elsewhere."""
        ranks, transport = self._holders, self.trainer.transport
        if transport.rank not in ranks:
            return None
        if (dtype := self.trainer.worker.float_dtype) is not None:
            target = cast(target, dtype)  # as in training
        if transport.rank != ranks[0]:
            _send(transport, (output, target), ranks[0])
            return None
        parts = [(output, target), *(_receive(transport, rank) for rank in ranks[1:])]
        joined: tuple[Any, Any] = pytree.tree_map(_join, *parts, is_leaf=is_texts)
        return joined


def _join(*leaves: Any) -> Any:
    if isinstance(leaves[0], Tensor):
        return torch.cat(leaves)
    is_list = is_texts(leaves[0])
    return [text for texts in leaves for text in texts] if is_list else leaves[0]


def _send(transport: Transport, value: Any, dest: int) -> None:
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    for tensor in (torch.tensor([data.numel()]), data):
        transport.wait(transport.send(tensor, dest, LARGEST_TAG))


def _receive(transport: Transport, source: int) -> Any:
    size = torch.zeros(1, dtype=torch.int64)
    transport.wait(transport.receive(size, source, LARGEST_TAG))
    data = torch.empty(int(size), dtype=torch.uint8)
    transport.wait(transport.receive(data, source, LARGEST_TAG))
    return pickle.loads(data.numpy().data)  # of a rank of this job
