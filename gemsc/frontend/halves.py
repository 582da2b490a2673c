"""Ask whether a loss is a mean over samples: only then micro-batches are a batch.

loss(4 samples) = 0.61      (loss(2 of them) + loss(the other 2)) / 2 = 0.58
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from gemsc.base.nests import as_loss, call_loss, map_tensors, tensor_leaves
from gemsc.base.rng import torch_state

_TOLERANCE = 1e-4  # rounding is less, and what should be known is more
_ROUNDINGS = 4


class _NotKnownError(Exception):
    """Nothing can be said of this loss."""


@torch.no_grad()
def loss_of_halves(
    loss: Callable[..., Any], output: Any, target: Any, size: int
) -> tuple[float, float] | None:
    """Return the loss of a micro-batch, and the mean of those of its halves.

    None if they are equal, or where this cannot be asked: the loss returns a count,
    draws random numbers, or takes something that is not one row for each of `size`
    samples. Of a single sample, the other half is the same with smaller outputs. If
    all elements have about the same loss, as in a model that begins with zeros, other
    outputs are asked.
    """
    before = torch_state()
    draw = partial(_drawn, generator=torch.Generator().manual_seed(0))
    for known in (output, map_tensors(output, draw)):
        with suppress(Exception):  # whatever a loss says of batches of another size
            parts = _halves(known, target, size)
            together, eps = _value(loss, *_joined(*parts))
            apart = sum(_value(loss, *part)[0] for part in parts) / 2
            least = max(_TOLERANCE, _ROUNDINGS * eps) * max(abs(together), abs(apart))
            if abs(together - apart) > least and torch.equal(before, torch_state()):
                return together, apart
    return None


def _halves(output: Any, target: Any, size: int) -> tuple[Any, Any]:
    half = size // 2
    if half:
        first = _rows(output, target, size, 0, half)
        return first, _rows(output, target, size, half, 2 * half)
    return _rows(output, target, 1, 0, 1), (map_tensors(output, _smaller), target)


def _rows(output: Any, target: Any, size: int, start: int, stop: int) -> Any:
    """Return some samples; numbers without any are those of all."""

    def cut(path: object, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape and len(tensor) != size:
            raise _NotKnownError
        return tensor[start:stop] if tensor.shape else tensor

    if not any(tensor.shape for _, tensor in tensor_leaves(output)):
        raise _NotKnownError
    return map_tensors((output, target), cut)


def _value(loss: Callable[..., Any], output: Any, target: Any) -> tuple[float, float]:
    """Return the loss, and the distance of two numbers near 1 in its dtype."""
    found = as_loss(call_loss(copy.deepcopy(loss), output, target))  # it may count
    if found.shape or not math.isfinite(found):
        raise _NotKnownError
    return float(found), torch.finfo(found.dtype).eps


def _smaller(path: object, tensor: torch.Tensor) -> torch.Tensor:
    return tensor / 2 if tensor.is_floating_point() and tensor.shape else tensor


def _drawn(
    path: object, tensor: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Return other outputs, which may be probabilities."""
    if not (tensor.is_floating_point() and tensor.shape):
        return tensor
    return torch.rand(tensor.shape, generator=generator).to(tensor)


def _joined(first: Any, second: Any) -> Any:
    others = dict(tensor_leaves(second))

    def join(path: Any, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, others[path]]) if tensor.shape else tensor

    return map_tensors(first, join)
