"""Nodes whose operands are known when the file is read: they are computed then.

One node at a time, by the `onnx` package's own reference implementation. A node that
only moves elements is given numbers of places as well: so a weight keeps what it is
made of through Transpose, Slice and Concat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from gemsc.importers.onnx.static import Static, computed
from gemsc.importers.weight import Array, Weight

Operands = Sequence[Static | None]
Run = Callable[[Sequence[Array | None]], Sequence[Array]]

MOVES = frozenset(
    [
        "Cast",
        "CastLike",
        "Concat",
        "Expand",
        "Flatten",
        "Gather",
        "Identity",
        "Pad",
        "Reshape",
        "Slice",
        "Split",
        "Squeeze",
        "Tile",
        "Transpose",
        "Unsqueeze",
    ]
)
# those that may give an element several times, which no parameter can be
REPEATING = frozenset(["Expand", "Gather", "Tile", "Pad"])
# what gives other numbers each time
DRAWN = frozenset(
    [
        "RandomUniform",
        "RandomNormal",
        "RandomUniformLike",
        "RandomNormalLike",
        "Multinomial",
        "Bernoulli",
    ]
)


class NoFitError(Exception):
    """The reference implementation cannot compute a node with these numbers."""


def runner(proto: onnx.NodeProto, opsets: dict[str, int]) -> Run:
    """Return the function of one node on arrays."""
    graph = onnx.GraphProto(name="node")
    graph.node.append(proto)
    inputs = [name for name in proto.input if name]
    for name in dict.fromkeys(inputs):
        graph.input.add(name=name)
    for name in filter(None, proto.output):
        graph.output.add(name=name)
    imports = [onnx.helper.make_opsetid(d, v) for d, v in opsets.items()]
    model = onnx.helper.make_model(graph, opset_imports=imports)

    def run(arrays: Sequence[Array | None]) -> Sequence[Array]:
        given = {n: a for n, a in zip(proto.input, arrays, strict=True) if n}
        try:
            with np.errstate(all="ignore"):
                found = ReferenceEvaluator(model).run(None, given)
        except Exception as why:  # of any type, for a node that need not make sense
            raise NoFitError(str(why).split("\n")[0] or type(why).__name__) from why
        return [np.asarray(array) for array in found]

    return run


def folded(
    proto: onnx.NodeProto, operands: Operands, opsets: dict[str, int]
) -> list[Static] | None:
    """Return what a node gives; None if it is to be computed in forward.

    That is so where it draws random numbers, and where it computes with what is
    trained.
    """
    if proto.op_type in DRAWN:
        return None
    names = [name for name in proto.output if name]
    if proto.op_type == "Identity" and operands[0] is not None:
        return [operands[0]]
    run = runner(proto, opsets)
    sized = any(o.sized for o in operands if o is not None)
    moved = _moved(proto, operands, run, names) if proto.op_type in MOVES else None
    if moved is not None:
        return moved
    if any(o.trained for o in operands if o is not None):
        return None
    found = run([None if o is None else o.array for o in operands])
    return [computed(n, a, sized=sized) for n, a in zip(names, found, strict=True)]


def _moved(
    proto: onnx.NodeProto, operands: Operands, run: Run, names: list[str]
) -> list[Static] | None:
    """Return the results of a node that moves elements of the file."""
    count = len(operands) if proto.op_type == "Concat" else 1
    data = [o for o in operands[:count] if o is not None]
    if not any(o.weight.sources for o in data) or len(data) != count:
        return None
    if any(not o.weight.sources and o.array.any() for o in data):
        return None
    rest = [None if o is None else o.array for o in operands[count:]]
    if proto.op_type == "Pad" and not _pads_with_zeros(proto, rest):
        return None
    starts = np.cumsum([0, *(len(o.weight.sources) for o in data)]).tolist()
    is_cast = proto.op_type in ("Cast", "CastLike")

    def move(output: int) -> Callable[..., Array]:
        def moved(*arrays: Array) -> Array:
            parts = [
                _made(o, arrays[start:end], arrays)
                for o, start, end in zip(data, starts, starts[1:], strict=False)
            ]
            if is_cast:
                return parts[0]
            array: Array = run([*parts, *rest])[output]
            return array

        return moved

    shapes = _results(proto, data, rest, run)
    if shapes is None:
        return None
    sources = tuple(source for o in data for source in o.weight.sources)
    return [
        Static(
            name,
            shape,
            kind,
            Weight(sources, move(output)),
            _reader(data),
            trained=any(o.trained for o in data),
            sized=any(o.sized for o in operands if o is not None),
        )
        for output, (name, (shape, kind)) in enumerate(zip(names, shapes, strict=True))
    ]


def _made(operand: Static, arrays: Sequence[Array], like: Sequence[Array]) -> Array:
    if operand.weight.sources:
        return operand.weight.move(*arrays)
    return np.zeros(operand.shape, like[0].dtype)


def _reader(data: Sequence[Static]) -> Callable[[str], Array]:
    readers = {source: o.read for o in data for source in o.weight.sources}
    return lambda source: readers[source](source)


def _results(
    proto: onnx.NodeProto, data: Sequence[Static], rest: Sequence[Any], run: Run
) -> list[tuple[tuple[int, ...], np.dtype[Any]]] | None:
    """Return shapes and types of the results; None if elements are there twice."""
    if proto.op_type in ("Cast", "CastLike"):
        kind = _cast_to(proto, rest)
        is_number = kind is not None and _is_float(kind) and _is_float(data[0].dtype)
        return [(data[0].shape, kind)] if is_number and kind is not None else None
    if len({o.dtype for o in data}) > 1:
        return None
    sizes = [int(np.prod(o.shape, dtype=np.int64)) for o in data]
    if proto.op_type in REPEATING:
        number = np.arange(1, sizes[0] + 1, dtype=np.int64).reshape(data[0].shape)
        (found,) = run([number, *rest])
        kept = found[found > 0]
        if np.unique(kept).size != kept.size:
            return None
        return [(found.shape, data[0].dtype)]
    # without memory: arrays of one number that is in all places
    parts = [np.broadcast_to(np.zeros((), np.int8), o.shape) for o in data]
    found_all = run([*parts, *rest])
    return [(array.shape, data[0].dtype) for array in found_all]


def _cast_to(proto: onnx.NodeProto, rest: Sequence[Any]) -> np.dtype[Any] | None:
    if proto.op_type == "CastLike":
        return None if rest[0] is None else rest[0].dtype
    for attribute in proto.attribute:
        if (
            attribute.name == "to"
            and attribute.i in onnx.helper.get_all_tensor_dtypes()
        ):
            return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(attribute.i))
    return None


def _is_float(kind: np.dtype[Any]) -> bool:
    return kind.kind == "f" or kind.name == "bfloat16"


def _pads_with_zeros(proto: onnx.NodeProto, rest: Sequence[Any]) -> bool:
    values = rest[1:2] if len(rest) > 1 else []
    for attribute in proto.attribute:
        if attribute.name == "mode" and attribute.s != b"constant":
            return False
        if attribute.name == "value" and attribute.f:
            return False
    return all(value is None or not value.any() for value in values)
