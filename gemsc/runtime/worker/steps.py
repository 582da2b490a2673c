"""The steps of a rank, one at a time: its part of the batch, losses and results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gemsc.runtime.data.batch import BatchShape
from gemsc.runtime.data.tiled import Window
from gemsc.runtime.transport.streams import Streams
from gemsc.runtime.worker.program import RankPlace, RankProgram


class Steps:
    """What a rank has of the step of the moment, and how many steps are done.

    Of the micro-batches of all replicas, the first `count` count in this step; the
    others only fill up the batch, and leave no trace.
    `results` has (loss, output) of each micro-batch of an evaluation. `losses` are
    those of this rank by micro-batch, counted over all replicas.
    """

    def __init__(
        self,
        program: RankProgram,
        place: RankPlace,
        *,
        accumulate: int = 1,
        float_dtype: torch.dtype | None = None,
    ) -> None:
        """Prepare for steps of which every `accumulate`-th ends with an update."""
        self.done = 0
        self.is_training = True
        self.results: list[tuple[Tensor | None, Any]] = []
        self.num_micro_batches = program.copy_micro_batches * place.num_copies
        self.count = self.num_micro_batches
        self.accumulate = accumulate
        self._tile, self._num_tiles = program.tile, program.num_tiles
        self._shape = BatchShape(
            program.inputs,
            program.copy_micro_batches,
            place.num_copies,
            place.copy,
            float_dtype,
        )
        self._batch: dict[str, Tensor] = {}
        self.losses: dict[int, Tensor] = {}
        self.total = 0.0  # of the losses of all ranks

    def bind(
        self, sources: Mapping[str, Any], window: Window | None = None
    ) -> dict[str, Tensor]:
        """Return what this rank takes of a batch (see `BatchShape.bind`)."""
        return self._shape.bind(sources, window)

    def begin(
        self, batch: dict[str, Tensor], *, training: bool, count: int | None = None
    ) -> None:
        """Take the batch of a step (see `bind`); all of it counts without a `count`."""
        self.count = self.num_micro_batches if count is None else count
        self.is_training = training
        self.results.clear()
        self.losses.clear()
        self._batch = batch

    def end(self) -> None:
        """Let go of the batch; count the step if it was one of training."""
        self._batch = {}
        if self.is_training:
            self.done += 1

    @property
    def is_update(self) -> bool:
        """Whether this step ends with an update."""
        return (self.done + 1) % self.accumulate == 0

    def input(self, name: str, m: int, streams: Streams) -> Tensor:
        """Return what micro-batch m has of a tensor of the batch, on the device."""
        tensor = streams.upload(self._shape.part(self._batch, name, m))
        if not self._shape.inputs[name].batched:  # the same for all, and there once
            self._batch[name] = tensor
        return tensor

    def add_loss(self, loss: Tensor, number: int | None = None) -> None:
        """Book the loss of a micro-batch; without a number it is the next one."""
        self.losses[len(self.losses) if number is None else number] = loss.detach()

    def add_result(self, loss: Tensor | None, output: Any) -> None:
        """Keep what the model returned for a micro-batch; a grid's first tile does."""
        if self._tile == 0:
            self.results.append((loss, output))

    def loss_sum(self) -> Tensor:
        """Return the sum of this step's losses on this rank, as a float64 scalar.

        All tiles of a grid have the same losses: they are those of its first one.
        """
        losses = [loss for m, loss in self.losses.items() if m < self.count]
        if not losses or self._tile > 0:
            return torch.zeros((), dtype=torch.float64)
        return torch.stack(losses).sum(dtype=torch.float64).cpu()

    def loss_gradient(self) -> Tensor:
        """Return what each micro-batch's loss weighs here in the mean over the batch.

        Each tile has the whole loss; their gradients add up.
        """
        count = self.count * self.accumulate * self._num_tiles
        return torch.full_like(next(iter(self.losses.values())), 1.0 / count)
