"""A node of an ONNX graph, as the function of its operator sees it.

An operator is a function of the node and its inputs, in their order:
    @operator("LeakyRelu")
    def _leaky_relu(node: Node, x: Symbol) -> Symbol:
        return node.gives(f"F.leaky_relu({x}, {number(node.attr.alpha)})")
The annotation says how an input is read: see `_input`. An attribute that the file
leaves out is what the standard says, None where it says nothing.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import onnx
import torch
from torch import nn

from gemsc.errors import GemscError
from gemsc.importers.onnx.operators.names import is_machine_made, wish
from gemsc.importers.onnx.operators.parameters import (
    Parameters,
    Static,
    Value,
    computed,
    number_type,
    torch_type,
)
from gemsc.importers.sheet import Sheet, Symbol
from gemsc.importers.weight import Array, constant

DAMAGED = "the file is damaged, or is not to be trusted"
Number = Any  # known when the file is read
Numbers = list[Any]
Result = Symbol | Sequence[Any]
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(eq=False)
class Node:
    """What an operator works on: operands, attributes, and the sheet to write to.

    `opset` is the version that the file imports of the node's domain. An operand that
    the file leaves out is None; a sequence is a list. `run` reads a graph within the
    node, given its inputs, and `single` another node, given its operands.
    """

    sheet: Sheet
    parameters: Parameters
    proto: onnx.NodeProto
    opset: int
    operands: Sequence[Any]
    outputs: Sequence[str]  # "" for one that is not used
    run: Callable[[onnx.GraphProto, Sequence[Value]], list[Value]]
    single: Callable[[onnx.NodeProto, Sequence[Value]], Sequence[Value | None]]
    attr: _Attributes = field(init=False)

    def __post_init__(self) -> None:
        schema = onnx.defs.get_schema(self.kind, self.opset)
        said = [a.default_value for a in schema.attributes.values()]
        said = [a for a in said if a.type] + list(self.proto.attribute)
        value = onnx.helper.get_attribute_value
        self.attr = _Attributes({a.name: _plain(value(a)) for a in said})

    @property
    def kind(self) -> str:
        """The operator's name."""
        return self.proto.op_type

    def refuse(self, what: str, help: str | None = None) -> GemscError:
        """Return the error for a node that cannot be had; it names the node."""
        return self.sheet.refuse(what, help)

    def operand(self, index: int) -> Value | None:
        """Return an operand; None where the file gives none."""
        return next(iter(self.operands[index:]), None)

    def tensor(self, operand: Value) -> Symbol:
        """Return an operand as forward names it: what is known is a tensor there."""
        if isinstance(operand, Symbol):
            return operand
        if operand.trained or operand.rank < (1 if operand.sized else 2):
            return self.parameters.value(self.proto, operand)
        return self._of_batch(operand)

    @property
    def batch(self) -> Symbol | None:
        """The input of the network whose first axis tells the batch."""
        return next((v for v in self.sheet.inputs if 0 in v.batch_axes), None)

    def _of_batch(self, operand: Static) -> Symbol:
        """Return what is known but for the batch; rows that are alike are kept once."""
        row, batch = operand.array[:1], self.batch
        if (
            batch is None
            or operand.shape[0] != batch.shape[0]
            or operand.shape[0] == 1
            or not np.array_equal(operand.array, np.broadcast_to(row, operand.shape))
        ):
            return self.parameters.value(self.proto, operand)
        first = self.parameters.value(self.proto, computed(operand.name, row))
        sizes = ", ".join([f"{batch}.shape[0]", *["-1"] * (operand.rank - 1)])
        return self.sheet.line(wish(self.proto, ""), f"{first}.expand({sizes})")

    def term(self, operand: Value) -> str:
        """Return an operand in an expression: a number if it is one, else its name."""
        ranks = [other.rank for other in self.operands if isinstance(other, Symbol)]
        if (
            isinstance(operand, Symbol)
            or operand.trained
            or math.prod(operand.shape) != 1
            or operand.rank > max(ranks, default=0)
        ):
            return self.tensor(operand).text
        text = number(operand.array.reshape(-1)[0].item())
        return f"({text})" if text.startswith("-") else text

    def axis(self, axis: int, rank: int) -> int:
        """Return an axis that may be counted from the end, from the start.

        Raises:
            GemscError: there is no such axis.
        """
        if not -rank <= axis < max(rank, 1):
            raise self.refuse(f"names axis {axis} of {rank}")
        return axis % max(rank, 1)

    def dtype(self, kind: int) -> torch.dtype:
        """Return the type that a file names by a number.

        Raises:
            GemscError: PyTorch does not compute with it.
        """
        dtype = number_type(kind)
        if dtype is None:
            name = onnx.helper.tensor_dtype_to_string(kind)
            raise self.refuse(
                f"produces numbers of type {name}", help="export the model without them"
            )
        return torch_type(dtype)

    def is_filler(self, operand: Value | None, value: float) -> bool:
        """Return whether an operand is what is written where a layer has none.

        Such as a scale of ones, under a name that an exporter has made.
        """
        return (
            isinstance(operand, Static)
            and all(map(is_machine_made, operand.weight.sources))
            and bool(np.all(operand.array == value))
        )

    def layer(self, module: nn.Module, **weights: Static | None) -> str:
        """Add a layer with the weights that it has; return the text that names it.

        It stands where the names of its weights say, else where the node's name does.
        """
        known = {key: weight for key, weight in weights.items() if weight is not None}
        return self.parameters.layer(self.proto, module, known)

    def buffer(
        self, name: str, array: Array, dtype: torch.dtype = torch.int64
    ) -> Symbol:
        """Add a tensor that no gradient changes, named after the node's output."""
        output = next(filter(None, self.outputs))
        path = f"{output}_{name}".replace(".", "_").replace("/", "_")
        return self.sheet.tensor(
            path, array.shape, constant(array), dtype=dtype, trained=False
        )

    def gives(self, text: str, output: int = 0) -> Symbol:
        """Add the line that computes an output."""
        return self.sheet.line(wish(self.proto, self.outputs[output]), text)


