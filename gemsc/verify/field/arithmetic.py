"""Functions, sums and products of numbers of a field, and their order.

Functions of one number are drawn at random, as is the slope of each; so is the order of
numbers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from gemsc.verify.field.mode import RULES, OverField, names, rule
from gemsc.verify.field.numbers import LONGEST, SMALL, NotDecidedError

aten = torch.ops.aten

FUNCTIONS = names(
    "relu gelu silu sigmoid tanh softplus elu leaky_relu hardtanh hardswish "
    "hardsigmoid mish erf erfc sin cos tan atan asin acos sinh cosh log1p log2 "
    "log10 expm1 exp2 sqrt abs sign sgn selu celu relu6 log_sigmoid_forward "
    "softshrink hardshrink threshold round floor ceil trunc logit sinc erfinv "
    "lgamma digamma"
)
BACKWARDS = names(
    "threshold_backward gelu_backward silu_backward sigmoid_backward "
    "tanh_backward softplus_backward elu_backward leaky_relu_backward "
    "hardtanh_backward hardswish_backward hardsigmoid_backward mish_backward "
    "log_sigmoid_backward softshrink_backward hardshrink_backward logit_backward"
)


_SQRT = str(("sqrt", (), []))  # the key of a function of one tensor alone


def _function(name: str, mode: OverField, t: Tensor, *args: Any, **how: Any) -> Any:
    if any(isinstance(arg, Tensor) for arg in args):
        raise NotDecidedError(name)
    result = mode.field.apply((name, args, sorted(how.items())), mode.of(t))
    if name == "log_sigmoid_forward":
        return result, torch.zeros_like(result)
    return result


def _slope(name: str, mode: OverField, g: Tensor, *args: Any, **how: Any) -> Any:
    how.pop("grad_input", None)
    tensors = [mode.of(t) for t in args if isinstance(t, Tensor)]
    numbers = [arg for arg in args if not isinstance(arg, Tensor)]
    key = (name, numbers, sorted(how.items()))
    return mode.mul(mode.of(g), mode.field.apply(key, tensors[0]))


RULES |= {
    "exp": OverField.exp,
    "mul": lambda mode, a, b: mode.mul(mode.of(a), mode.of(b)),
    "reciprocal": lambda mode, a: mode.inverse(mode.of(a)),
    "rsqrt": lambda mode, a: mode.inverse(mode.field.apply(_SQRT, mode.of(a))),
    "add": lambda mode, a, b, alpha=1: _sum_of_two(mode, a, b, mode.of(alpha)),
    "sub": lambda mode, a, b, alpha=1: _sum_of_two(mode, a, b, -mode.of(alpha)),
}


@rule("log")
def _log(mode: OverField, t: Tensor) -> Tensor:
    x = mode.of(t)
    return mode.remember(mode.field.apply("log", x), x, is_log=True)


@rule("xlogy")
def _xlogy(mode: OverField, a: Any, b: Any) -> Tensor:
    log = mode.field.apply("log", torch.as_tensor(mode.of(b)))
    return mode.mul(mode.of(a), log)


for _name in FUNCTIONS:
    RULES[_name] = partial(_function, _name)
for _name in BACKWARDS:
    RULES[_name] = partial(_slope, _name)


def counted(mode: OverField, value: Any) -> Tensor | None:
    """Return what counts something as float64: it has small integers alone.

    Drawn numbers are none, but by chance.
    """
    numbers = mode.of(value)
    if not isinstance(numbers, Tensor):
        numbers = torch.tensor(numbers, dtype=torch.float64)
    return numbers if bool((numbers.abs() <= SMALL).all()) else None


# what only adds numbers up
SUMS = names(
    "index_add scatter_add index_put _index_put_impl _unsafe_index_put "
    "embedding_dense_backward upsample_nearest1d_backward "
    "upsample_nearest2d_backward upsample_nearest3d_backward "
    "_upsample_nearest_exact2d_backward unfold_backward col2im "
    "replication_pad1d_backward replication_pad2d_backward "
    "replication_pad3d_backward reflection_pad1d_backward "
    "reflection_pad2d_backward reflection_pad3d_backward "
    "max_pool2d_with_indices_backward max_pool3d_with_indices_backward "
    "adaptive_max_pool2d_backward adaptive_max_pool3d_backward "
    "index_select_backward trace value_selecting_reduction_backward"
)


def _sum_of_two(mode: OverField, a: Any, b: Any, factor: float) -> Tensor:
    x, y = mode.of(a), mode.of(b)
    if factor == 1.0:
        total = x + y
    elif factor == -1.0:
        total = x - y
    else:
        total = x + mode.mul(y, factor)
    result: Tensor = mode.reduced(total)
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


@rule("neg")
def _neg(mode: OverField, a: Tensor) -> Any:
    result = -mode.of(a)
    if mode.has_exp(a):
        mode.remember(result, mode.inverse(mode.exp(a)))
    return result


@rule("div")
def _div(mode: OverField, a: Any, b: Any, rounding_mode: Any = None) -> Any:
    if rounding_mode is not None:
        counts = [counted(mode, value) for value in (a, b)]
        if any(count is None for count in counts):
            raise NotDecidedError(f"a division rounded by {rounding_mode}")
        return aten.div(*counts, rounding_mode=rounding_mode)
    return mode.mul(mode.of(a), mode.inverse(mode.of(b)))


@rule("pow")
def _pow(mode: OverField, a: Any, b: Any) -> Any:
    if not isinstance(b, Tensor):
        return _power(mode, mode.of(a), b)
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
        result[here] = _power(mode, x[here], n)
    return result


def _power(mode: OverField, x: Tensor, n: float) -> Any:
    if n < 0:
        return mode.inverse(_power(mode, x, -n))
    if n != int(n):
        return mode.field.apply(_SQRT if n == 0.5 else ("pow", n), x)
    result, square, exponent = torch.ones_like(x), x, int(n)
    while exponent:
        if exponent % 2:
            result = mode.mul(result, square)
        square, exponent = mode.mul(square, square), exponent // 2
    return result


@rule("sum")
def _sum(
    mode: OverField, t: Tensor, dims: Any = None, keepdim: bool = False, **how: Any
) -> Tensor:
    return mode.sum(mode.of(t), dims, keepdim)


@rule("mean")
def _mean(
    mode: OverField, t: Tensor, dims: Any = None, keepdim: bool = False, **how: Any
) -> Tensor:
    return _mean_of(mode, mode.of(t), dims, keepdim)


def _mean_of(mode: OverField, t: Tensor, dims: Any, keepdim: bool) -> Tensor:
    total = mode.sum(t, dims, keepdim)
    count = t.numel() // max(total.numel(), 1)
    return mode.mul(total, mode.inverse(mode.field.number(count)))


@rule("cumsum")
def _cumsum(mode: OverField, t: Tensor, dim: int, **how: Any) -> Tensor:
    return mode.field.reduced(mode.of(t).cumsum(dim))


@rule("var")
def _var(mode: OverField, t: Tensor, *args: Any, **how: Any) -> Tensor:
    return _variance_of(mode, mode.of(t), *_correction(args, how))[0]


@rule("var_mean")
def _var_mean(mode: OverField, t: Tensor, *args: Any, **how: Any) -> Any:
    return _variance_of(mode, mode.of(t), *_correction(args, how))


def _variance_of(
    mode: OverField, x: Tensor, dims: Any, correction: Any, keepdim: bool
) -> tuple[Tensor, Tensor]:
    dims = list(range(x.dim())) if dims is None or not dims else list(dims)
    middle = _mean_of(mode, x, dims, True)
    off = mode.add(x, -middle)
    biased = _mean_of(mode, mode.mul(off, off), dims, True)
    count = x.numel() // max(middle.numel(), 1)
    correction = 1 if correction is None else correction
    factor = mode.mul(
        mode.inverse(mode.field.number(count - correction)), mode.field.number(count)
    )
    variance = mode.mul(biased, factor)
    if not keepdim:
        middle, variance = middle.squeeze(tuple(dims)), variance.squeeze(tuple(dims))
    return variance, middle


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


@rule("mm", "bmm", "mv", "dot")
def _mm(mode: OverField, a: Tensor, b: Tensor) -> Tensor:
    x, y = mode.of(a), mode.of(b)
    if y.dim() == 1:
        return mode.matmul(x, y.unsqueeze(1)).squeeze(-1)
    return mode.matmul(x, y)


@rule("convolution")
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
    backward = aten.convolution_backward
    mine = of_weight = of_bias = None
    if mask[0]:
        mine = backward(g, x, weight, None, *shape, [True, False, False])[0]
        mode.field.reduced(mine)
    if mask[1]:
        for gs, xs in zip(torch.split(g, step), torch.split(x, step), strict=True):
            part = backward(gs, xs, weight, None, *shape, [False, True, False])[1]
            mode.field.reduced(part)
            of_weight = part if of_weight is None else mode.add(of_weight, part)
    if mask[2]:
        of_bias = mode.sum(g, [0, *range(2, g.dim())])
    return mine, of_weight, of_bias


def _summing(name: str, mode: OverField, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("alpha", 1) != 1:
        raise NotDecidedError(f"{name} with alpha")
    if name == "embedding_dense_backward" and args[4]:
        raise NotDecidedError("an embedding with scale_grad_by_freq")
    values = (
        mode.of(a) if isinstance(a, Tensor) and a.is_floating_point() else a
        for a in args
    )
    return mode.reduced(getattr(aten, name)(*values, **kwargs))


for _name in SUMS:
    RULES[_name] = partial(_summing, _name)


_TWO = names("gt ge lt le maximum minimum fmax fmin")
_BOUNDED = names("clamp clamp_min clamp_max")
_CHOOSES = names(
    "amax amin max min argmax argmin sort topk max_pool2d_with_indices "
    "max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d kthvalue "
    "aminmax median cummax cummin mode"
)
ORDERED = _TWO | _BOUNDED | _CHOOSES


def _ordered(name: str, mode: OverField, t: Any, *args: Any, **how: Any) -> Any:
    """Choose among numbers by their order."""

    def place(value: Any) -> Any:
        if not isinstance(value, Tensor):
            value = torch.tensor(mode.scalar(value), dtype=torch.float64)
        return mode.field.ordered(mode.of(value))

    def number(chosen: Any) -> Any:
        is_place = isinstance(chosen, Tensor) and chosen.is_floating_point()
        return mode.field.from_order(chosen) if is_place else chosen

    if name in _BOUNDED:
        names = {"clamp": ("min", "max")}.get(name, (name[-3:],))
        bounds = dict(zip(names, args, strict=False)) | how
        chosen = place(t)
        if bounds.get("min") is not None:
            chosen = torch.maximum(chosen, place(bounds["min"]))
        if bounds.get("max") is not None:
            chosen = torch.minimum(chosen, place(bounds["max"]))
    elif name in _TWO:
        chosen = getattr(aten, name)(place(t), place(*args), **how)
    else:
        chosen = getattr(aten, name)(place(t), *args, **how)
    if isinstance(chosen, tuple | list):
        return tuple(map(number, chosen))
    return number(chosen)


def _same(name: str, mode: OverField, *args: Any, **how: Any) -> Any:
    """Ask whether numbers are the same, or 0."""

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            return mode.of(value)
        if type(value) in (int, float) and name in ("eq", "ne"):
            return mode.scalar(value)
        return value

    return getattr(aten, name)(*map(plain, args), **how)


for _name in ORDERED:
    RULES[_name] = partial(_ordered, _name)
for _name in names("eq ne any all logical_and logical_or logical_not logical_xor"):
    RULES[_name] = partial(_same, _name)
