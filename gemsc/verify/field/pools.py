"""Means over windows, and resizing, which is linear along each axis."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gemsc.verify.field.dispatch import Rule, Rules
from gemsc.verify.field.mode import OverField
from gemsc.verify.field.numbers import NotDecidedError

__all__ = ["RESIZES", "RULES"]

aten = torch.ops.aten
RULES = Rules()
RESIZES = (
    *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "upsample_linear1d"),
    *("upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
)


def _average(name: str) -> Rule:
    def run(mode: OverField, x: Tensor, *args: Any) -> Tensor:
        x = mode.of(x)
        if x.dim() != _num_axes(name) + 2:
            raise NotDecidedError("a pool without a batch")
        found = mode.field.reduced(getattr(aten, name)(x, *_pool_args(list(args), 1)))
        return mode.mul(found, mode.inverse(_pool_factors(name, x, args)))

    return run


def _average_backward(name: str) -> Rule:
    def run(mode: OverField, g: Tensor, x: Tensor, *args: Any) -> Tensor:
        g = mode.mul(mode.of(g), mode.inverse(_pool_factors(name, x, args)))
        found = getattr(aten, f"{name}_backward")(
            g, mode.of(x), *_pool_args(list(args), 1)
        )
        return mode.field.reduced(found)

    return run


def _pool_factors(name: str, x: Tensor, args: Any) -> Any:
    ones = torch.ones((1, 1, *x.shape[-(x.dim() - 2) :]), dtype=torch.float64)
    args = list(args)
    sums = getattr(aten, name)(ones, *_pool_args(args, 1))
    means = getattr(aten, name)(
        ones, *_pool_args(args, args[5] if len(args) > 5 else None)
    )
    return (sums / means).round()


def _pool_args(args: list[Any], divisor: Any) -> list[Any]:
    kernel, *rest = args
    defaults = [[], 0, False, True]
    rest = [*rest[:4], *defaults[len(rest[:4]) :]]
    return [kernel, *rest, divisor]


def _resize(name: str) -> Rule:
    axes = _num_axes(name)

    def run(mode: OverField, x: Tensor, *args: Any, **how: Any) -> Tensor:
        op = getattr(aten, name)
        size = tuple(x.shape[-axes:])
        matrices = _matrices(mode, lambda t: op(t, *args, **how), size)
        return _along(mode, mode.of(x), matrices)

    return run


def _resize_backward(name: str) -> Rule:
    axes = _num_axes(name)

    def run(mode: OverField, g: Tensor, *args: Any, **how: Any) -> Tensor:
        op = getattr(aten, name)
        if name.startswith("_adaptive"):
            rest, size = [list(g.shape[-axes:])], args[0].shape
        else:
            output, size, *rest = args
            rest = [output, *rest]
        matrices = _matrices(mode, lambda t: op(t, *rest, **how), tuple(size[-axes:]))
        return _along(mode, mode.of(g), [m.t() for m in matrices])

    return run


def _matrices(
    mode: OverField, call: Callable[[Tensor], Tensor], size: tuple[int, ...]
) -> list[Tensor]:
    """Return the matrices (outputs x inputs) of an operation linear along each axis.

    What does not change along the other axes stays so.
    """
    found = []
    for axis, length in enumerate(size):
        view = [length if a == axis else 1 for a in range(len(size))]
        basis = torch.eye(length, dtype=torch.float64).view(length, 1, *view)
        full = call(basis.expand(length, 1, *size).contiguous()).movedim(axis + 2, 1)
        rows = full.reshape(length, full.shape[1], -1)[..., 0]
        found.append(mode.field.fractions(rows.t().contiguous()))
    return found


def _along(mode: OverField, x: Tensor, matrices: list[Tensor]) -> Tensor:
    first = x.dim() - len(matrices)
    for axis, matrix in enumerate(matrices):
        dim = first + axis
        moved = x.movedim(dim, -1)
        x = mode.matmul(moved, matrix.t()).movedim(-1, dim)
    return x.contiguous()


def _num_axes(name: str) -> int:
    """Return along how many axes an operation works: 2 of `avg_pool2d`."""
    found = re.search(r"(\d)d", name)
    assert found is not None
    return int(found[1])


for _name in ("avg_pool2d", "avg_pool3d"):
    RULES[_name] = _average(_name)
    RULES[f"{_name}_backward"] = _average_backward(_name)
for _name in RESIZES:
    RULES[_name] = _resize(_name)
    RULES[f"{_name}_backward"] = _resize_backward(_name)
