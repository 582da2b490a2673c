"""Make once what no micro-batch changes: masks, tables of positions.

Example, in the text of a rank:
    cos, sin = once(self.constants, self.rotary.inv_freq)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from gemsc.base.dtypes import current_autocast
from gemsc.base.nests import dense_leaves
from gemsc.runtime.memory.meter import active_meter

T = TypeVar("T")

# For each stage and method: what its result depends on, and the result.
_made: WeakKeyDictionary[nn.Module, dict[str, tuple[Hashable, object]]]
_made = WeakKeyDictionary()


def once(make: Callable[[], T], *buffers: Tensor) -> T:
    """Return `make()`, a method of a stage, from the first call to it.

    It is called again when `buffers`, of which it takes elements, have changed, or the
    stage's dtype, device or mode, or when anything has written to the result; and each
    time within a dispatch mode, which may give operators another meaning.
    """
    if torch.compiler.is_compiling():
        return make()  # and let the compiler fold it
    if _get_current_dispatch_mode() is not None:
        return _left_out(make())
    stage: nn.Module = make.__self__  # type: ignore[attr-defined]
    known, name = _made.setdefault(stage, {}), make.__name__
    needs = _needs(stage, buffers)
    if name in known:
        before, result = known[name]
        if before == (needs, _versions(result)):
            return _left_out(result)  # type: ignore[return-value]
    with torch.no_grad():
        made = make()
    known[name] = (needs, _versions(made)), made
    return _left_out(made)


def made_tensors(stage: nn.Module) -> list[Tensor]:
    """Return what a stage has made so far."""
    return dense_leaves([result for _, result in _made.get(stage, {}).values()])


def _needs(stage: nn.Module, buffers: tuple[Tensor, ...]) -> Hashable:
    first = next(stage.parameters(), None)
    place = None
    if first is not None:
        place = first.dtype, first.device, current_autocast(first.device)
    modes = torch.get_default_dtype(), stage.training
    return place, modes, *((id(b), b.data_ptr(), b.dtype, b._version) for b in buffers)


def _versions(result: object) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in dense_leaves(result))


def _left_out(result: T) -> T:
    """Return what is no activation: it stays whatever a backward takes."""
    if (meter := active_meter()) is not None:
        meter.leave_out(dense_leaves(result))
    return result
