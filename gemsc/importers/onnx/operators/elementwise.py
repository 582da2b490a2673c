"""Operators on each element: arithmetic, logic, activations, and random numbers."""

from __future__ import annotations

import math
import re
from functools import partial

import numpy as np
import torch
from torch import nn

from gemsc.importers.onnx.operators.node import (
    Node,
    Number,
    dim_of,
    number,
    operator,
    shortest,
)
from gemsc.importers.onnx.operators.parameters import Static, Value, torch_type
from gemsc.importers.sheet import Symbol

ONE = {
    **{
        kind: f"torch.{kind.lower()}({{}})"
        for kind in (
            *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Cos"),
            *("Cosh", "Erf", "Exp", "Floor", "IsNaN", "Log", "Reciprocal", "Round"),
            *("Sigmoid", "Sign", "Sin", "Sinh", "Sqrt", "Tan", "Tanh"),
        )
    },
    **{
        kind: f"F.{kind.lower()}({{}})"
        for kind in ("HardSwish", "Mish", "Relu", "Softplus", "Softsign")
    },
    "BitwiseNot": "~{}",
    "Det": "torch.linalg.det({})",
    "Neg": "-{}",
    "Not": "~{}",
    # with an attribute
    "Celu": "F.celu({}, alpha={alpha})",
    "Elu": "F.elu({}, alpha={alpha})",
    "LeakyRelu": "F.leaky_relu({}, negative_slope={alpha})",
    "ThresholdedRelu": "F.threshold({}, threshold={alpha}, value=0.0)",
}
TWO = {
    "Add": "{} + {}",
    "And": "{} & {}",
    "BitwiseAnd": "{} & {}",
    "BitwiseOr": "{} | {}",
    "BitwiseXor": "{} ^ {}",
    "Equal": "{} == {}",
    "Greater": "{} > {}",
    "GreaterOrEqual": "{} >= {}",
    "Less": "{} < {}",
    "LessOrEqual": "{} <= {}",
    "Mul": "{} * {}",
    "Or": "{} | {}",
    "Sub": "{} - {}",
    "Xor": "{} ^ {}",
}
LARGEST = shortest(float(np.finfo(np.float32).max))
SELU = (1.6732632423543772, 1.0507009873554805)

# ------------------------------------------------------------------------ arithmetic


def _one(text: str, node: Node, x: Symbol) -> Symbol:
    numbers = {k: number(v) for k, v in node.attr.items() if isinstance(v, float)}
    return node.gives(text.format(x, **numbers))


def _two(text: str, node: Node, a: Value, b: Value) -> Symbol:
    return node.gives(text.format(node.term(a), _second(node, a, b)))


def _second(node: Node, a: Value, b: Value) -> str:
    """Return the second operand; before opset 7 it says where its axes stand."""
    if node.attr.axis is None:
        return node.term(b)
    behind = a.rank - node.axis(node.attr.axis, a.rank) - b.rank
    return f"{node.tensor(b)}{'.unsqueeze(-1)' * behind}"


for _kind, _expression in ONE.items():
    operator(_kind)(partial(_one, _expression))
for _kind, _expression in TWO.items():
    operator(_kind)(partial(_two, _expression))


def _type(operand: Value) -> torch.dtype:
    if isinstance(operand, Static):
        return torch_type(operand.dtype)
    return operand.tensor.dtype


@operator("Div")
def _divide(node: Node, a: Value, b: Value) -> Symbol:
    """Division; of integers, towards zero."""
    if _type(a).is_floating_point:
        return node.gives(f"{node.term(a)} / {_second(node, a, b)}")
    # torch.div takes no number first
    divisor = _second(node, a, b)
    return node.gives(f'torch.div({node.tensor(a)}, {divisor}, rounding_mode="trunc")')


@operator("Mod")
def _remainder(node: Node, a: Value, b: Value) -> Symbol:
    """What is left by a division, with the sign of the divisor; fmod: of the other."""
    if node.attr.fmod:
        return node.gives(f"torch.fmod({node.tensor(a)}, {node.term(b)})")
    return node.gives(f"{node.term(a)} % {node.term(b)}")


@operator("Pow")
def _power(node: Node, a: Value, b: Value) -> Symbol:
    """The power, which has the type of the base."""
    text, dtype = f"{node.term(a)} ** {_second(node, a, b)}", _type(a)
    if node.sheet.empty(text).dtype != dtype:
        text = f"({text}).to({dtype})"
    return node.gives(text)


