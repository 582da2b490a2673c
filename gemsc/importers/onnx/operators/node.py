"""A node of an ONNX graph, as the function of its operator sees it.

An operator is a function with the inputs as positional parameters and the attributes as
keywords, with the defaults of the standard:
    @operator("LeakyRelu")
    def leaky_relu(node: Node, x: Symbol, *, alpha: float = 0.01) -> Symbol:
        return node.gives(f"F.leaky_relu({x}, negative_slope={number(alpha)})")
The annotation says how an input is read: see `READ`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
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
    attributes: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.attributes = {a.name: _attribute(a) for a in self.proto.attribute}

    @property
    def kind(self) -> str:
        """The operator's name."""
        return self.proto.op_type

    def refuse(self, what: str, help: str | None = None) -> GemscError:
        """Return the error for a node that cannot be had; it names the node."""
        return self.sheet.refuse(what, help)

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute: a number, text, or a list of them."""
        return self.attributes.get(name, default)

    def operand(self, index: int) -> Value | None:
        """Return an operand; None where the file gives none."""
        return self.operands[index] if index < len(self.operands) else None

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
        found = number_type(kind)
        if found is None:
            name = onnx.helper.tensor_dtype_to_string(kind)
            raise self.refuse(
                f"makes numbers of type {name}", help="export the model without them"
            )
        return torch_type(found)

    def is_filler(self, operand: Value | None, value: float) -> bool:
        """Return whether an operand is what is written where a layer has none.

        Such as a scale of ones, under a name that an exporter has made.
        """
        return (
            isinstance(operand, Static)
            and all(map(is_machine_made, operand.weight.sources))
            and bool(np.all(operand.array == value))
        )

    def held(self, weight: Static) -> Symbol | None:
        """Return the parameter of another layer that has these elements, if any."""
        return self.parameters.held(weight.weight, weight.shape)

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
    if node.kind not in _STORES:
        _refuse_stored(node)
    inputs, settings = [], {}
    for index, parameter in enumerate(parameters):
        name = parameter.name
        if parameter.kind is parameter.VAR_POSITIONAL:
            read, count = READ[parameter.annotation], len(node.operands)
            inputs += [read(node, name, number) for number in range(index, count)]
        elif parameter.kind is not parameter.KEYWORD_ONLY:
            inputs.append(READ[parameter.annotation](node, name, index))
        elif name in node.attributes:
            settings[name] = node.attributes[name]
        elif parameter.default is parameter.empty:
            raise node.refuse(f"has no {name}", DAMAGED)
    return function(node, *inputs, **settings)


def _refuse_stored(node: Node) -> None:
    for operand in node.operands:
        if isinstance(operand, Symbol) and operand.tensor.dtype in _STORED:
            raise node.refuse(
                f"computes with {operand.tensor.dtype}, which PyTorch only stores",
                help="cast to int64 before it",
            )


def _needed(node: Node, index: int) -> Any:
    operand = node.operand(index)
    if operand is None:
        raise node.refuse(f"has no input {index}")
    return operand


def _symbol(node: Node, _: str, index: int) -> Symbol:
    return node.tensor(_needed(node, index))


def _numbers_or_none(node: Node, name: str, index: int) -> Numbers | None:
    """Return what was an attribute in old opsets and is an input in newer ones.

    A single number is a list of one, as files have it both ways.
    """
    if name in node.attributes:
        return np.asarray(node.attributes[name]).reshape(-1).tolist()
    operand = node.operand(index)
    if isinstance(operand, Symbol):
        raise node.refuse(
            f"depends on data where gemsc needs a constant as input {index}",
            help="export the model with fixed shapes, or keep that part outside",
        )
    return None if operand is None else operand.array.reshape(-1).tolist()


def _numbers(node: Node, name: str, index: int) -> Numbers:
    found = _numbers_or_none(node, name, index)
    if found is None:
        raise node.refuse(f"has no {name}")
    return found


def _number_or_none(node: Node, name: str, index: int) -> Number | None:
    found = _numbers_or_none(node, name, index)
    if found is not None and len(found) != 1:
        raise node.refuse(f"has {len(found)} numbers as its {name}", DAMAGED)
    return None if found is None else found[0]


def _number(node: Node, name: str, index: int) -> Number:
    _numbers(node, name, index)
    return _number_or_none(node, name, index)


def _sequence(node: Node, _: str, index: int) -> list[Value]:
    if not isinstance(node.operand(index), list):
        raise node.refuse("takes a sequence that depends on the data")
    return list(node.operands[index])


# How an input is read: with the parameter's name and the place of the input.
# A Symbol is as forward names it, a Value may be known as well.
READ: Mapping[str, Callable[[Node, str, int], Any]] = {
    "Number": _number,
    "Number | None": _number_or_none,
    "Numbers": _numbers,
    "Numbers | None": _numbers_or_none,
    "Symbol": _symbol,
    "Symbol | None": lambda node, name, index: (
        None if node.operand(index) is None else _symbol(node, name, index)
    ),
    "Value": lambda node, _, index: _needed(node, index),
    "Value | None": lambda node, _, index: node.operand(index),
    "list[Value]": _sequence,
}


def _attribute(attribute: onnx.AttributeProto) -> Any:
    """Return an attribute as Python has it."""
    kinds = onnx.AttributeProto
    value = onnx.helper.get_attribute_value(attribute)
    if attribute.type == kinds.FLOAT:
        return shortest(value)
    if attribute.type == kinds.FLOATS:
        return [shortest(one) for one in value]
    if attribute.type == kinds.STRING:
        return value.decode("utf-8", "replace")
    if attribute.type == kinds.STRINGS:
        return [one.decode("utf-8", "replace") for one in value]
    return list(value) if attribute.type == kinds.INTS else value


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
