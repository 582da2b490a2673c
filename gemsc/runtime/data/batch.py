"""Batch: what a rank takes of the user's batch, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gemsc.base.dtypes import within
from gemsc.base.units import show_micro_batches
from gemsc.errors import GemscError
from gemsc.messages.message import Input
from gemsc.runtime.data.tiled import Window


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
            GemscError: a tensor is missing, or its shape or dtype does not fit.
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
            raise GemscError(
                f"{item.name} has shape {list(tensor.shape)}, this program takes "
                f"{list(whole)}{parts if item.batched else ''}",
                help="give such batches, or compile again with another --micro-batches "
                "or other example_inputs()",
            )
        dtype = within(item.dtype, self.float_dtype)
        both_float = tensor.is_floating_point() and dtype.is_floating_point
        both_complex = tensor.is_complex() and dtype.is_complex
        if tensor.dtype != dtype and not (both_float or both_complex):
            raise GemscError(
                f"{item.name} has dtype {tensor.dtype}, this program takes {dtype}",
                help="convert it, or compile again with such example_inputs()",
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
            raise GemscError(
                f"the batch has no {item.name}",
                help="give it the structure of example_inputs() and of the target",
            ) from None
    try:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(value)
        # of a package's own class, its gradients would be of that class, too
        return tensor if type(tensor) is Tensor else tensor.as_subclass(Tensor)
    except (RuntimeError, TypeError, ValueError):
        raise GemscError(
            f"{item.name} is of type {type(value).__name__}, which is not a tensor",
            help="pass a tensor or numbers",
        ) from None