def _of_all(text: str, clamp: str, end: str, node: Node, *operands: Value) -> Symbol:
    """An expression of any number of operands, one pair at a time."""
    if clamp and len(operands) == 2:
        for operand, other in (operands, operands[::-1]):
            bound = node.term(operand)
            if re.fullmatch(r"\(?-?[\d.]\S*", bound):
                return node.gives(f"{node.tensor(other)}.clamp({clamp}={bound})")
    total, *others = (node.tensor(operand) for operand in operands)
    if not others:
        return total
    result = total.text
    for other in others:
        result = text.format(result, other)
    if end:
        result = f"({result}){end.format(len(operands))}"
    return node.gives(result)


operator("Max")(partial(_of_all, "torch.maximum({}, {})", "min", ""))
operator("Mean")(partial(_of_all, "{} + {}", "", " / {}"))
operator("Min")(partial(_of_all, "torch.minimum({}, {})", "max", ""))
operator("Sum")(partial(_of_all, "{} + {}", "", ""))


@operator("BitShift")
def _shift(node: Node, x: Symbol, places: Value) -> Symbol:
    sign = {"LEFT": "<<", "RIGHT": ">>"}.get(node.attr.direction)
    if sign is None:
        raise node.refuse(f"shifts in direction {node.attr.direction!r}")
    return node.gives(f"{x} {sign} {node.term(places)}")


@operator("IsInf")
def _is_infinite(node: Node, x: Symbol) -> Symbol:
    negative, positive = node.attr.detect_negative, node.attr.detect_positive
    if not negative and not positive:
        return node.gives(f"torch.zeros_like({x}, dtype=torch.bool)")
    sign = "" if negative and positive else "neg" if negative else "pos"
    return node.gives(f"torch.is{sign}inf({x})")


@operator("CumSum", "CumProd")
def _cumulative(node: Node, x: Symbol, axis: Number) -> Symbol:
    """The sums or products along an axis up to each element."""
    place = node.axis(int(axis), x.rank)
    flip = f".flip({place})" if node.attr.reverse else ""
    text = f"{x}{flip}.{node.kind.lower()}({place}, dtype={x.tensor.dtype})"
    if node.attr.exclusive:  # the one before
        pads = (*[0, 0] * (x.rank - 1 - place), 1, -1)
        text = f"F.pad({text}, {pads}, value={int(node.kind == 'CumProd')})"
    return node.gives(text + flip)


@operator("Einsum")
def _einsum(node: Node, *values: Symbol) -> Symbol:
    equation = "".join(node.attr.equation.split())
    if not re.fullmatch(r"[A-Za-z.,]*(->[A-Za-z.]*)?", equation):
        raise node.refuse(f"has the equation {equation!r}")
    return node.gives(f'torch.einsum("{equation}", {", ".join(map(str, values))})')


# ----------------------------------------------------------------------- activations


@operator("PRelu")
def _p_relu(node: Node, x: Symbol, slope: Value) -> Symbol:
    """LeakyRelu with trained slopes: a layer if there is one for each channel."""
    shape = slope.shape
    if node.opset < 7 and len(shape) == 1:
        shape = (*shape, *[1] * (x.rank - 2))
    size = math.prod(shape)
    aligned = [1] * (x.rank - len(shape)) + list(shape)
    by_channel = x.rank > 1 and aligned == [1, size, *[1] * (x.rank - 2)]
    if by_channel and isinstance(slope, Static) and slope.trained:
        return node.gives(f"{node.layer(nn.PReLU(size), weight=slope.flat())}({x})")
    factor = f"{node.tensor(slope)}{'.unsqueeze(-1)' * (len(shape) - slope.rank)}"
    return node.gives(f"torch.where({x} < 0, {factor} * {x}, {x})")


@operator("Selu")
def _selu(node: Node, x: Symbol) -> Symbol:
    alpha, gamma = node.attr.alpha, node.attr.gamma
    if np.allclose((alpha, gamma), SELU, rtol=1e-6, atol=0):
        return node.gives(f"F.selu({x})")
    return node.gives(f"{number(gamma)} * F.elu({x}, alpha={number(alpha)})")


@operator("HardSigmoid")
def _hard_sigmoid(node: Node, x: Symbol) -> Symbol:
    alpha, beta = node.attr.alpha, node.attr.beta
    if math.isclose(alpha, 1 / 6, rel_tol=1e-6) and beta == 0.5:
        return node.gives(f"F.hardsigmoid({x})")
    return node.gives(f"({x} * {number(alpha)} + {number(beta)}).clamp(0, 1)")


