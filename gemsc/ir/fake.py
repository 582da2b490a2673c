"""Copies of modules and tensors that have shapes but no memory."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import _disable_current_modes

from gemsc.base.dtypes import empty, lying_of
from gemsc.ir.holder import hold


class Listener(threading.local):
    """Who hears, in this thread, of what only a run on fake tensors knows."""

    tell: Callable[[Any], None] | None = None

    @contextmanager
    def told(self, tell: Callable[[Any], None]) -> Iterator[None]:
        """Tell of all that happens meanwhile."""
        self.tell = tell
        try:
            yield
        finally:
            self.tell = None


def fake_copy(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return a deep copy of the module's layers whose tensors are fake.

    The module itself, its parameters and its buffers stay as they are.
    """
    holder = nn.Module()
    hold(holder, module)
    memo = fake_state(holder, mode)
    with FakeCopyMode(mode):
        copied = copy.deepcopy(holder, memo)
    for layer in copied.modules():
        if _averages_all(layer):
            layer.momentum = 0.0
    return copied


@contextmanager
def without_count(layer: nn.Module) -> Iterator[None]:
    """Let a BatchNorm without momentum run on fakes.

    It takes 1 / (the batches that it has seen) for its momentum, a number that fakes
    have not; what comes out of it has the same shape with any.
    """
    if not _averages_all(layer):
        yield
        return
    layer.momentum = 0.0
    try:
        yield
    finally:
        layer.momentum = None


def _averages_all(layer: nn.Module) -> TypeGuard[_BatchNorm]:
    return isinstance(layer, _BatchNorm) and layer.momentum is None


def fake_state(module: nn.Module, mode: FakeTensorMode) -> dict[int, Any]:
    """Return a fake for the `id` of each parameter and buffer, as `deepcopy` takes it.

    It would come to the same, in three times as many calls.
    """
    return {
        id(tensor): mode.from_tensor(tensor, static_shapes=True)
        for tensor in (*module.parameters(), *module.buffers())
    }


def fake_like(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """Return a fresh fake leaf with the tensor's shape, format, dtype and device."""
    with mode:
        form = lying_of(tensor)
        return empty(tensor.shape, form, dtype=tensor.dtype, device=tensor.device)


_ATEN = torch.ops.aten
LSTM = _ATEN.mkldnn_rnn_layer.default
_FEW, _MORE = 16, 32  # steps of the sequences that are tried


def with_workspace(args: tuple[Any, ...], result: Any) -> Any:
    """Return what a fake LSTM on a CPU gave, with oneDNN's memory for its backward.

    PyTorch does not know how much that is, and gives an empty tensor. It grows by the
    same for each step: two short sequences of zeros tell.
    """
    *outputs, workspace = result
    length, trains = len(args[0]), args[-1]
    if not trains:
        return result

    def size(steps: int) -> int:
        first, *others = (
            torch.zeros(arg.shape, dtype=arg.dtype)
            if isinstance(arg, torch.Tensor)
            else arg
            for arg in args
        )
        return int(LSTM(first[:steps], *others)[-1].numel())

    with _disable_current_modes(), torch.enable_grad():
        few, more = size(min(_FEW, length)), size(min(_MORE, length))
    longer = max(0, length - _MORE) * (more - few) // (_MORE - _FEW)
    return (*outputs, workspace.new_empty(more + longer))


class MaskCounts:
    """How many elements masks take, from what is assigned: `x[mask] = values`.

    A fake mask does not say it, and the gradient of the values is `gradient[mask]`.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[Any, ...], int] = {}

    def note(self, func: Any, args: tuple[Any, ...]) -> None:
        """Note the masks of an assignment."""
        if func not in (_ATEN.index_put.default, _ATEN.index_put_.default):
            return
        x, indices, values = args[:3]
        taken = sum(i.dim() if _is_mask(i) else 1 for i in indices)
        place = values.dim() - (x.dim() - taken) - 1
        count = values.shape[place] if place >= 0 else 1  # the same for all
        self._counts |= {_key(mask): count for mask in indices if _is_mask(mask)}

    def numbered(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of `x[mask]` with numbers in place of a noted mask."""
        if func is not _ATEN.index.Tensor:
            return args
        indices: list[Any] = []
        for index in args[1]:
            count = self._counts.get(_key(index)) if _is_mask(index) else None
            if count is None:
                indices.append(index)
            else:
                rows = index.new_zeros(count, dtype=torch.int64)
                indices += [rows] * index.dim()
        return args[0], indices


def _is_mask(index: Any) -> TypeGuard[torch.Tensor]:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _key(mask: torch.Tensor) -> tuple[Any, ...]:
    storage = mask.untyped_storage()._cdata
    return storage, mask.storage_offset(), mask.shape, mask.stride()
