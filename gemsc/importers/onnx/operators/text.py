"""Pieces of the lines that operators write: numbers, axes and index expressions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from gemsc.importers.onnx.node import Node, Operator
from gemsc.importers.onnx.static import Static
from gemsc.importers.sheet import Symbol
from gemsc.importers.weight import Array, constant

_UNCOUNTED = (torch.uint16, torch.uint32, torch.uint64)


def number(value: float) -> str:
    """Return a number as a person writes it: 0.1 for the float32 nearest to it."""
    if isinstance(value, bool | int | np.integer | np.bool_):
        return str(value)
    value = float(value)
    if math.isinf(value):
        return "math.inf" if value > 0 else "-math.inf"
    if math.isnan(value):
        return "math.nan"
    short = str(np.float32(value)) if float(np.float32(value)) == value else ""
    return repr(float(short or value))


def term(node: Node, index: int) -> str:
    """Return an operand in an expression: a number if it is one, else its name."""
    operand = node.operand(index)
    if not isinstance(operand, Static) or operand.trained:
        return node.value(index).text
    others = [o.shape for o in node.operands if isinstance(o, Symbol)]
    rank = max(map(len, others), default=0)
    if math.prod(operand.shape) != 1 or len(operand.shape) > rank:
        return node.value(index).text
    text = number(operand.array.reshape(-1)[0].item())
    return f"({text})" if text.startswith("-") else text


def axis_of(node: Node, axis: int, rank: int) -> int:
    """Return an axis that may be counted from the end, from the start.

    Raises:
        GemscError: there is no such axis.
    """
    if not -rank <= axis < max(rank, 1):
        raise node.refuse(f"names axis {axis} of {rank}")
    return axis % max(rank, 1)


def dim_of(axis: int, rank: int) -> int:
    """Return an axis as a person names it: the last one is -1."""
    return -1 if axis == rank - 1 else axis


def at(axis: int, index: str) -> str:
    """Return `[:, :, index]`, which takes something of an axis."""
    return f"[{':, ' * axis}{index}]"


def buffer(
    node: Node, name: str, array: Array, dtype: torch.dtype = torch.int64
) -> Symbol:
    """Add a tensor that no gradient changes, with these numbers.

    It is named after the node's output.
    """
    output = next(filter(None, node.outputs))
    path = f"{output}_{name}".replace(".", "_").replace("/", "_")
    return node.sheet.tensor(
        path, array.shape, constant(array), dtype=dtype, trained=False
    )


def tuple_of(values: Sequence[object]) -> str:
    """Return `(1, 2)`, with the comma that a single one needs."""
    return f"({', '.join(map(str, values))}{',' * (len(values) == 1)})"


def of_numbers(operators: Mapping[str, Operator]) -> dict[str, Operator]:
    """Return operators that refuse the unsigned numbers that PyTorch only stores."""
    return {kind: _counted(operator) for kind, operator in operators.items()}


def _counted(operator: Operator) -> Operator:
    def checked(node: Node) -> Symbol | Sequence[Symbol | None]:
        for operand in node.operands:
            if isinstance(operand, Symbol) and operand.tensor.dtype in _UNCOUNTED:
                raise node.refuse(
                    f"computes with {operand.tensor.dtype}, which PyTorch only stores",
                    help="cast to int64 before it",
                )
        return operator(node)

    return checked