@operator("Gelu")
def _gelu(node: Node, x: Symbol) -> Symbol:
    approximate = node.attr.approximate
    if approximate not in ("none", "tanh"):
        raise node.refuse(f"approximates by {approximate!r}")
    setting = ', approximate="tanh"' if approximate == "tanh" else ""
    return node.gives(f"F.gelu({x}{setting})")


@operator("Swish", "SwiGLU")
def _swish(node: Node, x: Symbol, value: Symbol | None) -> Symbol:
    factor = "" if value is None else f" * {value}"
    if node.attr.alpha == 1:
        return node.gives(f"F.silu({x}){factor}")
    sigmoid = f"torch.sigmoid({number(node.attr.alpha)} * {x})"
    return node.gives(f"{x} * {sigmoid}{factor}")


@operator("Shrink")
def _shrink(node: Node, x: Symbol) -> Symbol:
    bias, lambd = node.attr.bias, node.attr.lambd
    if x.tensor.is_floating_point() and lambd >= 0 and bias in (0, lambd):
        kind = "soft" if bias else "hard"
        return node.gives(f"F.{kind}shrink({x}, lambd={number(lambd)})")
    step = number(bias)
    above = f"torch.where({x} > {number(lambd)}, {x} - {step}, 0)"
    text = f"torch.where({x} < {number(-lambd)}, {x} + {step}, {above})"
    return node.gives(f"{text}.to({x.tensor.dtype})")


@operator("Clip")
def _clip(node: Node, x: Symbol, low: Value | None, high: Value | None) -> Symbol:
    """The elements cut at bounds, which are attributes before opset 11."""
    bounds = {}
    for name, operand in (("min", low), ("max", high)):
        if operand is not None:
            bounds[name] = node.term(operand)
        elif abs(node.attr.get(name, LARGEST)) < LARGEST:
            bounds[name] = number(node.attr[name])
    if not bounds:
        return x
    if bounds == {"min": "0.0", "max": "6.0"} and x.tensor.is_floating_point():
        return node.gives(f"F.relu6({x})")
    return node.gives(x.text + "".join(f".clamp({k}={v})" for k, v in bounds.items()))


def _along(text: str, node: Node, x: Symbol) -> Symbol:
    """An expression along an axis; before opset 13 it is of all axes from one."""
    place = node.axis(node.attr.axis, x.rank)
    if node.opset > 12 or math.prod(x.shape[place + 1 :]) == 1:
        return node.gives(text.format(x=x, dim=dim_of(place, x.rank)))
    flat = text.format(x=f"{x}.flatten({place})", dim=-1)
    return node.gives(f"{flat}.unflatten(-1, {x.shape[place:]})")


operator("Softmax")(partial(_along, "F.softmax({x}, dim={dim})"))
operator("LogSoftmax")(partial(_along, "F.log_softmax({x}, dim={dim})"))
HARDMAX = "torch.zeros_like({x}).scatter({dim}, {x}.argmax({dim}, keepdim=True), 1)"
operator("Hardmax")(partial(_along, HARDMAX))

# -------------------------------------------------------------------- random numbers


@operator("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
def _draw(node: Node, x: Symbol | None) -> Symbol:
    """Random numbers of a shape, or as many as an operand has."""
    default = torch.float32 if x is None else x.tensor.dtype
    kind = default if node.attr.dtype is None else node.dtype(node.attr.dtype)
    if not kind.is_floating_point:
        raise node.refuse(f"draws {kind}")
    is_normal = "Normal" in node.kind
    function = f"torch.{'randn' if is_normal else 'rand'}"
    if x is None:
        sizes = ", ".join(map(str, node.attr.shape)) or "()"
        text = f"{function}({sizes}, dtype={kind})"
    else:
        setting = "" if kind == x.tensor.dtype else f", dtype={kind}"
        text = f"{function}_like({x}{setting})"
    if is_normal:
        least, factor = node.attr.mean, node.attr.scale
    else:
        least, factor = node.attr.low, node.attr.high - node.attr.low
    text += "" if factor == 1 else f" * {number(factor)}"
    return node.gives(text if least == 0 else f"{text} + {number(least)}")


@operator("Bernoulli")
def _bernoulli(node: Node, x: Symbol) -> Symbol:
    kind = x.tensor.dtype if node.attr.dtype is None else node.dtype(node.attr.dtype)
    text = f"torch.bernoulli({x})"
    return node.gives(text if kind == x.tensor.dtype else f"{text}.to({kind})")
