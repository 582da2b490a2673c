"""Random numbers: drawn as dropout draws them, so that a seed says which."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gemsc.importers.onnx.node import Node, Operator
from gemsc.importers.onnx.operators.shape import torch_type_of
from gemsc.importers.onnx.operators.text import number
from gemsc.importers.sheet import Symbol


def _kind(node: Node, default: torch.dtype) -> str:
    """Return the argument for the type of the result, if it needs one."""
    found = node.attribute("dtype")
    dtype = default if found is None else torch_type_of(node, found)
    if not dtype.is_floating_point:
        raise node.refuse(f"draws {dtype}")
    return f", dtype={dtype}"


def _like(function: str, low: str, high: str) -> Operator:
    """Return the operator that draws as many numbers as its operand has."""

    def operator(node: Node) -> Symbol:
        x = node.value(0)
        kind = _kind(node, x.tensor.dtype)
        kind = "" if kind.endswith(str(x.tensor.dtype)) else kind
        drawn = f"torch.{function}_like({x}{kind})"
        return node.gives(_scaled(node, drawn, low, high))

    return operator


def _shaped(function: str, low: str, high: str) -> Operator:
    """Return the operator that draws numbers of a shape."""

    def operator(node: Node) -> Symbol:
        sizes = ", ".join(map(str, node.attribute("shape")))
        drawn = f"torch.{function}({sizes}{_kind(node, torch.float32)})"
        return node.gives(_scaled(node, drawn, low, high))

    return operator


def _scaled(node: Node, drawn: str, low: str, high: str) -> str:
    """Return numbers between low and high, or around low as far as high."""
    least = node.attribute(low, 0.0)
    factor = node.attribute(high, 1.0) - (least if low == "low" else 0.0)
    text = drawn if factor == 1 else f"{drawn} * {number(factor)}"
    return text if least == 0 else f"{text} + {number(least)}"


def _bernoulli(node: Node) -> Symbol:
    x = node.value(0)
    found = node.attribute("dtype")
    dtype = x.tensor.dtype if found is None else torch_type_of(node, found)
    text = f"torch.bernoulli({x})"
    return node.gives(text if dtype == x.tensor.dtype else f"{text}.to({dtype})")


RANDOM: Mapping[str, Operator] = {
    "Bernoulli": _bernoulli,
    "RandomNormal": _shaped("randn", "mean", "scale"),
    "RandomNormalLike": _like("randn", "mean", "scale"),
    "RandomUniform": _shaped("rand", "low", "high"),
    "RandomUniformLike": _like("rand", "low", "high"),
}
