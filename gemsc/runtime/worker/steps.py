"""The steps of a rank, one at a time: its part of the batch, losses, results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gemsc.base.dtypes import within
from gemsc.base.nests import Mean
from gemsc.base.units import show_micro_batches
from gemsc.errors import GemscError
from gemsc.messages.message import Input
from gemsc.runtime.data.tiled import Window
from gemsc.runtime.transport.streams import Streams
from gemsc.runtime.worker.program import RankPlace, RankProgram


class Steps:
    """What a rank has of the step of the moment, and how many steps are done.

    Of the micro-batches of all replicas, the first `count` count in this step; the
    others only fill up the batch, and leave no trace.
    `results` has (loss, output) of each micro-batch of an evaluation. `losses` are
    those of this rank by micro-batch, counted over all replicas; see `as_loss`.
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
        self.waiting = 0  # of them, since the last update
        self.evaluated = 0  # batches since then
        self.saved = 0  # the number that the last of them had in the checkpoint
        self.is_training = True
        self.results: list[tuple[Tensor | None, Any]] = []
        self.num_micro_batches = program.copy_micro_batches * place.num_copies
        self.count = self.num_micro_batches
        self.accumulate = accumulate
        self._tile, self._num_tiles = program.tile, program.num_tiles
        self._place, self._dtype = place, float_dtype
        self.shape = self.shape_of(program.inputs)
        self._batch: dict[str, Tensor] = {}
        self.losses: dict[int, Tensor] = {}
        self.mean = Mean()  # of the losses of all ranks

    def shape_of(self, inputs: Mapping[str, Input]) -> BatchShape:
        """Return the shape of batches that have these inputs."""
        place, count = self._place, self.num_micro_batches // self._place.num_copies
        return BatchShape(inputs, count, place.num_copies, place.copy, self._dtype)

    def begin(
        self, batch: dict[str, Tensor], *, training: bool, count: int | None = None
    ) -> None:
        """Take what `shape.bind` gives of a batch; all of it counts without `count`.

        Raises:
            BatchError: a batch has not so many micro-batches, or none counts.
            GemscError: the user's own loop has changed what operations do.
        """
        _check_modes(training=training)
        self.count = self.num_micro_batches if count is None else count
        if self.count not in range(1, self.num_micro_batches + 1):
            raise BatchError(
                f"micro_batches is {count}, and a batch has {self.num_micro_batches}",
                help="give the number of those that count, without what fills it up",
            )
        self.is_training = training
        self.results.clear()
        self.losses.clear()
        self._batch = batch

    def end(self, *, counts: bool = True) -> None:
        """Let go of the batch; count the step, or what is evaluated between two."""
        self._batch = {}
        if not self.is_training:
            self.evaluated += 1
        elif counts:
            self.waiting = 0 if self.is_update else self.waiting + 1
            self.done += 1
            self.evaluated = 0

    @property
    def is_update(self) -> bool:
        """Whether this step ends with an update."""
        return self.waiting + 1 == self.accumulate

    def input(self, name: str, m: int, streams: Streams) -> Tensor:
        """Return what micro-batch m has of a tensor of the batch, on the device."""
        tensor = streams.upload(self.shape.part(self._batch, name, m)).detach()
        if not self.shape.inputs[name].batched:  # the same for all, and there once
            self._batch[name] = tensor
        return tensor

    def add_loss(self, loss: Tensor, number: int | None = None) -> None:
        """Book the loss of a micro-batch; without a number it is the next one."""
        self.losses[len(self.losses) if number is None else number] = loss.detach()

    def add_result(self, loss: Tensor | None, output: Any) -> None:
        """Keep what the model returned for a micro-batch; a grid's first tile does."""
        if self._tile == 0:
            place, number = self._place, len(self.results)
            number += place.copy * self.num_micro_batches // place.num_copies
            if loss is not None:
                self.add_loss(loss, number)
            self.results.append((loss, output))

    def own_mean(self) -> Mean:
        """Return the mean of this step's losses on this rank.

        All tiles of a grid have the same losses: they are those of its first one.
        """
        losses = [loss for m, loss in self.losses.items() if m < self.count]
        mean = Mean()
        if losses and self._tile == 0:
            for loss in torch.stack(losses).double().cpu():
                mean.add(loss)
        return mean

    def loss_gradient(self) -> Tensor:
        """Return what each micro-batch's loss weighs here in the mean over the batch.

        Each tile has the whole loss; their gradients add up. A loss with a count weighs
        1: the gradients are divided once all ranks know the sum of the counts.
        """
        loss = next(iter(self.losses.values()))
        if loss.dim():
            return loss.new_tensor((1.0 / self._num_tiles, 0.0))
        count = self.count * self.accumulate * self._num_tiles
        return torch.full_like(loss, 1.0 / count)


