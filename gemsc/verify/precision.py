"""The precision of the one process that ranks are compared with."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from gemsc.base.dtypes import autocasting, whole
from gemsc.plan import Plan


@dataclass(frozen=True)
class Precision:
    """What a program computes in within `torch.autocast`; None without it."""

    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, plan: Plan, dtype: torch.dtype) -> Precision:
        """Return that of a program that is run in a dtype: in float64 there is none."""
        is_mixed = plan.precision != "float32" and dtype is not torch.float64
        return cls(getattr(torch, plan.precision)) if is_mixed else FULL

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
