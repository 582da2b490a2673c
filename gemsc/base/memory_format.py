"""Memory formats: in which order the elements of images and volumes lie in memory.

Example, the strides of a tensor of 2 x 16 x 8 x 8 (samples, channels, rows, columns):

    contiguous_format   1024, 64, 8, 1     one channel after the other
    channels_last       1024, 1, 128, 16   all channels of a pixel side by side
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gemsc.base.nests import Path, map_tensors, tensor_leaves

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by dimensions


def format_of(tensor: Tensor) -> torch.memory_format:
    """Return the format of a tensor; contiguous where its sizes leave it open."""
    last = CHANNELS_LAST.get(tensor.dim())
    if last is None or tensor.layout is not torch.strided or tensor.is_contiguous():
        return torch.contiguous_format
    is_last = tensor.is_contiguous(memory_format=last)
    return last if is_last else torch.contiguous_format


def is_laid_out(tensor: Tensor) -> bool:
    """Whether a tensor has just the strides that channels_last gives to its sizes.

    Kernels go by these for a weight of 1x1, too, which lies the same either way. False
    where plain memory has the same strides.
    """
    last = CHANNELS_LAST.get(tensor.dim())
    if last is None or tensor.layout is not torch.strided:
        return False
    forms = last, torch.contiguous_format
    own, plain = (empty(tensor.shape, f, device="meta").stride() for f in forms)
    return tensor.stride() == own != plain


def empty(shape: Sequence[int], form: torch.memory_format, **how: Any) -> Tensor:
    """Return `torch.empty` of a format, as plain memory where it does not go."""
    if CHANNELS_LAST.get(len(shape)) is not form:
        form = torch.contiguous_format
    return torch.empty(tuple(shape), memory_format=form, **how)


def to_format(tensor: Tensor) -> Tensor:
    """Return a tensor with its channels last, if it is of images or volumes."""
    last = CHANNELS_LAST.get(tensor.dim())
    if last is None or tensor.layout is not torch.strided or is_laid_out(tensor):
        return tensor
    return torch.empty_like(tensor, memory_format=last).copy_(tensor)


def convert(model: nn.Module, name: str) -> None:
    """Let a model's weights have the format of that name; their values stay."""
    if name == "channels_last":
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                tensor.data = to_format(tensor.data)


def converted(values: Any, name: str) -> Any:
    """Return a nest of tensors in the format of that name."""
    if name != "channels_last":
        return values

    def change(path: Path, tensor: Tensor) -> Tensor:
        return to_format(tensor.detach()).requires_grad_(tensor.requires_grad)

    return map_tensors(values, change)


def like_examples(values: Any, examples: Any) -> Any:
    """Return a nest of tensors in the formats that the same ones have in `examples`."""
    known = {path: format_of(tensor) for path, tensor in tensor_leaves(examples)}

    def laid(path: Path, tensor: Tensor) -> Tensor:
        form = known.get(path, torch.contiguous_format)
        is_last = CHANNELS_LAST.get(tensor.dim()) is form
        return tensor.contiguous(memory_format=form) if is_last else tensor

    return map_tensors(values, laid)
