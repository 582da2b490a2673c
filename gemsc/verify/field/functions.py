"""Functions of one number: each is drawn at random, as is its slope."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gemsc.verify.field.dispatch import Rule, Rules
from gemsc.verify.field.mode import OverField
from gemsc.verify.field.numbers import NotDecidedError

__all__ = ["BACKWARDS", "FUNCTIONS", "RULES", "of_one"]

RULES = Rules()
FUNCTIONS = (
    *("relu", "gelu", "silu", "sigmoid", "tanh", "softplus", "elu"),
    *("leaky_relu", "hardtanh", "hardswish", "hardsigmoid", "mish", "erf"),
    *("erfc", "sin", "cos", "tan", "atan", "asin", "acos", "sinh", "cosh"),
    *("log1p", "log2", "log10", "expm1", "exp2", "sqrt", "abs"),
    *("sign", "sgn", "selu", "celu", "relu6", "log_sigmoid_forward"),
    *("softshrink", "hardshrink", "threshold", "round", "floor", "ceil"),
    *("trunc", "logit", "sinc", "erfinv", "lgamma", "digamma"),
)
BACKWARDS = (
    *("threshold_backward", "gelu_backward", "silu_backward"),
    *("sigmoid_backward", "tanh_backward", "softplus_backward"),
    *("elu_backward", "leaky_relu_backward", "hardtanh_backward"),
    *("hardswish_backward", "hardsigmoid_backward", "mish_backward"),
    *("log_sigmoid_backward", "softshrink_backward", "hardshrink_backward"),
    *("logit_backward",),
)


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


@RULES.of("rsqrt")
def _rsqrt(mode: OverField, t: Tensor) -> Any:
    return mode.inverse(mode.field.apply(of_one("sqrt"), mode.of(t)))


@RULES.of("exp")
def _exp(mode: OverField, t: Tensor) -> Tensor:
    return mode.exp(t)


@RULES.of("log")
def _log(mode: OverField, t: Tensor) -> Tensor:
    x = mode.of(t)
    return mode.remember(mode.field.apply("log", x), x, is_log=True)


@RULES.of("xlogy")
def _xlogy(mode: OverField, a: Any, b: Any) -> Tensor:
    log = mode.field.apply("log", torch.as_tensor(mode.of(b)))
    return mode.mul(mode.of(a), log)


for _name in FUNCTIONS:
    RULES[_name] = _function(_name)
for _name in BACKWARDS:
    RULES[_name] = _slope(_name)
