"""What moves numbers, attention, means over windows and resizing, over a field."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gemsc.verify.field.arithmetic import counted
from gemsc.verify.field.mode import RULES, OverField, rule
from gemsc.verify.field.numbers import NotDecidedError

aten = torch.ops.aten


@rule("_to_copy")
def _to_copy(mode: OverField, t: Tensor, **how: Any) -> Any:
    dtype = how.get("dtype") or t.dtype
    if dtype.is_floating_point:
        if dtype not in (torch.float32, torch.float64):
            raise NotDecidedError(f"numbers in {dtype}")
        return mode.carry(t, aten._to_copy(mode.of(t), **{**how, "dtype": dtype}))
    if not t.is_floating_point():
        return aten._to_copy(t, **how)
    return aten._to_copy(_as_plain(mode, t, dtype), **how)


def _as_plain(mode: OverField, t: Tensor, dtype: torch.dtype) -> Any:
    """Return what becomes integers or booleans: of numbers only those that count."""
    if dtype is torch.bool:
        return mode.of(t) != 0
    counts = counted(mode, t)
    if counts is None or dtype.is_complex:
        raise NotDecidedError(f"a conversion of numbers to {dtype}")
    return counts.to(dtype)


@rule("copy")
def _copy(mode: OverField, t: Tensor, other: Tensor, *_: Any) -> Any:
    if t.is_floating_point():
        return mode.of(other)
    return _as_plain(mode, other, t.dtype) if other.is_floating_point() else other


@rule("fill")
def _fill(mode: OverField, t: Tensor, value: Any) -> Tensor:
    return torch.full_like(t, 0.0).copy_(_with_infinity(mode, value))


def _with_infinity(mode: OverField, value: Any) -> Any:
    if isinstance(value, Tensor):
        return mode.of(value)
    return torch.tensor(mode.scalar(value), dtype=torch.float64)


@rule("full_like", "new_full")
def _full_like(mode: OverField, t: Tensor, *args: Any, **how: Any) -> Any:
    dtype = how.get("dtype") or t.dtype
    if dtype.is_floating_point:
        *size, value = args
        args = (*size, mode.scalar(value))
        if size:
            return aten.new_full(t, *args, **how)
        return aten.full_like(t, *args, **how)
    return (aten.new_full if len(args) == 2 else aten.full_like)(t, *args, **how)


@rule("masked_fill")
def _masked_fill(mode: OverField, t: Tensor, mask: Tensor, value: Any) -> Tensor:
    return torch.where(mask, _with_infinity(mode, value), t)


@rule("constant_pad_nd")
def _pad(mode: OverField, t: Tensor, pad: Any, value: Any = 0) -> Any:
    return aten.constant_pad_nd(t, pad, mode.scalar(value))


@rule("where")
def _where(mode: OverField, mask: Tensor, a: Any, b: Any) -> Tensor:
    result = torch.where(mask, _with_infinity(mode, a), _with_infinity(mode, b))
    if mode.has_exp(a) or mode.has_exp(b):
        both = (t if isinstance(t, Tensor) else torch.tensor(t) for t in (a, b))
        first, second = map(mode.exp, both)
        mode.remember(result, torch.where(mask, first, second))
    return result


@rule("scatter")
def _scatter(
    mode: OverField, t: Tensor, dim: int, index: Tensor, value: Any, **how: Any
) -> Any:
    if how:
        raise NotDecidedError("scatter with reduce")
    return aten.scatter(mode.of(t), dim, index, mode.of(value))


@rule("lift_fresh", "lift", "lift_fresh_copy")
def _lift(mode: OverField, t: Tensor) -> Tensor:
    return mode.of(t).clone() if t.is_floating_point() else t


@rule("_softmax")
def _softmax(mode: OverField, t: Tensor, dim: int, *args: Any, **how: Any) -> Tensor:
    exps = mode.exp(t)
    total = mode.sum(exps, [dim], True)
    empty = (mode.of(t) == -math.inf).all(dim, keepdim=True)
    if bool(empty.any()):
        return mode.mul(exps, mode.field.inverse(total))
    return mode.mul(exps, mode.inverse(total))


@rule("logsumexp")
def _logsumexp(mode: OverField, t: Tensor, dim: list[int], keep: bool = False) -> Any:
    return _log_of(mode, mode.sum(mode.exp(t), dim, keep))


@rule("_softmax_backward_data")
def _softmax_backward(
    mode: OverField, g: Tensor, y: Tensor, dim: int, *args: Any
) -> Tensor:
    g, y = mode.of(g), mode.of(y)
    part = mode.mul(g, y)
    return mode.add(part, -mode.mul(y, mode.sum(part, [dim], True)))


@rule("_log_softmax")
def _log_softmax(mode: OverField, t: Tensor, dim: int, *args: Any) -> Tensor:
    total = mode.sum(mode.exp(t), [dim], True)
    result = mode.reduced(mode.of(t) - mode.field.apply("log", total))
    return mode.remember(result, mode.mul(mode.exp(t), mode.inverse(total)))


@rule("_log_softmax_backward_data")
def _log_softmax_backward(
    mode: OverField, g: Tensor, y: Tensor, dim: int, *args: Any
) -> Tensor:
    exps, g = mode.exp(y), mode.of(g)
    return mode.add(g, -mode.mul(exps, mode.sum(g, [dim], True)))


def _scores(
    mode: OverField, q: Tensor, k: Tensor, causal: bool, mask: Any, scale: Any
) -> tuple[Tensor, float]:
    factor = mode.of(1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    scores = mode.mul(mode.matmul(q, k.transpose(-2, -1)), factor)
    if causal:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~keep, -math.inf)
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = mode.reduced(scores + mode.of(mask))
    return scores, factor


@rule("_scaled_dot_product_flash_attention_for_cpu")
def _attention(
    mode: OverField,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Any = None,
    scale: Any = None,
) -> Any:
    q, k, v = mode.of(q), mode.of(k), mode.of(v)
    k, v = (_for_each_head(q, t) for t in (k, v))
    if dropout_p:
        raise NotDecidedError("attention that drops within its kernel")
    scores, _ = _scores(mode, q, k, is_causal, attn_mask, scale)
    weights = _softmax(mode, scores, -1)
    # as the kernel leaves it in memory: batch x queries x heads x size
    out = mode.matmul(weights, v).transpose(1, 2).contiguous().transpose(1, 2)
    return out, _log_of(mode, mode.sum(mode.exp(scores), [-1]))


def _log_of(mode: OverField, total: Tensor) -> Tensor:
    """Return the logarithm of a sum; of nothing it is less than any number."""
    result = mode.field.apply("log", total).masked_fill(total == 0, -math.inf)
    return mode.remember(result, total, is_log=True)


@rule("_scaled_dot_product_flash_attention_for_cpu_backward")
def _attention_backward(
    mode: OverField,
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Any = None,
    scale: Any = None,
) -> Any:
    g, q, k, v = mode.of(g), mode.of(q), mode.of(k), mode.of(v)
    heads = k.shape[1]
    k, v = (_for_each_head(q, t) for t in (k, v))
    scores, factor = _scores(mode, q, k, is_causal, attn_mask, scale)
    # as the kernel does: keys may be some of those that `out` and `lse` are of
    inverse = mode.field.inverse if bool((lse == -math.inf).any()) else mode.inverse
    weights = mode.mul(mode.exp(scores), inverse(mode.exp(lse)).unsqueeze(-1))
    of_v = mode.matmul(weights.transpose(-2, -1), g)
    of_weights = mode.matmul(g, v.transpose(-2, -1))
    shift = mode.sum(mode.mul(g, mode.of(out)), [-1], True)
    of_scores = mode.mul(mode.mul(weights, mode.add(of_weights, -shift)), factor)
    of_k = mode.matmul(of_scores.transpose(-2, -1), q)
    of_k, of_v = (
        mode.sum(torch.unflatten(t, 1, (heads, -1)), [2]) for t in (of_k, of_v)
    )
    return mode.matmul(of_scores, k), of_k, of_v


def _for_each_head(q: Tensor, t: Tensor) -> Tensor:
    """Return keys or values, of which some heads of queries may share one."""
    count = q.shape[1] // t.shape[1]
    return t if count == 1 else t.repeat_interleave(count, 1)


RESIZES = (
    *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "upsample_linear1d"),
    *("upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
)


def _average(name: str, mode: OverField, x: Tensor, *args: Any) -> Tensor:
    x = mode.of(x)
    if x.dim() != _num_axes(name) + 2:
        raise NotDecidedError("a pool without a batch")
    sums = mode.field.reduced(getattr(aten, name)(x, *_pool_args(list(args), 1)))
    return mode.mul(sums, mode.inverse(_pool_factors(name, x, args)))


def _average_backward(
    name: str, mode: OverField, g: Tensor, x: Tensor, *args: Any
) -> Tensor:
    g = mode.mul(mode.of(g), mode.inverse(_pool_factors(name, x, args)))
    backward = getattr(aten, f"{name}_backward")
    return mode.field.reduced(backward(g, mode.of(x), *_pool_args(list(args), 1)))


def _pool_factors(name: str, x: Tensor, args: Any) -> Any:
    ones = torch.ones((1, 1, *x.shape[-(x.dim() - 2) :]), dtype=torch.float64)
    args = list(args)
    sums = getattr(aten, name)(ones, *_pool_args(args, 1))
    means = getattr(aten, name)(
        ones, *_pool_args(args, args[5] if len(args) > 5 else None)
    )
    return (sums / means).round()


def _pool_args(args: list[Any], divisor: Any) -> list[Any]:
    kernel, *options = args
    defaults = [[], 0, False, True]
    options = [*options[:4], *defaults[len(options[:4]) :]]
    return [kernel, *options, divisor]


def _resize(name: str, mode: OverField, x: Tensor, *args: Any, **how: Any) -> Tensor:
    op, size = getattr(aten, name), tuple(x.shape[-_num_axes(name) :])
    matrices = _matrices(mode, lambda t: op(t, *args, **how), size)
    return _along(mode, mode.of(x), matrices)


def _resize_backward(
    name: str, mode: OverField, g: Tensor, *args: Any, **how: Any
) -> Tensor:
    op, axes = getattr(aten, name), _num_axes(name)
    if name.startswith("_adaptive"):
        options, size = [list(g.shape[-axes:])], args[0].shape
    else:
        output, size, *options = args
        options = [output, *options]
    matrices = _matrices(mode, lambda t: op(t, *options, **how), tuple(size[-axes:]))
    return _along(mode, mode.of(g), [m.t() for m in matrices])


def _matrices(
    mode: OverField, call: Callable[[Tensor], Tensor], size: tuple[int, ...]
) -> list[Tensor]:
    """Return the matrices (outputs x inputs) of an operation linear along each axis.

    What does not change along the other axes stays so.
    """
    matrices = []
    for axis, length in enumerate(size):
        view = [length if a == axis else 1 for a in range(len(size))]
        basis = torch.eye(length, dtype=torch.float64).view(length, 1, *view)
        full = call(basis.expand(length, 1, *size).contiguous()).movedim(axis + 2, 1)
        rows = full.reshape(length, full.shape[1], -1)[..., 0]
        matrices.append(mode.field.fractions(rows.t().contiguous()))
    return matrices


def _along(mode: OverField, x: Tensor, matrices: list[Tensor]) -> Tensor:
    first = x.dim() - len(matrices)
    for axis, matrix in enumerate(matrices):
        dim = first + axis
        moved = x.movedim(dim, -1)
        x = mode.matmul(moved, matrix.t()).movedim(-1, dim)
    return x.contiguous()


def _num_axes(name: str) -> int:
    """Return along how many axes an operation works: 2 of `avg_pool2d`."""
    match = re.search(r"(\d)d", name)
    assert match is not None
    return int(match[1])


for _name in ("avg_pool2d", "avg_pool3d"):
    RULES[_name] = partial(_average, _name)
    RULES[f"{_name}_backward"] = partial(_average_backward, _name)
for _name in RESIZES:
    RULES[_name] = partial(_resize, _name)
    RULES[f"{_name}_backward"] = partial(_resize_backward, _name)
