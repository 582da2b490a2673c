"""Models that take no memory: their large tensors are allocated but never written.

The operating system gives memory to a process page by page, when a page is first
written. So a model of any size can be made, looked at and traced on fake tensors, as
long as nothing fills its weights. Small tensors get their values as always: a model may
compute with them while it is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

LARGE = 2**16  # elements
_ATEN = torch.ops.aten
# what gives every element of a tensor a value that does not matter here
_IN_PLACE = frozenset(
    {
        _ATEN.normal_,
        _ATEN.uniform_,
        _ATEN.random_,
        _ATEN.bernoulli_,
        _ATEN.fill_,
        _ATEN.zero_,
        _ATEN.erfinv_,
        _ATEN.mul_,
        _ATEN.add_,
        _ATEN.clamp_,
        _ATEN.copy_,
    }
)
_FRESH = frozenset({_ATEN.randn, _ATEN.rand, _ATEN.ones, _ATEN.zeros, _ATEN.full})


@contextmanager
def unfilled() -> Iterator[None]:
    """Leave large tensors that are made inside as they are."""
    with _Unfilled():  # type: ignore[no-untyped-call]
        yield


class _Unfilled(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        packet = func._overloadpacket
        if packet in _IN_PLACE and _is_large(args[0]):
            return args[0]
        if packet in _FRESH and _count(args[0]) >= LARGE:
            known = {k: v for k, v in (kwargs or {}).items() if k in _OPTIONS}
            return torch.empty(args[0], **known)
        return func(*args, **(kwargs or {}))


_OPTIONS = ("dtype", "device", "layout", "pin_memory")


def _is_large(tensor: Tensor) -> bool:
    return tensor.numel() >= LARGE


def _count(shape: Any) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