def _check_modes(*, training: bool) -> None:
    if training and not torch.is_grad_enabled():
        raise GemscError(
            "trainer.step() is called where gradients are off",
            help="leave out torch.no_grad() or torch.inference_mode() around it",
        )
    if any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
        raise GemscError(
            f"trainer.{'step' if training else 'evaluate'}() is called within autocast",
            help="leave torch.autocast out of the loop, and compile with "
            '--precision bfloat16, or precision="bfloat16"',
        )


class BatchError(GemscError):
    """A batch that is not one of the program's: its structure, a shape or a dtype."""


@dataclass(frozen=True)
class BatchShape:
    """The tensors that a rank takes and how many micro-batches hold them.

    A batch has `micro_batches` for each of `num_copies` copies of the model; this rank
    belongs to the copy number `copy`.
    """

    inputs: Mapping[str, Input]
    micro_batches: int
    num_copies: int = 1
    copy: int = 0
    float_dtype: torch.dtype | None = None

    def bind(
        self, sources: Mapping[str, Any], window: Window | None = None
    ) -> dict[str, Tensor]:
        """Pick this rank's tensors out of a batch, check them and keep their boxes.

        `sources` holds "input" and "target" as the user gave them. They hold whole
        images, or the `window` of them.

        Raises:
            BatchError: a tensor is missing, or its shape or dtype does not fit.
        """
        return {
            name: self._check(item, _pick(sources, item), window)
            for name, item in self.inputs.items()
        }

    def part(self, batch: Mapping[str, Tensor], name: str, m: int) -> Tensor:
        """Return what micro-batch m has of a tensor of `bind`."""
        tensor, size = batch[name], self.inputs[name].shape
        if self.inputs[name].batched:
            tensor = tensor[m * size[0] : (m + 1) * size[0]]
        return tensor

    def _check(self, item: Input, tensor: Tensor, window: Window | None) -> Tensor:
        shape, count = item.shape, self.num_copies * self.micro_batches
        if window is not None:
            shape = window.shape_of(shape)
        whole, size = shape, 0
        if item.batched:
            whole = (count * shape[0], *shape[1:])
            size = self.micro_batches * shape[0]
        if tuple(tensor.shape) not in (whole, (size, *shape[1:])):
            parts = f": {show_micro_batches(count)} of {list(shape)}"
            is_short = tensor.shape[:1] < whole[:1] and tensor.shape[1:] == whole[1:]
            last = "; leave out a last batch that is smaller (drop_last=True), or fill "
            last += "it up and say what counts: trainer.step(..., micro_batches=...)"
            raise BatchError(
                f"{item.name} has shape {list(tensor.shape)}, but this program expects "
                f"{list(whole)}{parts if item.batched else ''}",
                help="pass such batches, or compile again with another --micro-batches "
                f"or other example_inputs(){last * is_short}",
            )
        dtype = within(item.dtype, self.float_dtype)
        both_float = tensor.is_floating_point() and dtype.is_floating_point
        both_complex = tensor.is_complex() and dtype.is_complex
        if tensor.dtype != dtype and not (both_float or both_complex):
            raise BatchError(
                f"{item.name} has dtype {tensor.dtype}, but this program expects "
                f"{dtype}",
                help="convert it, or compile again with example_inputs() of this dtype",
            )
        if item.batched and tuple(tensor.shape) == whole and self.num_copies > 1:
            tensor = tensor[self.copy * size : (self.copy + 1) * size]
        return _cut(tensor, item, window).to(dtype)


def _cut(tensor: Tensor, item: Input, window: Window | None) -> Tensor:
    """Return this rank's box of an input, in memory of its own."""
    if not item.box:
        return tensor
    box = window.inside(item.box, item.shape) if window is not None else item.box
    first = 1 if item.batched else 0
    slices = [slice(None)] * first + [slice(*interval) for interval in box[first:]]
    part = tensor[tuple(slices)]
    return part if part.shape == tensor.shape else part.clone()


def _pick(sources: Mapping[str, Any], item: Input) -> Tensor:
    value: Any = sources
    for part in item.path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            raise BatchError(
                f"the batch has no {item.name}",
                help="pass a batch with the structure of example_inputs() and of the "
                "target",
            ) from None
    try:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(value)
        # of a package's own class, its gradients would be of that class, too
        return tensor if type(tensor) is Tensor else tensor.as_subclass(Tensor)
    except (RuntimeError, TypeError, ValueError):
        raise BatchError(
            f"{item.name} is of type {type(value).__name__}, which is not a tensor",
            help="pass a tensor or numbers",
        ) from None
