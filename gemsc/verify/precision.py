"""The precision in which one process computes, and where a model computes in less.

Such as a norm that takes `x.float()`: in a run in float64 it rounds as float32 does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gemsc.base.dtypes import autocasting, whole
from gemsc.plan import Plan


@dataclass(frozen=True)
class Precision:
    """What a program computes in within `torch.autocast`; None without it."""

    dtype: torch.dtype | None = None
    is_as_compiled: bool = False  # the program can run in no other dtype

    @classmethod
    def of(cls, plan: Plan, dtype: torch.dtype) -> Precision:
        """Return that of a program that is run in a dtype: in float64 there is none."""
        is_mixed = plan.precision != "float32" and dtype is not torch.float64
        mixed = getattr(torch, plan.precision) if is_mixed else None
        return cls(mixed, bool(plan.only_dtype))

    def casts_to(self, dtype: torch.dtype) -> torch.dtype | None:
        """Return what all becomes in a run in a dtype; None: it stays as it is."""
        return None if self.is_as_compiled else dtype

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return what a forward runs within."""
        return autocasting(None if self.dtype is None else (device.type, self.dtype))

    def output(self, output: Any) -> Any:
        """Return what a model returns as metrics get it: not in half precision."""
        return output if self.dtype is None else whole(output)

    def scaler(self, device: torch.device) -> torch.amp.GradScaler:
        """Return what scales the loss; it does nothing but in float16."""
        return torch.amp.GradScaler(device.type, enabled=self.dtype is torch.float16)


FULL = Precision()


SUM_BITS = 10  # of a sum in another order; one of halves is made in float32
_SKIPPED = tuple(map(str, (Path(torch.__file__).parent, Path(__file__).parents[1])))


@dataclass(frozen=True)
class LowPrecision:
    """The least precision of a run's results, and the first call that gave it."""

    dtype: torch.dtype
    call: str

    @property
    def last_bit(self) -> float:
        """How far off its roundings are: those of a sum of float32 add up."""
        bits = SUM_BITS if self.dtype is torch.float32 else 1
        return bits * float(torch.finfo(self.dtype).eps)


class WatchPrecision(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what is computed while it is on: `lowest`, or None if all is in `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype
        self.lowest: LowPrecision | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        least = self.dtype if self.lowest is None else self.lowest.dtype
        if any(kind == self.dtype for kind in _floats((args, kwargs))):
            for kind in _floats(result):
                if torch.finfo(kind).eps > torch.finfo(least).eps:
                    name = str(func).removeprefix("aten.").split(".")[0]
                    self.lowest = LowPrecision(kind, f"{name}{_place()}")
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
