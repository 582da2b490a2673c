"""What moves numbers, draws constants or looks at them without computing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gemsc.verify.field.dispatch import Rules
from gemsc.verify.field.mode import OverField
from gemsc.verify.field.numbers import SMALL, NotDecidedError

__all__ = [
    "CARRIES",
    "DRAWS",
    "MOVES",
    "OWN_DTYPE",
    "PLAIN",
    "RULES",
    "UNWRITTEN",
    "counted",
]

aten = torch.ops.aten
RULES = Rules()
# random numbers: constants, the same on both sides
DRAWS = frozenset(
    [
        *("rand", "rand_like", "randn", "randn_like", "randint"),
        *("randint_like", "randperm", "bernoulli_", "uniform_", "normal_"),
        *("exponential_", "random_"),
    ]
)
# new memory
UNWRITTEN = frozenset(
    ["empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"]
)
# what looks at numbers without changing them, or makes none
PLAIN = frozenset(
    [
        *("_local_scalar_dense", "isfinite", "isinf", "isnan", "is_same_size"),
        *("size", "stride", "is_nonzero", "record_stream"),
        *("_has_compatible_shallow_copy_type", "is_pinned", "_pin_memory"),
        *("equal", "nonzero", "_foreach_copy_", "_foreach_zero_", "_assert_async"),
        "_amp_foreach_non_finite_check_and_unscale_",  # by 1: it looks for infinities
    ]
)
# what moves numbers and gives a memory of its own to nothing but what it is given
CARRIES = frozenset(
    [
        *("clone", "cat", "stack", "index", "index_select", "gather", "flip"),
        *("roll", "repeat", "repeat_interleave", "masked_select", "take"),
        *("take_along_dim", "expand_copy", "view_copy", "slice_copy"),
    ]
)
# what only moves numbers
MOVES = frozenset(
    [
        *CARRIES,
        *("zero_", "zeros_like", "ones_like", "new_zeros", "new_ones", "zeros"),
        *("ones", "select_backward", "slice_backward", "slice_scatter"),
        *("select_scatter", "as_strided_scatter", "diagonal_scatter", "unfold"),
        *("replication_pad1d", "replication_pad2d", "replication_pad3d"),
        *("reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "tril"),
        *("triu", "tril_", "triu_", "upsample_nearest1d", "upsample_nearest2d"),
        *("upsample_nearest3d", "_upsample_nearest_exact2d", "unbind_copy"),
        *("max_unpool2d", "im2col", "pixel_shuffle", "pixel_unshuffle"),
        *("channel_shuffle", "embedding", "split_with_sizes_copy"),
        *("narrow_copy", "diag_embed", "rot90", "masked_scatter"),
        *("masked_scatter_", "_unsafe_index", "block_diag", "_reshape_alias"),
        *("unsafe_split", "native_channel_shuffle", "unsafe_chunk"),
        *("unsafe_split_with_sizes", "index_copy", "index_copy_"),
    ]
)
# what says itself in which dtype its result is
OWN_DTYPE = frozenset(["_to_copy", "full_like", "new_full"])


@RULES.of("_to_copy")
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


def counted(mode: OverField, value: Any) -> Tensor | None:
    """Return what counts something as float64: it has small integers alone.

    Drawn numbers are none, but by chance.
    """
    numbers = mode.of(value)
    if not isinstance(numbers, Tensor):
        numbers = torch.tensor(numbers, dtype=torch.float64)
    return numbers if bool((numbers.abs() <= SMALL).all()) else None


@RULES.of("copy")
def _copy(mode: OverField, t: Tensor, other: Tensor, *_: Any) -> Any:
    if t.is_floating_point():
        return mode.of(other)
    return _as_plain(mode, other, t.dtype) if other.is_floating_point() else other


@RULES.of("fill")
def _fill(mode: OverField, t: Tensor, value: Any) -> Tensor:
    return torch.full_like(t, 0.0).copy_(_with_infinity(mode, value))


def _with_infinity(mode: OverField, value: Any) -> Any:
    if isinstance(value, Tensor):
        return mode.of(value)
    return torch.tensor(mode.scalar(value), dtype=torch.float64)


@RULES.of("full_like", "new_full")
def _full_like(mode: OverField, t: Tensor, *rest: Any, **how: Any) -> Any:
    dtype = how.get("dtype") or t.dtype
    if dtype.is_floating_point:
        *size, value = rest
        rest = (*size, mode.scalar(value))
        if size:
            return aten.new_full(t, *rest, **how)
        return aten.full_like(t, *rest, **how)
    return (aten.new_full if len(rest) == 2 else aten.full_like)(t, *rest, **how)


@RULES.of("masked_fill")
def _masked_fill(mode: OverField, t: Tensor, mask: Tensor, value: Any) -> Tensor:
    return torch.where(mask, _with_infinity(mode, value), t)


@RULES.of("constant_pad_nd")
def _pad(mode: OverField, t: Tensor, pad: Any, value: Any = 0) -> Any:
    return aten.constant_pad_nd(t, pad, mode.scalar(value))


@RULES.of("where")
def _where(mode: OverField, mask: Tensor, a: Any, b: Any) -> Tensor:
    return torch.where(mask, _with_infinity(mode, a), _with_infinity(mode, b))


@RULES.of("scatter")
def _scatter(
    mode: OverField, t: Tensor, dim: int, index: Tensor, value: Any, **how: Any
) -> Any:
    if how:
        raise NotDecidedError("scatter with reduce")
    return aten.scatter(mode.of(t), dim, index, mode.of(value))


@RULES.of("lift_fresh", "lift", "lift_fresh_copy")
def _lift(mode: OverField, t: Tensor) -> Tensor:
    return mode.of(t).clone() if t.is_floating_point() else t
