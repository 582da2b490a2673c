"""Where a model computes in less than the precision that it is run in.

Such as a norm that takes `x.float()`: in a run in float64 it rounds as float32 does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_SKIPPED = tuple(map(str, (Path(torch.__file__).parent, Path(__file__).parents[1])))


@dataclass(frozen=True)
class LowPrecision:
    """The least precision of a run's results, and the first call that gave it."""

    dtype: torch.dtype
    call: str

    @property
    def last_bit(self) -> float:
        """How far off its roundings are."""
        return float(torch.finfo(self.dtype).eps)


class WatchPrecision(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what is computed while it is on: `found`, or None if all is in `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype
        self.found: LowPrecision | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        least = self.dtype if self.found is None else self.found.dtype
        if any(kind == self.dtype for kind in _floats((args, kwargs))):
            for kind in _floats(result):
                if torch.finfo(kind).eps > torch.finfo(least).eps:
                    name = str(func).removeprefix("aten.").split(".")[0]
                    self.found = LowPrecision(kind, f"{name}{_place()}")
                    break
        return result


def _floats(values: object) -> Iterator[torch.dtype]:
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            yield leaf.dtype


def _place() -> str:
    """Return ` at file:line` of the innermost frame that is none of torch or gemsc."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame = frame.f_back
    if frame is None:
        return ""
    return f" at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
