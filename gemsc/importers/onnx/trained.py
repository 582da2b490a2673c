"""Which tensors of an ONNX file are parameters: the format does not say.

Those that a layer has as its weight, through transposing, slicing and the like; and
those that are added or multiplied and have a name that a person gave, but for masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx

from gemsc.importers.onnx.operators.names import is_machine_made, scope
from gemsc.importers.onnx.operators.node import MOVES
from gemsc.importers.weight import Array, FileTensor

# the operands that are weights, whatever their names are
SLOTS: Mapping[str, tuple[int, ...]] = {
    "BatchNormalization": (1, 2),
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "DeformConv": (1, 3),
    "Einsum": (0, 1, 2, 3),
    "GRU": (1, 2, 3),
    "Gather": (0,),
    "GatherElements": (0,),
    "GatherND": (0,),
    "Gemm": (0, 1, 2),
    "GroupNormalization": (1, 2),
    "InstanceNormalization": (1, 2),
    "LSTM": (1, 2, 3),
    "LayerNormalization": (1, 2),
    "MatMul": (0, 1, 2),
    "PRelu": (1,),
    "RMSNormalization": (1,),
    "RNN": (1, 2, 3),
}
NAMED: Mapping[str, tuple[int, ...]] = {
    "Add": (0, 1),
    "Concat": tuple(range(64)),
    "Div": (0,),
    "Expand": (0,),
    "Mul": (0, 1),
    "Sub": (0, 1),
}
HIDES = -100.0  # what masks add to the scores of attention, or less: -inf


@dataclass(frozen=True)
class TrainedTensors:
    """The tensors of a file that are parameters.

    `named` are so by their names alone; `shared` are parameters of several layers.
    `statistics` are means and variances.
    """

    all: set[str]
    statistics: set[str]
    named: list[str]
    shared: list[str]


def weight_slots(node: onnx.NodeProto) -> list[int]:
    """Return which operands may be weights or statistics, as they are or moved."""
    slots = {*SLOTS.get(node.op_type, ()), *NAMED.get(node.op_type, ())}
    slots |= {3, 4} if node.op_type == "BatchNormalization" else set()
    slots |= {0} if node.op_type in MOVES else set()
    return sorted(index for index in slots if index < len(node.input))


def all_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Give a graph, and those within its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from all_graphs(attribute.g)


def all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Give the nodes of a graph, and of those within it."""
    return (node for inner in all_graphs(graph) for node in inner.node)


def used_names(graph: onnx.GraphProto) -> set[str]:
    """Return the values that a node takes, or that a graph gives."""
    names = {value.name for inner in all_graphs(graph) for value in inner.output}
    return names.union(*(node.input for node in all_nodes(graph)))


def trained_names(
    graph: onnx.GraphProto,
    table: Mapping[str, FileTensor],
    read: Callable[[str], Array],
    buffers: Collection[str] = (),
    parameters: Collection[str] = (),
) -> TrainedTensors:
    """Return the tensors that are parameters; `read` gives the numbers of one.

    The exporter says that `buffers` are none, and `parameters` are some: single numbers
    among them, which are constants in other files.
    """
    makers = {name: node for node in all_nodes(graph) for name in node.output}
    weights: set[str] = set()
    named: dict[str, None] = {}
    users: dict[str, set[str]] = {}
    for node in all_nodes(graph):
        for slots in (SLOTS, NAMED):
            for index in slots.get(node.op_type, ()):
                for name in _origins(node.input[index:], makers, table, parameters):
                    is_number = name in makers and math.prod(table[name].shape) == 1
                    if slots is SLOTS:
                        weights.add(name)
                    elif is_number or name in buffers or is_machine_made(name):
                        continue
                    else:
                        named[name] = None
                    users.setdefault(name, set()).add(scope(node))
    named |= dict.fromkeys(n for n in parameters if n in table and n not in buffers)
    statistics = _statistics(graph, makers, table)
    weights -= {*buffers, *(statistics - _used_elsewhere(graph))}
    weights -= set(_neutral(graph, makers, read))
    others = [n for n in named if n not in weights and not _is_mask(read(n))]
    trained = weights | set(others)
    shared = [name for name in users if name in trained and len(users[name]) > 1]
    return TrainedTensors(trained, statistics, others, shared)


def _neutral(
    graph: onnx.GraphProto,
    makers: Mapping[str, onnx.NodeProto],
    read: Callable[[str], Array],
) -> Iterator[str]:
    """Give the ones and zeros of norms without weights: Constants of the exporter."""
    for node in all_nodes(graph):
        is_norm = node.op_type.endswith("Normalization")
        for index, name in enumerate(node.input[1:3] if is_norm else ()):
            is_constant = name in makers and makers[name].op_type == "Constant"
            if is_constant and (read(name) == 1 - index).all():
                yield name


def _is_mask(array: Array) -> bool:
    """Return whether numbers are added to hide others: each zero, or far below it."""
    hidden = array <= HIDES
    return bool(hidden.any() and (hidden | (array == 0)).all())


def _statistics(
    graph: onnx.GraphProto,
    makers: Mapping[str, onnx.NodeProto],
    table: Mapping[str, FileTensor],
) -> set[str]:
    """Return what is a BatchNormalization's mean or variance."""
    return {
        name
        for node in all_nodes(graph)
        if node.op_type == "BatchNormalization"
        for index in (3, 4)
        for name in _origins(node.input[index:], makers, table)
    }


def _used_elsewhere(graph: onnx.GraphProto) -> set[str]:
    return {
        name
        for node in all_nodes(graph)
        for index, name in enumerate(node.input)
        if node.op_type != "BatchNormalization" or index < 3
    }


def _origins(
    names: Sequence[str],
    makers: Mapping[str, onnx.NodeProto],
    table: Mapping[str, FileTensor],
    numbers: Collection[str] = (),
) -> Iterator[str]:
    """Give the tensors of the file whose elements the first value has, all or some.

    Single numbers without an axis are among them if they are `numbers`.
    """
    waiting, seen = list(names[:1]), set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        tensor = table.get(name)
        if tensor is not None:
            is_float = tensor.dtype.kind == "f" or tensor.dtype.name == "bfloat16"
            if (tensor.shape or name in numbers) and is_float:
                yield name
        elif name in makers and makers[name].op_type in MOVES:
            maker = makers[name]
            waiting += maker.input if maker.op_type == "Concat" else maker.input[:1]


def fuse_bias(graph: onnx.GraphProto, table: Mapping[str, FileTensor]) -> None:
    """Give each MatMul by a weight the vector that is added to it, as a third input.

    So PyTorch's exporter writes nn.Linear where there are more axes than two.
    """
    makers = {name: node for node in graph.node for name in node.output}
    uses: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            uses.setdefault(name, []).append(node)
    kept = {value.name for value in graph.output}
    gone = []
    for node in graph.node:
        is_plain = node.op_type == "MatMul" and not node.domain
        if not is_plain or len(node.input) > 2 or node.output[0] in kept:
            continue
        users = uses.get(node.output[0], [])
        if len(users) != 1 or users[0].op_type != "Add":
            continue
        weight = next(_origins(node.input[1:], makers, table), None)
        for bias in users[0].input:
            width = table[bias].shape if bias in table else ()
            if weight and len(width) == 1 and width[0] in table[weight].shape:
                gone.append(node.output[0])
                output = users[0].output[0]
                users[0].CopyFrom(node)
                users[0].input.append(bias)
                users[0].output[0] = output
                break
    for index in reversed(range(len(graph.node))):
        if any(name in gone for name in graph.node[index].output):
            del graph.node[index]
