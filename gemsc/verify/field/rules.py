"""What each operation of torch is over a finite field."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gemsc.verify.field.mode import OverField
from gemsc.verify.field.numbers import LONGEST, SMALL, NotDecidedError

__all__ = [
    "BACKWARDS",
    "CARRIES",
    "DRAWS",
    "FUNCTIONS",
    "MOVES",
    "ORDERED",
    "OWN_DTYPE",
    "PLAIN",
    "RESIZES",
    "RULES",
    "SUMS",
    "UNWRITTEN",
]

aten = torch.ops.aten
Rule = Callable[..., Any]

# random numbers: constants, the same on both sides
DRAWS = frozenset(
    [
        "rand",
        "rand_like",
        "randn",
        "randn_like",
        "randint",
        "randint_like",
        "randperm",
        "bernoulli_",
        "uniform_",
        "normal_",
        "exponential_",
        "random_",
    ]
)
# new memory
UNWRITTEN = frozenset(
    ["empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"]
)
# what looks at numbers without changing them, or makes none
PLAIN = frozenset(
    [
        "_local_scalar_dense",
        "isfinite",
        "isinf",
        "isnan",
        "is_same_size",
        "size",
        "stride",
        "is_nonzero",
        "record_stream",
        "_has_compatible_shallow_copy_type",
        "is_pinned",
        "_pin_memory",
        "equal",
        "nonzero",
        "_amp_foreach_non_finite_check_and_unscale_",  # by 1: it looks for infinities
        "_foreach_copy_",
        "_foreach_zero_",
        "_assert_async",
    ]
)
# what moves numbers and gives a memory of its own to nothing but what it is given
CARRIES = frozenset(
    [
        "clone",
        "cat",
        "stack",
        "index",
        "index_select",
        "gather",
        "flip",
        "roll",
        "repeat",
        "repeat_interleave",
        "masked_select",
        "take",
        "take_along_dim",
        "expand_copy",
        "view_copy",
        "slice_copy",
    ]
)
# what only moves numbers
MOVES = frozenset(
    [
        *CARRIES,
        "zero_",
        "zeros_like",
        "ones_like",
        "new_zeros",
        "new_ones",
        "zeros",
        "ones",
        "select_backward",
        "slice_backward",
        "slice_scatter",
        "select_scatter",
        "as_strided_scatter",
        "diagonal_scatter",
        "unfold",
        "replication_pad1d",
        "replication_pad2d",
        "replication_pad3d",
        "reflection_pad1d",
        "reflection_pad2d",
        "reflection_pad3d",
        "tril",
        "triu",
        "tril_",
        "triu_",
        "upsample_nearest1d",
        "upsample_nearest2d",
        "upsample_nearest3d",
        "_upsample_nearest_exact2d",
        "unbind_copy",
        "max_unpool2d",
        "im2col",
        "pixel_shuffle",
        "pixel_unshuffle",
        "channel_shuffle",
        "embedding",
        "split_with_sizes_copy",
        "narrow_copy",
        "diag_embed",
        "rot90",
        "masked_scatter",
        "masked_scatter_",
        "_unsafe_index",
        "block_diag",
        "_reshape_alias",
        "unsafe_split",
        "native_channel_shuffle",
        "unsafe_chunk",
        "unsafe_split_with_sizes",
        "index_copy",
        "index_copy_",
    ]
)

# what says itself in which dtype its result is
OWN_DTYPE = frozenset(["_to_copy", "full_like", "new_full"])

RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def enter(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return enter


# --------------------------------------------------------- what moves constants, too


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


def counted(mode: OverField, value: Any) -> Tensor | None:
    """Return what counts something as float64: it has small integers alone.

    Drawn numbers are none, but by chance.
    """
    numbers = mode.of(value)
    if not isinstance(numbers, Tensor):
        numbers = torch.tensor(numbers, dtype=torch.float64)
    return numbers if bool((numbers.abs() <= SMALL).all()) else None


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
    return torch.tensor(_scalar(mode, value), dtype=torch.float64)


def _scalar(mode: OverField, value: Any) -> float:
    if isinstance(value, float) and math.isinf(value):
        return value
    return mode.field.number(value)


@rule("full_like", "new_full")
def _full_like(mode: OverField, t: Tensor, *rest: Any, **how: Any) -> Any:
    dtype = how.get("dtype") or t.dtype
    if dtype.is_floating_point:
        *size, value = rest
        rest = (*size, _scalar(mode, value))
        if size:
            return aten.new_full(t, *rest, **how)
        return aten.full_like(t, *rest, **how)
    return (aten.new_full if len(rest) == 2 else aten.full_like)(t, *rest, **how)


@rule("masked_fill")
def _masked_fill(mode: OverField, t: Tensor, mask: Tensor, value: Any) -> Tensor:
    return torch.where(mask, _with_infinity(mode, value), t)


@rule("constant_pad_nd")
def _pad(mode: OverField, t: Tensor, pad: Any, value: Any = 0) -> Any:
    return aten.constant_pad_nd(t, pad, _scalar(mode, value))


@rule("where")
def _where(mode: OverField, mask: Tensor, a: Any, b: Any) -> Tensor:
    return torch.where(mask, _with_infinity(mode, a), _with_infinity(mode, b))


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


# ---------------------------------------------------------------------------- a ring


@rule("add")
def _add(mode: OverField, a: Any, b: Any, alpha: Any = 1) -> Tensor:
    return _sum_of_two(mode, a, b, mode.of(alpha))


@rule("sub", "subtract")
def _sub(mode: OverField, a: Any, b: Any, alpha: Any = 1) -> Tensor:
    return _sum_of_two(mode, a, b, -mode.of(alpha))


@rule("rsub")
def _rsub(mode: OverField, a: Any, b: Any, alpha: Any = 1) -> Tensor:
    return _sum_of_two(mode, b, a, -mode.of(alpha))


def _sum_of_two(mode: OverField, a: Any, b: Any, factor: float) -> Tensor:
    x, y = mode.of(a), mode.of(b)
    if factor == 1.0:
        total = x + y
    elif factor == -1.0:
        total = x - y
    else:
        total = x + mode.mul(y, factor)
    result: Tensor = _finite_reduced(mode, total)
    shapes = [t.shape for t in (a, b) if isinstance(t, Tensor)]
    if factor == 1.0 and (mode.is_log(a) or mode.is_log(b)):
        exps = mode.mul(_exp_of(mode, a), _exp_of(mode, b))
        return mode.remember(mode.field.apply("log", exps), exps, is_log=True)
    wants = factor in (1.0, -1.0) and (
        mode.has_exp(a)
        or mode.has_exp(b)
        or (factor == -1.0 and len(shapes) == 2 and shapes[1] != shapes[0])
    )
    if wants:
        first, second = _exp_of(mode, a), _exp_of(mode, b)
        if factor == -1.0:
            second = mode.inverse(second)
        mode.remember(result, mode.mul(first, second))
    return result


def _exp_of(mode: OverField, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return mode.exp(value)
    return mode.field.apply("exp", torch.tensor(mode.of(value), dtype=torch.float64))


def _finite_reduced(mode: OverField, t: Tensor) -> Tensor:
    infinite = t.isinf()
    if not bool(infinite.any()):
        return mode.field.reduced(t)
    return torch.where(infinite, t, mode.field.reduced(t.masked_fill(infinite, 0.0)))


@rule("mul", "multiply")
def _mul(mode: OverField, a: Any, b: Any) -> Tensor:
    return mode.mul(mode.of(a), mode.of(b))


@rule("neg")
def _neg(mode: OverField, a: Tensor) -> Any:
    result = -mode.of(a)
    if mode.has_exp(a):
        mode.remember(result, mode.inverse(mode.exp(a)))
    return result


@rule("div", "divide", "true_divide")
def _div(mode: OverField, a: Any, b: Any, rounding_mode: Any = None) -> Any:
    if rounding_mode is not None:
        counts = [counted(mode, value) for value in (a, b)]
        if any(each is None for each in counts):
            raise NotDecidedError(f"a division rounded by {rounding_mode}")
        return aten.div(*counts, rounding_mode=rounding_mode)
    return mode.mul(mode.of(a), mode.inverse(mode.of(b)))


@rule("reciprocal")
def _reciprocal(mode: OverField, a: Tensor) -> Any:
    return mode.inverse(mode.of(a))


@rule("square")
def _square(mode: OverField, a: Tensor) -> Tensor:
    x = mode.of(a)
    return mode.mul(x, x)


@rule("pow")
def _pow(mode: OverField, a: Any, b: Any) -> Any:
    if not isinstance(b, Tensor):
        return power(mode, mode.of(a), b)
    x, exponents = (
        t if isinstance(t, Tensor) else torch.tensor(t, dtype=torch.float64)
        for t in (mode.of(a), mode.of(b))
    )
    # any function of both, that is the product where the exponent counts
    both = mode.add(x, mode.field.apply("exponent", exponents))
    x, exponents = x.expand_as(both), exponents.expand_as(both)
    result = mode.field.apply("power", both)
    is_count = exponents.abs() <= SMALL
    for n in set(exponents[is_count].tolist()):
        here = exponents == n
        result[here] = power(mode, x[here], n)
    return result


def power(mode: OverField, x: Tensor, n: float) -> Any:
    if n != int(n):
        name = {0.5: "sqrt", -0.5: "rsqrt"}.get(n)
        return mode.field.apply(of_one(name) if name else ("pow", n), x)
    if n < 0:
        return mode.inverse(power(mode, x, -n))
    result, square, rest = torch.ones_like(x), x, int(n)
    while rest:
        if rest % 2:
            result = mode.mul(result, square)
        square, rest = mode.mul(square, square), rest // 2
    return result


@rule("addcmul")
def _addcmul(
    mode: OverField, t: Tensor, a: Tensor, b: Tensor, value: Any = 1
) -> Tensor:
    product = mode.mul(mode.mul(mode.of(a), mode.of(b)), mode.of(value))
    return mode.add(mode.of(t), product)


@rule("addcdiv")
def _addcdiv(
    mode: OverField, t: Tensor, a: Tensor, b: Tensor, value: Any = 1
) -> Tensor:
    product = mode.mul(mode.of(a), mode.inverse(mode.of(b)))
    return mode.add(mode.of(t), mode.mul(product, mode.of(value)))


@rule("lerp")
def _lerp(mode: OverField, a: Tensor, b: Tensor, weight: Any) -> Tensor:
    x, y = mode.of(a), mode.of(b)
    return mode.add(x, mode.mul(mode.add(y, -x), mode.of(weight)))


@rule("sum")
def _sum(
    mode: OverField, t: Tensor, dims: Any = None, keepdim: bool = False, **how: Any
) -> Tensor:
    return mode.sum(mode.of(t), dims, keepdim)


@rule("mean")
def _mean(
    mode: OverField, t: Tensor, dims: Any = None, keepdim: bool = False, **how: Any
) -> Tensor:
    return mean(mode, mode.of(t), dims, keepdim)


def mean(mode: OverField, t: Tensor, dims: Any = None, keepdim: bool = False) -> Tensor:
    total = mode.sum(t, dims, keepdim)
    return mode.mul(
        total, mode.inverse(mode.field.number(t.numel() // max(total.numel(), 1)))
    )


@rule("cumsum")
def _cumsum(mode: OverField, t: Tensor, dim: int, **how: Any) -> Tensor:
    return mode.reduced(mode.of(t).cumsum(dim))


@rule("mm", "bmm", "mv", "dot")
def _mm(mode: OverField, a: Tensor, b: Tensor) -> Tensor:
    x, y = mode.of(a), mode.of(b)
    if y.dim() == 1:
        return mode.matmul(x, y.unsqueeze(1)).squeeze(-1)
    return mode.matmul(x, y)


@rule("addmm", "baddbmm", "addmv")
def _addmm(
    mode: OverField, t: Tensor, a: Tensor, b: Tensor, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    product = mode.mul(_mm(mode, a, b), mode.of(alpha))
    return mode.add(mode.mul(mode.of(t), mode.of(beta)), product)


@rule("linear")
def _linear(
    mode: OverField, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    result = mode.matmul(mode.of(x), mode.of(weight).t())
    return result if bias is None else mode.add(result, mode.of(bias))


@rule("convolution", "convolution_overrideable", "_convolution")
def _convolution(
    mode: OverField, x: Tensor, weight: Tensor, bias: Any, *how: Any
) -> Any:
    terms = weight[0].numel() if not how[3] else weight.numel() // weight.shape[1]
    if terms > LONGEST:
        raise NotDecidedError(f"a sum of {terms} products")
    result = aten.convolution(mode.of(x), mode.of(weight), None, *how[:6])
    mode.field.reduced(result)
    if bias is None:
        return result
    return mode.add(result, mode.of(bias).view(-1, *(1,) * (x.dim() - 2)))


@rule("convolution_backward")
def _convolution_backward(
    mode: OverField, g: Tensor, x: Tensor, weight: Tensor, bias: Any, *how: Any
) -> Any:
    *shape, mask = how
    g, x, weight = mode.of(g), mode.of(x), mode.of(weight)
    spatial = g[0, 0].numel() if g.numel() else 1
    step = max(1, LONGEST // max(spatial, 1))
    if spatial > LONGEST or weight.numel() > LONGEST * weight.shape[1]:
        raise NotDecidedError(f"a sum of {spatial} products")
    mine = of_weight = of_bias = None
    if mask[0]:
        mine = aten.convolution_backward(
            g, x, weight, None, *shape, [True, False, False]
        )[0]
        mode.field.reduced(mine)
    if mask[1]:
        for gs, xs in zip(torch.split(g, step), torch.split(x, step), strict=True):
            part = aten.convolution_backward(
                gs, xs, weight, None, *shape, [False, True, False]
            )[1]
            mode.field.reduced(part)
            of_weight = part if of_weight is None else mode.add(of_weight, part)
    if mask[2]:
        of_bias = mode.sum(g, [0, *range(2, g.dim())])
    return mine, of_weight, of_bias


# what only adds numbers up
SUMS = [
    "index_add",
    "scatter_add",
    "index_put",
    "_index_put_impl",
    "_unsafe_index_put",
    "embedding_dense_backward",
    "upsample_nearest1d_backward",
    "upsample_nearest2d_backward",
    "upsample_nearest3d_backward",
    "_upsample_nearest_exact2d_backward",
    "unfold_backward",
    "col2im",
    "replication_pad1d_backward",
    "replication_pad2d_backward",
    "replication_pad3d_backward",
    "reflection_pad1d_backward",
    "reflection_pad2d_backward",
    "reflection_pad3d_backward",
    "max_pool2d_with_indices_backward",
    "max_pool3d_with_indices_backward",
    "adaptive_max_pool2d_backward",
    "adaptive_max_pool3d_backward",
    "index_select_backward",
    "trace",
    "value_selecting_reduction_backward",
]


def _summing(name: str) -> Rule:
    def run(mode: OverField, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("alpha", 1) != 1:
            raise NotDecidedError(f"{name} with alpha")
        if name == "embedding_dense_backward" and args[4]:
            raise NotDecidedError("an embedding with scale_grad_by_freq")
        values = (
            mode.of(a) if isinstance(a, Tensor) and a.is_floating_point() else a
            for a in args
        )
        return _finite_reduced(mode, getattr(aten, name)(*values, **kwargs))

    return run


for _name in SUMS:
    RULES[_name] = _summing(_name)


# -------------------------------------------------------------- functions of numbers

FUNCTIONS = [
    "relu",
    "gelu",
    "silu",
    "sigmoid",
    "tanh",
    "softplus",
    "elu",
    "leaky_relu",
    "hardtanh",
    "hardswish",
    "hardsigmoid",
    "mish",
    "erf",
    "erfc",
    "sin",
    "cos",
    "tan",
    "atan",
    "asin",
    "acos",
    "sinh",
    "cosh",
    "log1p",
    "log2",
    "log10",
    "expm1",
    "exp2",
    "sqrt",
    "rsqrt",
    "abs",
    "sign",
    "sgn",
    "selu",
    "celu",
    "relu6",
    "log_sigmoid_forward",
    "softshrink",
    "hardshrink",
    "threshold",
    "round",
    "floor",
    "ceil",
    "trunc",
    "logit",
    "sinc",
    "erfinv",
    "lgamma",
    "digamma",
]
BACKWARDS = [
    "threshold_backward",
    "gelu_backward",
    "silu_backward",
    "sigmoid_backward",
    "tanh_backward",
    "softplus_backward",
    "elu_backward",
    "leaky_relu_backward",
    "hardtanh_backward",
    "hardswish_backward",
    "hardsigmoid_backward",
    "mish_backward",
    "log_sigmoid_backward",
    "softshrink_backward",
    "hardshrink_backward",
    "logit_backward",
]


def of_one(name: str) -> str:
    """Return the key of a function of one tensor and nothing else."""
    return str((name, (), []))


def _function(name: str) -> Rule:
    def run(mode: OverField, t: Tensor, *rest: Any, **how: Any) -> Any:
        if any(isinstance(each, Tensor) for each in rest):
            raise NotDecidedError(name)
        result = mode.field.apply((name, rest, sorted(how.items())), mode.of(t))
        if name == "log_sigmoid_forward":
            return result, torch.zeros_like(result)
        return result

    return run


def _slope(name: str) -> Rule:
    def run(mode: OverField, g: Tensor, *rest: Any, **how: Any) -> Any:
        how.pop("grad_input", None)
        tensors = [mode.of(t) for t in rest if isinstance(t, Tensor)]
        numbers = [each for each in rest if not isinstance(each, Tensor)]
        key = (name, numbers, sorted(how.items()))
        slope = mode.field.apply(key, tensors[0])
        return mode.mul(mode.of(g), slope)

    return run


for _name in FUNCTIONS:
    RULES[_name] = _function(_name)
for _name in BACKWARDS:
    RULES[_name] = _slope(_name)


@rule("_prelu_kernel", "prelu")
def _prelu(mode: OverField, t: Tensor, weight: Tensor) -> Tensor:
    x = mode.of(t)
    mask = mode.field.apply("positive", x) > 0
    return torch.where(mask, x, mode.mul(x, mode.of(weight)))


@rule("_prelu_kernel_backward")
def _prelu_backward(mode: OverField, g: Tensor, t: Tensor, weight: Tensor) -> Any:
    x, g = mode.of(t), mode.of(g)
    mask = mode.field.apply("positive", x) > 0
    mine = torch.where(mask, g, mode.mul(g, mode.of(weight)))
    return mine, torch.where(mask, 0.0, mode.mul(g, x))


@rule("exp")
def _exp(mode: OverField, t: Tensor) -> Tensor:
    return mode.exp(t)


@rule("log")
def _log(mode: OverField, t: Tensor) -> Tensor:
    x = mode.of(t)
    return mode.remember(mode.field.apply("log", x), x, is_log=True)


# -------------------------------------------------------------------- a random order


def _ordered(name: str) -> Rule:
    """Return the rule of what chooses among numbers by their order."""

    def run(mode: OverField, t: Any, *args: Any, **how: Any) -> Any:
        def place(value: Any) -> Any:
            if not isinstance(value, Tensor):
                value = torch.tensor(_scalar(mode, value), dtype=torch.float64)
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


_TWO = ("gt", "ge", "lt", "le", "maximum", "minimum", "fmax", "fmin")
_BOUNDED = ("clamp", "clamp_min", "clamp_max")
ORDERED = (
    *_TWO,
    *_BOUNDED,
    *[
        "amax",
        "amin",
        "max",
        "min",
        "argmax",
        "argmin",
        "sort",
        "topk",
        "argsort",
        "max_pool2d_with_indices",
        "max_pool3d_with_indices",
        "adaptive_max_pool2d",
        "adaptive_max_pool3d",
        "kthvalue",
        "aminmax",
        "median",
        "cummax",
        "cummin",
        "mode",
    ],
)
for _name in ORDERED:
    RULES[_name] = _ordered(_name)


def _same(name: str) -> Rule:
    """Return the rule of what asks whether numbers are the same, or 0."""

    def run(mode: OverField, *args: Any, **how: Any) -> Any:
        def plain(value: Any) -> Any:
            if isinstance(value, Tensor):
                return mode.of(value)
            if type(value) in (int, float) and name in ("eq", "ne"):
                return _scalar(mode, value)
            return value

        return getattr(aten, name)(*map(plain, args), **how)

    return run


for _name in (
    *("eq", "ne", "any", "all"),
    *("logical_and", "logical_or", "logical_not", "logical_xor"),
):
    RULES[_name] = _same(_name)


# ---------------------------------------------------------------------- normalization


def moments(mode: OverField, x: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance, dimensions kept."""
    middle = mean(mode, x, dims, True)
    off = mode.add(x, -middle)
    return middle, mean(mode, mode.mul(off, off), dims, True)


