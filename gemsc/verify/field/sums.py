"""Sums and products, of two numbers, over dimensions, of matrices and in windows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gemsc.verify.field.dispatch import Rule, Rules
from gemsc.verify.field.functions import of_one
from gemsc.verify.field.mode import OverField
from gemsc.verify.field.moves import counted
from gemsc.verify.field.numbers import LONGEST, SMALL, NotDecidedError

__all__ = ["RULES", "SUMS"]

aten = torch.ops.aten
RULES = Rules()
# what only adds numbers up
SUMS = (
    *("index_add", "scatter_add", "index_put", "_index_put_impl"),
    *("_unsafe_index_put", "embedding_dense_backward"),
    *("upsample_nearest1d_backward", "upsample_nearest2d_backward"),
    *("upsample_nearest3d_backward", "_upsample_nearest_exact2d_backward"),
    *("unfold_backward", "col2im", "replication_pad1d_backward"),
    *("replication_pad2d_backward", "replication_pad3d_backward"),
    *("reflection_pad1d_backward", "reflection_pad2d_backward"),
    *("reflection_pad3d_backward", "max_pool2d_with_indices_backward"),
    *("max_pool3d_with_indices_backward", "adaptive_max_pool2d_backward"),
    *("adaptive_max_pool3d_backward", "index_select_backward", "trace"),
    *("value_selecting_reduction_backward",),
)


@RULES.of("add")
def _add(mode: OverField, a: Any, b: Any, alpha: Any = 1) -> Tensor:
    return _sum_of_two(mode, a, b, mode.of(alpha))


@RULES.of("sub")
def _sub(mode: OverField, a: Any, b: Any, alpha: Any = 1) -> Tensor:
    return _sum_of_two(mode, a, b, -mode.of(alpha))


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


@RULES.of("mul")
def _mul(mode: OverField, a: Any, b: Any) -> Tensor:
    return mode.mul(mode.of(a), mode.of(b))


@RULES.of("neg")
def _neg(mode: OverField, a: Tensor) -> Any:
    result = -mode.of(a)
    if mode.has_exp(a):
        mode.remember(result, mode.inverse(mode.exp(a)))
    return result


@RULES.of("div")
def _div(mode: OverField, a: Any, b: Any, rounding_mode: Any = None) -> Any:
    if rounding_mode is not None:
        counts = [counted(mode, value) for value in (a, b)]
        if any(each is None for each in counts):
            raise NotDecidedError(f"a division rounded by {rounding_mode}")
        return aten.div(*counts, rounding_mode=rounding_mode)
    return mode.mul(mode.of(a), mode.inverse(mode.of(b)))


@RULES.of("reciprocal")
def _reciprocal(mode: OverField, a: Tensor) -> Any:
    return mode.inverse(mode.of(a))


@RULES.of("pow")
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
    if n < 0:
        return mode.inverse(power(mode, x, -n))
    if n != int(n):
        return mode.field.apply(of_one("sqrt") if n == 0.5 else ("pow", n), x)
    result, square, rest = torch.ones_like(x), x, int(n)
    while rest:
        if rest % 2:
            result = mode.mul(result, square)
        square, rest = mode.mul(square, square), rest // 2
    return result


@RULES.of("sum")
def _sum(
    mode: OverField, t: Tensor, dims: Any = None, keepdim: bool = False, **how: Any
) -> Tensor:
    return mode.sum(mode.of(t), dims, keepdim)


@RULES.of("mean")
def _mean(
    mode: OverField, t: Tensor, dims: Any = None, keepdim: bool = False, **how: Any
) -> Tensor:
    return mean(mode, mode.of(t), dims, keepdim)


def mean(mode: OverField, t: Tensor, dims: Any = None, keepdim: bool = False) -> Tensor:
    total = mode.sum(t, dims, keepdim)
    return mode.mul(
        total, mode.inverse(mode.field.number(t.numel() // max(total.numel(), 1)))
    )


@RULES.of("cumsum")
def _cumsum(mode: OverField, t: Tensor, dim: int, **how: Any) -> Tensor:
    return mode.field.reduced(mode.of(t).cumsum(dim))


@RULES.of("var")
def _var(mode: OverField, t: Tensor, *args: Any, **how: Any) -> Tensor:
    return variance_of(mode, mode.of(t), *_correction(args, how))[0]


@RULES.of("var_mean")
def _var_mean(mode: OverField, t: Tensor, *args: Any, **how: Any) -> Any:
    return variance_of(mode, mode.of(t), *_correction(args, how))


def variance_of(
    mode: OverField, x: Tensor, dims: Any, correction: Any, keepdim: bool
) -> tuple[Tensor, Tensor]:
    dims = list(range(x.dim())) if dims is None or not dims else list(dims)
    middle = mean(mode, x, dims, True)
    off = mode.add(x, -middle)
    biased = mean(mode, mode.mul(off, off), dims, True)
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


@RULES.of("mm", "bmm", "mv", "dot")
def _mm(mode: OverField, a: Tensor, b: Tensor) -> Tensor:
    x, y = mode.of(a), mode.of(b)
    if y.dim() == 1:
        return mode.matmul(x, y.unsqueeze(1)).squeeze(-1)
    return mode.matmul(x, y)


@RULES.of("convolution")
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


@RULES.of("convolution_backward")
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
        return mode.reduced(getattr(aten, name)(*values, **kwargs))

    return run


for _name in SUMS:
    RULES[_name] = _summing(_name)
