"""What chooses among numbers by their order, which is random."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gemsc.verify.field.dispatch import Rule, Rules
from gemsc.verify.field.mode import OverField

__all__ = ["ORDERED", "RULES"]

aten = torch.ops.aten
RULES = Rules()
_TWO = ("gt", "ge", "lt", "le", "maximum", "minimum", "fmax", "fmin")
_BOUNDED = ("clamp", "clamp_min", "clamp_max")
ORDERED = (
    *_TWO,
    *_BOUNDED,
    *("amax", "amin", "max", "min", "argmax", "argmin", "sort", "topk"),
    *("max_pool2d_with_indices", "max_pool3d_with_indices"),
    *("adaptive_max_pool2d", "adaptive_max_pool3d", "kthvalue", "aminmax"),
    *("median", "cummax", "cummin", "mode"),
)


def _ordered(name: str) -> Rule:
    """Return the rule of what chooses among numbers by their order."""

    def run(mode: OverField, t: Any, *args: Any, **how: Any) -> Any:
        def place(value: Any) -> Any:
            if not isinstance(value, Tensor):
                value = torch.tensor(mode.scalar(value), dtype=torch.float64)
            return mode.field.ordered(mode.of(value))

        def number(found: Any) -> Any:
            is_place = isinstance(found, Tensor) and found.is_floating_point()
            return mode.field.from_order(found) if is_place else found

        if name in _BOUNDED:
            names = {"clamp": ("min", "max")}.get(name, (name[-3:],))
            bounds = dict(zip(names, args, strict=False)) | how
            found = place(t)
            if bounds.get("min") is not None:
                found = torch.maximum(found, place(bounds["min"]))
            if bounds.get("max") is not None:
                found = torch.minimum(found, place(bounds["max"]))
        elif name in _TWO:
            found = getattr(aten, name)(place(t), place(*args), **how)
        else:
            found = getattr(aten, name)(place(t), *args, **how)
        if isinstance(found, tuple | list):
            return tuple(map(number, found))
        return number(found)

    return run


def _same(name: str) -> Rule:
    """Return the rule of what asks whether numbers are the same, or 0."""

    def run(mode: OverField, *args: Any, **how: Any) -> Any:
        def plain(value: Any) -> Any:
            if isinstance(value, Tensor):
                return mode.of(value)
            if type(value) in (int, float) and name in ("eq", "ne"):
                return mode.scalar(value)
            return value

        return getattr(aten, name)(*map(plain, args), **how)

    return run


for _name in ORDERED:
    RULES[_name] = _ordered(_name)
for _name in (
    *("eq", "ne", "any", "all"),
    *("logical_and", "logical_or", "logical_not", "logical_xor"),
):
    RULES[_name] = _same(_name)