def _eps(mode: OverField, variance: Tensor, eps: float) -> Tensor:
    return mode.field.apply(of_one("rsqrt"), mode.add(variance, mode.of(eps)))


@rule("native_batch_norm")
def _batch_norm(
    mode: OverField,
    x: Tensor,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    x = mode.of(x)
    dims = [0, *range(2, x.dim())]
    shape = (1, -1, *(1,) * (x.dim() - 2))
    if training:
        middle, variance = moments(mode, x, dims)
        if running_mean is not None:
            count = x.numel() // x.shape[1]
            factor = mode.mul(mode.inverse(mode.field.number(count - 1)), float(count))
            share = mode.of(momentum)
            for old, new in (
                (running_mean, middle.view(-1)),
                (running_var, mode.mul(variance.view(-1), factor)),
            ):
                was = mode.of(old)
                old.copy_(mode.add(was, mode.mul(mode.add(new, -was), share)))
    else:
        middle, variance = (
            mode.of(running_mean).view(shape),
            mode.of(running_var).view(shape),
        )
    rstd = _eps(mode, variance, eps)
    result = mode.mul(mode.add(x, -middle), rstd)
    result = _affine(mode, result, weight, bias, shape)
    saved = (middle.reshape(-1), rstd.reshape(-1))
    return (result, *(saved if training else (x.new_empty(0), x.new_empty(0))))


def _affine(mode: OverField, x: Tensor, weight: Any, bias: Any, shape: Any) -> Tensor:
    if weight is not None:
        x = mode.mul(x, mode.of(weight).view(shape))
    if bias is not None:
        x = mode.add(x, mode.of(bias).view(shape))
    return x


def _normalized_backward(
    mode: OverField,
    g: Tensor,
    x: Tensor,
    middle: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    dims: list[int],
    over: list[int],
    fixed: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the value, of the weight and of the bias.

    Statistics are those over `dims`, the parameters' gradients are summed `over` some.
    """
    normal = mode.mul(mode.add(x, -middle), rstd)
    of_weight = mode.sum(mode.mul(g, normal), over, True)
    of_bias = mode.sum(g, over, True)
    h = g if weight is None else mode.mul(g, weight)
    result = h
    if not fixed:
        first = mean(mode, h, dims, True)
        second = mean(mode, mode.mul(h, normal), dims, True)
        result = mode.add(mode.add(h, -first), -mode.mul(normal, second))
    return mode.mul(result, rstd), of_weight, of_bias


@rule("native_batch_norm_backward")
def _batch_norm_backward(
    mode: OverField,
    g: Tensor,
    x: Tensor,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    save_mean: Any,
    save_invstd: Any,
    training: bool,
    eps: float,
    mask: Any,
) -> Any:
    g, x = mode.of(g), mode.of(x)
    shape = (1, -1, *(1,) * (x.dim() - 2))
    dims = [0, *range(2, x.dim())]
    if training:
        middle, rstd = mode.of(save_mean).view(shape), mode.of(save_invstd).view(shape)
    else:
        middle = mode.of(running_mean).view(shape)
        rstd = _eps(mode, mode.of(running_var), eps).view(shape)
    w = None if weight is None else mode.of(weight).view(shape)
    a, b, c = _normalized_backward(
        mode, g, x, middle, rstd, w, dims, dims, fixed=not training
    )
    return _masked(mask, a, b.view(-1), c.view(-1))


def _masked(mask: Any, *values: Any) -> Any:
    return tuple(v if m else None for v, m in zip(values, mask, strict=True))


@rule("native_group_norm")
def _group_norm(
    mode: OverField,
    x: Tensor,
    weight: Any,
    bias: Any,
    n: int,
    c: int,
    size: int,
    groups: int,
    eps: float,
) -> Any:
    given, x = x.shape, mode.of(x).reshape(n, groups, c // groups, size)
    middle, variance = moments(mode, x, [2, 3])
    rstd = _eps(mode, variance, eps)
    result = mode.mul(mode.add(x, -middle), rstd)
    result = _affine(mode, result, weight, bias, (1, groups, c // groups, 1))
    return result.reshape(given), middle.view(n, groups), rstd.view(n, groups)


@rule("native_group_norm_backward")
def _group_norm_backward(
    mode: OverField,
    g: Tensor,
    x: Tensor,
    middle: Tensor,
    rstd: Tensor,
    weight: Any,
    n: int,
    c: int,
    size: int,
    groups: int,
    mask: Any,
) -> Any:
    given, shape = x.shape, (n, groups, c // groups, size)
    g, x = mode.of(g).reshape(shape), mode.of(x).reshape(shape)
    w = None if weight is None else mode.of(weight).view(1, groups, c // groups, 1)
    found = _normalized_backward(
        mode,
        g,
        x,
        mode.of(middle).view(n, groups, 1, 1),
        mode.of(rstd).view(n, groups, 1, 1),
        w,
        [2, 3],
        [0, 3],
    )
    return _masked(
        mask, found[0].reshape(given), found[1].reshape(-1), found[2].reshape(-1)
    )


@rule("native_layer_norm")
def _layer_norm(
    mode: OverField, x: Tensor, shape: Any, weight: Any, bias: Any, eps: float
) -> Any:
    x = mode.of(x)
    dims = list(range(x.dim() - len(shape), x.dim()))
    middle, variance = moments(mode, x, dims)
    rstd = _eps(mode, variance, eps)
    result = mode.mul(mode.add(x, -middle), rstd)
    return _affine(mode, result, weight, bias, tuple(shape)), middle, rstd


@rule("native_layer_norm_backward")
def _layer_norm_backward(
    mode: OverField,
    g: Tensor,
    x: Tensor,
    shape: Any,
    middle: Tensor,
    rstd: Tensor,
    weight: Any,
    bias: Any,
    mask: Any,
) -> Any:
    g, x = mode.of(g), mode.of(x)
    dims = list(range(x.dim() - len(shape), x.dim()))
    over = list(range(x.dim() - len(shape)))
    w = None if weight is None else mode.of(weight)
    found = (
        _normalized_backward(mode, g, x, mode.of(middle), mode.of(rstd), w, dims, over)
        if over
        else None
    )
    if found is None:
        raise NotDecidedError("a layer norm without a batch")
    return _masked(mask, found[0], found[1].reshape(shape), found[2].reshape(shape))


def variance_of(
    mode: OverField, x: Tensor, dims: Any, correction: Any, keepdim: bool
) -> tuple[Tensor, Tensor]:
    dims = list(range(x.dim())) if dims is None or not dims else list(dims)
    middle, biased = moments(mode, x, dims)
    count = x.numel() // max(middle.numel(), 1)
    correction = 1 if correction is None else correction
    factor = mode.mul(
        mode.inverse(mode.field.number(count - correction)), mode.field.number(count)
    )
    found = mode.mul(biased, factor)
    if not keepdim:
        middle, found = middle.squeeze(tuple(dims)), found.squeeze(tuple(dims))
    return found, middle


def _correction(args: Any, how: dict[str, Any]) -> tuple[Any, Any, bool]:
    args = list(args)
    if args and isinstance(args[0], bool):  # (unbiased)
        return None, int(args[0]), False
    dims = args[0] if args else how.get("dim")
    correction = how.get("correction", 1)
    if len(args) > 1 and isinstance(args[1], bool):
        correction = int(args[1])
    if "unbiased" in how:
        correction = int(how["unbiased"])
    keepdim = args[2] if len(args) > 2 else how.get("keepdim", False)
    return dims, correction, keepdim


@rule("var")
def _var(mode: OverField, t: Tensor, *args: Any, **how: Any) -> Tensor:
    return variance_of(mode, mode.of(t), *_correction(args, how))[0]


@rule("std")
def _std(mode: OverField, t: Tensor, *args: Any, **how: Any) -> Tensor:
    return mode.field.apply(of_one("sqrt"), _var(mode, t, *args, **how))


@rule("var_mean")
def _var_mean(mode: OverField, t: Tensor, *args: Any, **how: Any) -> Any:
    return variance_of(mode, mode.of(t), *_correction(args, how))


@rule("linalg_vector_norm", "norm")
def _norm(
    mode: OverField,
    t: Tensor,
    p: Any = 2,
    dims: Any = None,
    keepdim: bool = False,
    **how: Any,
) -> Tensor:
    x = mode.of(t)
    if p in (2, 2.0, None):
        return mode.field.apply(of_one("sqrt"), mode.sum(mode.mul(x, x), dims, keepdim))
    if p in (1, 1.0):
        return mode.sum(mode.field.apply(of_one("abs"), x), dims, keepdim)
    raise NotDecidedError(f"a norm of order {p}")


# ---------------------------------------------------------------------------- softmax


def _weights(mode: OverField, t: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return exp of a tensor, and its sum, which is kept."""
    exps = mode.exp(t)
    return exps, mode.sum(exps, [dim], True)


@rule("_softmax", "_safe_softmax", "softmax")
def _softmax(mode: OverField, t: Tensor, dim: int, *rest: Any, **how: Any) -> Tensor:
    exps, total = _weights(mode, t, dim)
    empty = (mode.of(t) == -math.inf).all(dim, keepdim=True)
    if bool(empty.any()):
        return mode.mul(exps, mode.field.inverse(total))
    return mode.mul(exps, mode.inverse(total))


@rule("_softmax_backward_data")
def _softmax_backward(
    mode: OverField, g: Tensor, y: Tensor, dim: int, *rest: Any
) -> Tensor:
    g, y = mode.of(g), mode.of(y)
    part = mode.mul(g, y)
    return mode.add(part, -mode.mul(y, mode.sum(part, [dim], True)))


def logsumexp(mode: OverField, t: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    """Return the log of the sum of exps, and that sum."""
    total = mode.sum(mode.exp(t), dims, True)
    return mode.field.apply("log", total), total


@rule("_log_softmax")
def _log_softmax(mode: OverField, t: Tensor, dim: int, *rest: Any) -> Tensor:
    log, total = logsumexp(mode, t, [dim])
    result = _finite_reduced(mode, mode.of(t) - log)
    return mode.remember(result, mode.mul(mode.exp(t), mode.inverse(total)))


@rule("_log_softmax_backward_data")
def _log_softmax_backward(
    mode: OverField, g: Tensor, y: Tensor, dim: int, *rest: Any
) -> Tensor:
    exps, g = mode.exp(y), mode.of(g)
    return mode.add(g, -mode.mul(exps, mode.sum(g, [dim], True)))


@rule("logsumexp")
def _logsumexp(mode: OverField, t: Tensor, dims: Any, keepdim: bool = False) -> Tensor:
    dims = [dims] if isinstance(dims, int) else list(dims)
    log, total = logsumexp(mode, t, dims)
    if not keepdim:
        log, total = log.squeeze(dims).clone(), total.squeeze(dims)
    return mode.remember(log, total)


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
        scores = _finite_reduced(mode, scores + mode.of(mask))
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
    return out, _logsumexp(mode, scores, [-1])


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
    weights = _softmax(mode, scores, -1)
    of_v = mode.matmul(weights.transpose(-2, -1), g)
    of_weights = mode.matmul(g, v.transpose(-2, -1))
    of_scores = mode.mul(_softmax_backward(mode, of_weights, weights, -1), factor)
    of_k = mode.matmul(of_scores.transpose(-2, -1), q)
    of_k, of_v = (
        mode.sum(torch.unflatten(t, 1, (heads, -1)), [2]) for t in (of_k, of_v)
    )
    return mode.matmul(of_scores, k), of_k, of_v


def _for_each_head(q: Tensor, t: Tensor) -> Tensor:
    """Return keys or values, of which some heads of queries may share one."""
    count = q.shape[1] // t.shape[1]
    return t if count == 1 else t.repeat_interleave(count, 1)


# ---------------------------------------------------------------- pooling, resizing


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


for _name in ("avg_pool2d", "avg_pool3d"):
    RULES[_name] = _average(_name)
    RULES[f"{_name}_backward"] = _average_backward(_name)


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
        found.append(mode.of(rows.t().contiguous()))
    return found


def _along(mode: OverField, x: Tensor, matrices: list[Tensor]) -> Tensor:
    first = x.dim() - len(matrices)
    for axis, matrix in enumerate(matrices):
        dim = first + axis
        moved = x.movedim(dim, -1)
        x = mode.matmul(moved, matrix.t()).movedim(-1, dim)
    return x.contiguous()


RESIZES = [
    "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
]


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


def _num_axes(name: str) -> int:
    """Return along how many axes an operation works: 2 of `avg_pool2d`."""
    found = re.search(r"(\d)d", name)
    assert found is not None
    return int(found[1])


for _name in RESIZES:
    RULES[_name] = _resize(_name)
    RULES[f"{_name}_backward"] = _resize_backward(_name)


# -------------------------------------------------------------------------- whatever


@rule("mse_loss")
def _mse(mode: OverField, a: Tensor, b: Tensor, reduction: int = 1) -> Tensor:
    off = mode.add(mode.of(a), -mode.of(b))
    found = mode.mul(off, off)
    return (lambda t: t, lambda t: mean(mode, t), lambda t: mode.sum(t))[reduction](
        found
    )


@rule("mse_loss_backward")
def _mse_backward(
    mode: OverField, g: Tensor, a: Tensor, b: Tensor, reduction: int
) -> Tensor:
    off = mode.mul(mode.add(mode.of(a), -mode.of(b)), 2.0)
    if reduction == 1:
        off = mode.mul(off, mode.inverse(mode.field.number(a.numel())))
    return mode.mul(mode.of(g), off)


@rule("native_dropout_backward")
def _dropout_backward(mode: OverField, g: Tensor, mask: Tensor, scale: float) -> Tensor:
    return mode.mul(mode.mul(mode.of(g), mode.of(mask)), mode.of(scale))
