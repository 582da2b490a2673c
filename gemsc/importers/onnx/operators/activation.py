"""Activations: functions of each element, and softmax."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from torch import nn

from gemsc.importers.onnx.node import Node, Operator
from gemsc.importers.onnx.operators.text import (
    axis_of,
    dim_of,
    number,
    of_numbers,
    term,
)
from gemsc.importers.sheet import Symbol


def _called(function: str, **attributes: tuple[str, float]) -> Operator:
    """Return the operator that calls a function.

    `attributes` are arguments of the function with the node's attribute and what that
    is where the file leaves it out.
    """

    def operator(node: Node) -> Symbol:
        arguments = [node.value(0).text]
        for argument, (name, default) in attributes.items():
            arguments.append(f"{argument}={number(node.attribute(name, default))}")
        return node.gives(f"{function}({', '.join(arguments)})")

    return operator


def _p_relu(node: Node) -> Symbol:
    x, slope, operand = node.value(0), node.weight(1), node.operand(1)
    assert operand is not None
    rank, shape = len(x.shape), operand.shape
    if node.opset < 7 and len(shape) == 1:
        shape = (*shape, *[1] * (rank - 2))
    size = math.prod(shape)
    aligned = [1] * (rank - len(shape)) + list(shape)
    by_channel = rank > 1 and aligned == [1, size, *[1] * (rank - 2)]
    if by_channel and slope is not None and slope.trained:
        weight = slope.weight.then(lambda array: array.reshape(-1))
        flat = replace(slope, shape=(size,), weight=weight)
        return node.gives(f"{node.layer(nn.PReLU(size), weight=flat)}({x})")
    factor = node.value(1).text
    factor += ".unsqueeze(-1)" * (len(shape) - len(operand.shape))
    return node.gives(f"torch.where({x} < 0, {factor} * {x}, {x})")


def _selu(node: Node) -> Symbol:
    x = node.value(0)
    alpha = node.attribute("alpha", _SELU[0])
    gamma = node.attribute("gamma", _SELU[1])
    if np.allclose((alpha, gamma), _SELU, rtol=1e-6, atol=0):
        return node.gives(f"F.selu({x})")
    return node.gives(f"{number(gamma)} * F.elu({x}, alpha={number(alpha)})")


_SELU = (1.6732632423543772, 1.0507009873554805)


def _hard_sigmoid(node: Node) -> Symbol:
    x = node.value(0)
    alpha, beta = node.attribute("alpha", 0.2), node.attribute("beta", 0.5)
    if math.isclose(alpha, 1 / 6, rel_tol=1e-6) and beta == 0.5:
        return node.gives(f"F.hardsigmoid({x})")
    return node.gives(f"({x} * {number(alpha)} + {number(beta)}).clamp(0, 1)")


def _gelu(node: Node) -> Symbol:
    approximate = node.attribute("approximate", "none")
    if approximate not in ("none", "tanh"):
        raise node.refuse(f"approximates by {approximate!r}")
    setting = ', approximate="tanh"' if approximate == "tanh" else ""
    return node.gives(f"F.gelu({node.value(0)}{setting})")


def _swish(node: Node) -> Symbol:
    x, alpha = node.value(0), node.attribute("alpha", 1.0)
    if alpha == 1:
        return node.gives(f"F.silu({x})")
    return node.gives(f"{x} * torch.sigmoid({number(alpha)} * {x})")


def _shrink(node: Node) -> Symbol:
    x = node.value(0)
    bias, limit = node.attribute("bias", 0.0), node.attribute("lambd", 0.5)
    if x.tensor.is_floating_point() and limit >= 0:
        if bias == 0:
            return node.gives(f"F.hardshrink({x}, lambd={number(limit)})")
        if bias == limit:
            return node.gives(f"F.softshrink({x}, lambd={number(limit)})")
    low, high = f"{x} < {number(-limit)}", f"{x} > {number(limit)}"
    least = number(bias)
    inner = f"torch.where({high}, {x} - {least}, 0)"
    text = f"torch.where({low}, {x} + {least}, {inner})"
    return node.gives(f"{text}.to({x.tensor.dtype})")


def _clip(node: Node) -> Symbol:
    x = node.value(0)
    if node.opset < 11:
        limits = {name: node.attribute(name) for name in ("min", "max")}
        bounds = {k: number(v) for k, v in limits.items() if v is not None}
    else:
        pairs = (("min", 1), ("max", 2))
        bounds = {k: term(node, i) for k, i in pairs if node.operand(i) is not None}
    if not bounds:
        return x
    if bounds == {"min": "0.0", "max": "6.0"} and x.tensor.is_floating_point():
        return node.gives(f"F.relu6({x})")
    return node.gives(x.text + "".join(f".clamp({k}={v})" for k, v in bounds.items()))


def _soft(function: str) -> Operator:
    """Return softmax or its logarithm; before opset 13 it is of all axes from one."""

    def operator(node: Node) -> Symbol:
        x = node.value(0)
        rank = len(x.shape)
        axis = axis_of(node, node.attribute("axis", -1 if node.opset > 12 else 1), rank)
        if node.opset > 12 or math.prod(x.shape[axis + 1 :]) == 1:
            return node.gives(f"{function}({x}, dim={dim_of(axis, rank)})")
        flat = f"{function}({x}.flatten({axis}), dim=-1)"
        return node.gives(f"{flat}.unflatten(-1, {x.shape[axis:]})")

    return operator


def _hardmax(node: Node) -> Symbol:
    x = node.value(0)
    rank = len(x.shape)
    axis = axis_of(node, node.attribute("axis", -1 if node.opset > 12 else 1), rank)
    if node.opset > 12 or math.prod(x.shape[axis + 1 :]) == 1:
        largest = f"{x}.argmax({axis}, keepdim=True)"
        return node.gives(f"torch.zeros_like({x}).scatter({axis}, {largest}, 1)")
    flat = f"{x}.flatten({axis})"
    largest = f"{flat}.argmax(-1, keepdim=True)"
    found = f"torch.zeros_like({flat}).scatter(-1, {largest}, 1)"
    return node.gives(f"{found}.unflatten(-1, {x.shape[axis:]})")


ACTIVATIONS: Mapping[str, Operator] = of_numbers(
    {
        "Celu": _called("F.celu", alpha=("alpha", 1.0)),
        "Clip": _clip,
        "Elu": _called("F.elu", alpha=("alpha", 1.0)),
        "Erf": _called("torch.erf"),
        "Gelu": _gelu,
        "HardSigmoid": _hard_sigmoid,
        "HardSwish": _called("F.hardswish"),
        "Hardmax": _hardmax,
        "LeakyRelu": _called("F.leaky_relu", negative_slope=("alpha", 0.01)),
        "LogSoftmax": _soft("F.log_softmax"),
        "Mish": _called("F.mish"),
        "PRelu": _p_relu,
        "Relu": _called("F.relu"),
        "Selu": _selu,
        "Shrink": _shrink,
        "Sigmoid": _called("torch.sigmoid"),
        "Softmax": _soft("F.softmax"),
        "Softplus": _called("F.softplus"),
        "Softsign": _called("F.softsign"),
        "Swish": _swish,
        "Tanh": _called("torch.tanh"),
        "ThresholdedRelu": _called(
            "F.threshold", threshold=("alpha", 1.0), value=("", 0.0)
        ),
    }
)