# ------------------------------------------------------- how a function is called

# Operators by name: what calls their functions
OPERATORS: dict[str, Callable[[Node], Result]] = {}
# those that only move elements
MOVES = frozenset(
    [
        *("Cast", "CastLike", "Concat", "Expand", "Flatten", "Gather", "Identity"),
        *("Pad", "Reshape", "Slice", "Split", "Squeeze", "Tile", "Transpose"),
        "Unsqueeze",
    ]
)
# and others that take the unsigned numbers that PyTorch stores and cannot add
_STORES = MOVES | {"BitCast", "Compress", "DepthToSpace", "GatherND", "Resize"}
_STORES |= {"SpaceToDepth", "Upsample", "Where"}
_STORED = (torch.uint16, torch.uint32, torch.uint64)


def operator(
    *kinds: str, table: dict[str, Callable[[Node], Result]] = OPERATORS
) -> Callable[[Function], Function]:
    """Let a function be called for nodes of these kinds."""

    def register(function: Function) -> Function:
        _, *parameters = inspect.signature(function).parameters.values()
        table.update(dict.fromkeys(kinds, partial(_called, function, parameters)))
        return function

    return register


def _called(
    function: Callable[..., Result],
    parameters: Sequence[inspect.Parameter],
    node: Node,
) -> Result:
    """Call the function of an operator with what a node has.

    Raises:
        GemscError: the node lacks something, or has what PyTorch does not compute with.
    """
    if node.kind in OPERATORS and node.kind not in _STORES:
        _refuse_stored(node)
    inputs = []
    for index, parameter in enumerate(parameters):
        is_last = parameter.kind is parameter.VAR_POSITIONAL
        count = len(node.operands) - index if is_last else 1
        inputs += [_input(node, parameter, index + more) for more in range(count)]
    return function(node, *inputs)


def _refuse_stored(node: Node) -> None:
    for operand in node.operands:
        if isinstance(operand, Symbol) and operand.tensor.dtype in _STORED:
            raise node.refuse(
                f"computes with {operand.tensor.dtype}, which PyTorch only stores",
                help="cast to int64 before it",
            )


def _input(node: Node, parameter: inspect.Parameter, index: int) -> Any:
    """Return an input as the annotation of a parameter says.

    A Symbol is as forward names it, a Value may be known as well, a Number or Numbers
    have to be: these may be an attribute of the parameter's name instead, as they are
    in old opsets. What may be left out is `| None`.
    """
    kind = parameter.annotation.removesuffix(" | None")
    value: Any = node.operand(index)
    if kind in ("Number", "Numbers"):
        value = _numbers(node, parameter.name, index)
    if value is None and kind == parameter.annotation:
        raise node.refuse(f"has no input {index} ({parameter.name})")
    if value is None:
        return None
    if kind == "Symbol":
        return node.tensor(value)
    if kind == "Number":
        if len(value) != 1:
            raise node.refuse(f"has {len(value)} numbers as {parameter.name}", DAMAGED)
        return value[0]
    if kind == "list[Value]" and not isinstance(value, list):
        raise node.refuse("takes a sequence that depends on the data")
    return value


def _numbers(node: Node, name: str, index: int) -> Numbers | None:
    """Return what is an attribute or an input; a single number is a list of one."""
    if name in node.attr:
        return np.asarray(node.attr[name]).reshape(-1).tolist()
    operand = node.operand(index)
    if isinstance(operand, Symbol):
        raise node.refuse(
            f"depends on data where gemsc needs a constant as input {index}",
            help="export the model with fixed shapes, or keep that part outside",
        )
    return None if operand is None else operand.array.reshape(-1).tolist()


class _Attributes(dict[str, Any]):
    """Attributes as Python has them."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


def _plain(value: Any) -> Any:
    """Return the value of an attribute as Python has it."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return shortest(value) if isinstance(value, float) else value


# ---------------------------------------------------------------- pieces of lines


def shortest(value: float) -> float:
    """Return the decimal that was meant by a number of 32 bits: 0.1."""
    return float(str(np.float32(value)))


def number(value: float) -> str:
    """Return a number as a person writes it: 0.1 for the float32 nearest to it."""
    if isinstance(value, bool | int | np.integer | np.bool_):
        return str(value)
    value = float(value)
    if math.isinf(value):
        return "math.inf" if value > 0 else "-math.inf"
    if math.isnan(value):
        return "math.nan"
    return repr(shortest(value) if float(np.float32(value)) == value else value)


def dim_of(axis: int, rank: int) -> int:
    """Return an axis as a person names it: the last one is -1."""
    return -1 if axis == rank - 1 else axis


def at(axis: int, index: str) -> str:
    """Return `[:, :, index]`, which takes something of an axis."""
    return f"[{':, ' * axis}{index}]"
