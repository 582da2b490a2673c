"""Arithmetic, comparisons and logic: what PyTorch writes with signs and functions."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from gemsc.importers.onnx.node import Node, Operator
from gemsc.importers.onnx.operators.text import axis_of, number, of_numbers, term
from gemsc.importers.onnx.static import Static, torch_type
from gemsc.importers.sheet import Symbol


def _one(text: str) -> Operator:
    """Return the operator of one operand that an expression computes."""
    return lambda node: node.gives(text.format(node.value(0)))


def _two(text: str) -> Operator:
    """Return the operator of two operands that an expression computes."""
    return lambda node: node.gives(text.format(term(node, 0), _second(node)))


def _second(node: Node) -> str:
    """Return the second operand; before opset 7 it says where its axes stand."""
    axis, other = node.attribute("axis"), node.operand(1)
    if node.opset > 6 or axis is None or other is None:
        return term(node, 1)
    rank = len(node.value(0).shape)
    behind = rank - axis_of(node, axis, rank) - len(other.shape)
    return f"{node.value(1)}{'.unsqueeze(-1)' * behind}"


def _kind(node: Node, index: int) -> torch.dtype:
    """Return the type of an operand."""
    operand = node.operand(index)
    if isinstance(operand, Static):
        return torch_type(operand.dtype)
    return node.value(index).tensor.dtype


def _div(node: Node) -> Symbol:
    a, b = term(node, 0), term(node, 1)
    if _kind(node, 0).is_floating_point:
        return node.gives(f"{a} / {b}")
    if not isinstance(node.operand(0), Symbol):
        a = node.value(0).text  # torch.div takes no number there
    return node.gives(f'torch.div({a}, {b}, rounding_mode="trunc")')


def _mod(node: Node) -> Symbol:
    a, b = term(node, 0), term(node, 1)
    if node.attribute("fmod", 0):
        return node.gives(f"torch.fmod({node.value(0)}, {b})")
    return node.gives(f"{a} % {b}")


def _pow(node: Node) -> Symbol:
    """Return the power, which has the type of the base."""
    dtype = _kind(node, 0)
    text = f"{term(node, 0)} ** {_second(node)}"
    if node.sheet.empty(text).dtype != dtype:
        text = f"({text}).to({dtype})"
    return node.gives(text)


def _of_all(text: str, function: str = "", end: str = "") -> Operator:
    """Return the operator of any number of operands, one pair at a time."""

    def operator(node: Node) -> Symbol:
        count = len(node.operands)
        if function and count == 2:
            for one, other in ((0, 1), (1, 0)):
                bound = term(node, one)
                if re.fullmatch(r"\(?-?[\d.]\S*", bound):
                    return node.gives(f"{node.value(other)}.clamp({function}={bound})")
        found = node.value(0).text
        for index in range(1, count):
            found = text.format(found, node.value(index))
        if end and count > 1:
            found = f"({found}){end.format(count)}"
        return node.gives(found) if count > 1 else node.value(0)

    return operator


def _bit_shift(node: Node) -> Symbol:
    sign = {"LEFT": "<<", "RIGHT": ">>"}.get(node.attribute("direction"))
    if sign is None:
        raise node.refuse(f"shifts in direction {node.attribute('direction')!r}")
    return node.gives(f"{node.value(0)} {sign} {term(node, 1)}")


def _is_inf(node: Node) -> Symbol:
    x = node.value(0)
    signs = [
        sign
        for sign, name in (("neg", "detect_negative"), ("pos", "detect_positive"))
        if node.attribute(name, 1)
    ]
    if len(signs) == 2:
        return node.gives(f"torch.isinf({x})")
    if not signs:
        return node.gives(f"torch.zeros_like({x}, dtype=torch.bool)")
    return node.gives(f"torch.is{signs[0]}inf({x})")


def _cumulative(function: str, neutral: int) -> Operator:
    """Return the sums or products along an axis up to each element."""

    def operator(node: Node) -> Symbol:
        x = node.value(0)
        rank = len(x.shape)
        found = node.array(1)
        assert found is not None
        axis = axis_of(node, int(found.reshape(-1)[0]), rank)
        text = x.text
        if node.attribute("reverse", 0):
            text += f".flip({axis})"
        text += f".{function}({axis}, dtype={x.tensor.dtype})"
        if node.attribute("exclusive", 0):  # the one before
            pads = [0, 0] * (rank - 1 - axis) + [1, -1]
            text = f"F.pad({text}, {tuple(pads)}, value={neutral})"
        if node.attribute("reverse", 0):
            text += f".flip({axis})"
        return node.gives(text)

    return operator


def _einsum(node: Node) -> Symbol:
    equation = "".join(node.attribute("equation", "").split())
    if not re.fullmatch(r"[A-Za-z.,]*(->[A-Za-z.]*)?", equation):
        raise node.refuse(f"has the equation {equation!r}")
    values = [node.value(index).text for index in range(len(node.operands))]
    return node.gives(f'torch.einsum("{equation}", {", ".join(values)})')


def _swi_glu(node: Node) -> Symbol:
    gate, value, alpha = node.value(0), node.value(1), node.attribute("alpha", 1.0)
    if alpha == 1:
        return node.gives(f"F.silu({gate}) * {value}")
    return node.gives(f"{gate} * torch.sigmoid({number(alpha)} * {gate}) * {value}")


ARITHMETIC: Mapping[str, Operator] = of_numbers(
    {
        "Add": _two("{} + {}"),
        "And": _two("{} & {}"),
        "BitShift": _bit_shift,
        "BitwiseAnd": _two("{} & {}"),
        "BitwiseNot": _one("~{}"),
        "BitwiseOr": _two("{} | {}"),
        "BitwiseXor": _two("{} ^ {}"),
        "CumProd": _cumulative("cumprod", 1),
        "CumSum": _cumulative("cumsum", 0),
        "Det": _one("torch.linalg.det({})"),
        "Div": _div,
        "Einsum": _einsum,
        "Equal": _two("{} == {}"),
        "Greater": _two("{} > {}"),
        "GreaterOrEqual": _two("{} >= {}"),
        "IsInf": _is_inf,
        "IsNaN": _one("torch.isnan({})"),
        "Less": _two("{} < {}"),
        "LessOrEqual": _two("{} <= {}"),
        "Max": _of_all("torch.maximum({}, {})", "min"),
        "Mean": _of_all("{} + {}", end=" / {}"),
        "Min": _of_all("torch.minimum({}, {})", "max"),
        "Mod": _mod,
        "Mul": _two("{} * {}"),
        "Neg": _one("-{}"),
        "Not": _one("~{}"),
        "Or": _two("{} | {}"),
        "Pow": _pow,
        "Sub": _two("{} - {}"),
        "Sum": _of_all("{} + {}"),
        "SwiGLU": _swi_glu,
        "Xor": _two("{} ^ {}"),
        **{
            kind: _one(f"torch.{kind.lower()}({{}})")
            for kind in (
                *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil"),
                *("Cos", "Cosh", "Exp", "Floor", "Log", "Reciprocal", "Round"),
                *("Sign", "Sin", "Sinh", "Sqrt", "Tan"),
            )
        },
    }
)
