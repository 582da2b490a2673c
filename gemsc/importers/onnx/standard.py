"""What the `onnx` package makes of nodes: if they are sound, and what they give.

A node that is as the standard says is what the operators may rely on: an exception of
theirs is then a bug of gemsc. A node whose operands are known is computed by its
reference implementation. One that only moves elements is given numbers of places as
well: so a weight keeps what it is made of through Transpose, Slice and Concat.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import checker, numpy_helper, shape_inference
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from gemsc.importers.onnx.file import OnnxTensors, load_model
from gemsc.importers.onnx.operators.node import MOVES
from gemsc.importers.onnx.operators.parameters import (
    Static,
    Value,
    computed,
    number_type,
    type_code,
)
from gemsc.importers.weight import Array, Weight

Operands = Sequence[Static | None]
Run = Callable[[Sequence[Array | None]], Sequence[Array]]

MOST = 64  # numbers of an operand that sizes may depend on
FLOATS = frozenset(
    map(onnx.TensorProto.DataType.Value, ("FLOAT16", "DOUBLE", "BFLOAT16"))
)
# those that may give an element several times, which no parameter can be
REPEATING = frozenset(["Expand", "Gather", "Tile", "Pad"])
# what gives other numbers each time
DRAWN = frozenset(
    [
        *("RandomUniform", "RandomNormal", "RandomUniformLike", "RandomNormalLike"),
        *("Multinomial", "Bernoulli"),
    ]
)

# --------------------------------------------------------------------------- soundness


def broken_schema(proto: onnx.NodeProto, opsets: Mapping[str, int]) -> str:
    """Return what is wrong with attributes or the number of operands, "" if nothing."""
    context = checker.C.CheckerContext()
    context.ir_version = onnx.IR_VERSION
    context.opset_imports = dict(opsets)
    try:
        checker.check_node(_plain(proto), context)
    except checker.ValidationError as why:
        return _reason(why)
    return ""


def broken_shapes(
    proto: onnx.NodeProto,
    operands: Sequence[Value | None],
    opsets: Mapping[str, int],
) -> str:
    """Return why types and sizes of operands do not go together, "" if they do."""
    node = _plain(proto)
    operands = operands[: len(node.input)]
    reason = ""
    # a single number in place of a row of one, and floats of several sizes: torch has
    # no trouble with either
    for change in (lambda operand: operand, _as_row, _as_float):
        try:
            _infer(node, [*map(change, operands)], opsets)
        except (checker.ValidationError, shape_inference.InferenceError) as why:
            reason = reason or _reason(why)
        else:
            return ""
    return reason


def _plain(proto: onnx.NodeProto) -> onnx.NodeProto:
    """Return a node as the file had it, with nothing in its graphs."""
    node = onnx.NodeProto()
    node.CopyFrom(proto)
    node.output[:] = [n or f"_{i}" for i, n in enumerate(proto.output)]  # not unused
    if node.op_type == "MatMul":
        del node.input[2:]  # the bias of `fuse_bias`
    for attribute in node.attribute:
        if attribute.HasField("g"):
            attribute.g.CopyFrom(onnx.GraphProto(name="inside"))
    return node


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _as_row(operand: Value | None) -> Value | None:
    if not isinstance(operand, Static) or operand.shape:
        return operand
    return computed(operand.name, operand.array.reshape(1))


def _as_float(operand: Value | None) -> Value | None:
    if operand is None or type_code(operand) not in FLOATS:
        return operand
    return computed("", np.broadcast_to(np.float32(0), operand.shape))


def _infer(
    proto: onnx.NodeProto, operands: Sequence[Value | None], opsets: Mapping[str, int]
) -> None:
    """Have `onnx` find the types and sizes of the results, as it does for a graph."""
    types, data = {}, {}
    for name, operand in zip(proto.input, operands, strict=True):
        if operand is None:
            continue
        code = type_code(operand)
        types[name] = onnx.helper.make_tensor_type_proto(code, operand.shape)
        if not isinstance(operand, Static) or operand.dtype.kind != "i":
            continue
        if math.prod(operand.shape) <= MOST:
            data[name] = numpy_helper.from_array(operand.array, name)
    schema = onnx.defs.get_schema(proto.op_type, opsets[""], "")
    imports = _imports(opsets)
    shape_inference.infer_node_outputs(
        schema, proto, types, data, opset_imports=imports
    )


def _imports(opsets: Mapping[str, int]) -> list[onnx.OperatorSetIdProto]:
    return [onnx.helper.make_opsetid(d, v) for d, v in opsets.items()]


# -------------------------------------------------------------------- a node's numbers


class NoFitError(Exception):
    """The reference implementation cannot compute a node with these numbers."""


def folded(
    proto: onnx.NodeProto, operands: Operands, opsets: Mapping[str, int]
) -> list[Static] | None:
    """Return what a node gives; None if it is to be computed in forward.

    That is so where it draws random numbers, and where it computes with what is
    trained.

    Raises:
        NoFitError: it has no results.
    """
    if proto.op_type in DRAWN:
        return None
    names = [name for name in proto.output if name]
    run = _runner(proto, opsets)
    if proto.op_type in MOVES and (moved := _moved(proto, operands, run, names)):
        return moved
    known = [operand for operand in operands if operand is not None]
    if any(operand.trained for operand in known):
        return None
    arrays = run([None if o is None else o.array for o in operands])
    sized = any(operand.sized for operand in known)
    return [computed(n, a, sized=sized) for n, a in zip(names, arrays, strict=True)]


def _runner(proto: onnx.NodeProto, opsets: Mapping[str, int]) -> Run:
    """Return the function of one node on arrays."""
    graph = onnx.GraphProto(name="node")
    graph.node.append(proto)
    for name in dict.fromkeys(filter(None, proto.input)):
        graph.input.add(name=name)
    for name in filter(None, proto.output):
        graph.output.add(name=name)
    model = onnx.helper.make_model(graph, opset_imports=_imports(opsets))

    def run(arrays: Sequence[Array | None]) -> Sequence[Array]:
        inputs = {n: a for n, a in zip(proto.input, arrays, strict=True) if n}
        try:
            with np.errstate(all="ignore"):
                outputs = _evaluator(model).run(None, inputs)
        except Exception as why:  # of any type, for a node that need not make sense
            raise NoFitError(str(why).split("\n")[0] or type(why).__name__) from why
        return [np.asarray(array) for array in outputs]

    return run


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
    settings = [None if o is None else o.array for o in operands[count:]]
    if proto.op_type == "Pad" and not _pads_with_zeros(proto, settings):
        return None
    is_cast = proto.op_type == "Cast"
    starts = np.cumsum([0, *(len(o.weight.sources) for o in data)]).tolist()

    def move(output: int) -> Callable[..., Array]:
        def moved(*arrays: Array) -> Array:
            parts = [
                o.weight.move(*arrays[start:end])
                if o.weight.sources
                else np.zeros(o.shape, arrays[0].dtype)
                for o, start, end in zip(data, starts, starts[1:], strict=False)
            ]
            return parts[0] if is_cast else run([*parts, *settings])[output]

        return moved

    results = _results(proto, data, settings, run)
    if results is None:
        return None
    sources = tuple(source for o in data for source in o.weight.sources)
    readers = {source: o.read for o in data for source in o.weight.sources}
    return [
        Static(
            name,
            shape,
            kind,
            Weight(sources, move(output)),
            lambda source: readers[source](source),
            trained=any(o.trained for o in data),
            sized=any(o.sized for o in operands if o is not None),
        )
        for output, (name, (shape, kind)) in enumerate(zip(names, results, strict=True))
    ]


def _results(
    proto: onnx.NodeProto, data: Sequence[Static], settings: Sequence[Any], run: Run
) -> list[tuple[tuple[int, ...], np.dtype[Any]]] | None:
    """Return shapes and types of the results; None if elements are there twice."""
    first = data[0]
    if proto.op_type == "Cast":
        kind = number_type(next(a.i for a in proto.attribute if a.name == "to"))
        if kind is None or not (_is_float(kind) and _is_float(first.dtype)):
            return None
        return [(first.shape, kind)]
    if len({o.dtype for o in data}) > 1:
        return None
    if proto.op_type in REPEATING:
        size = math.prod(first.shape)
        numbers = np.arange(1, size + 1, dtype=np.int64).reshape(first.shape)
        (result,) = run([numbers, *settings])
        kept = result[result > 0]
        return (
            [(result.shape, first.dtype)] if np.unique(kept).size == kept.size else None
        )
    # without memory: arrays of one number that is in all places
    parts = [np.broadcast_to(np.zeros((), np.int8), o.shape) for o in data]
    return [(array.shape, first.dtype) for array in run([*parts, *settings])]


def _is_float(kind: np.dtype[Any]) -> bool:
    return kind.kind == "f" or kind.name == "bfloat16"


def _pads_with_zeros(proto: onnx.NodeProto, settings: Sequence[Any]) -> bool:
    for attribute in proto.attribute:
        is_other = attribute.name == "mode" and attribute.s != b"constant"
        if is_other or (attribute.name == "value" and attribute.f):
            return False
    return all(value is None or not value.any() for value in settings[1:2])


# ---------------------------------------------------------------------- a whole file


def reference(
    tensors: OnnxTensors, inputs: Sequence[str]
) -> Callable[[Sequence[Array]], Sequence[Array]]:
    """Return the function of a file, in evaluation, whose inputs have these names."""

    def run(arrays: Sequence[Array]) -> Sequence[Array]:
        model = load_model(tensors.path)
        for tensor in model.graph.initializer:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                array = tensors.read(tensor.name)
                tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
        for node in model.graph.node:
            _evaluate(node)
        named = dict(zip(inputs, arrays, strict=True))
        return list(_evaluator(model).run(None, named))

    return run


def _evaluator(model: onnx.ModelProto) -> ReferenceEvaluator:
    """Return the reference implementation, mended where it is not as the standard."""
    opset = max((o.version for o in model.opset_import if not o.domain), default=1)
    flat = [_flattened(*item) for item in _ROWS.items()] if opset < 13 else []
    return ReferenceEvaluator(model, new_ops=[LRN, LpNormalization, *flat])


def _flattened(kind: str, function: Callable[[Array], Array]) -> type[OpRun]:
    """Return an operator over an axis and all after it; onnx 1.23 takes one alone."""

    def run(self: OpRun, x: Array, **_: Any) -> tuple[Array]:
        axis = next((a.i for a in self.onnx_node.attribute if a.name == "axis"), 1)
        rows = x.reshape(math.prod(x.shape[:axis]), -1)
        return (function(rows).astype(x.dtype).reshape(x.shape),)

    return type(kind, (OpRun,), {"op_domain": "", "_run": run})


def _log_softmax(rows: Array) -> Array:
    shifted = rows - rows.max(1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return result


_ROWS: Mapping[str, Callable[[Array], Array]] = {  # before opset 13
    "Hardmax": lambda rows: np.eye(rows.shape[1])[rows.argmax(1)],
    "LogSoftmax": _log_softmax,
    "Softmax": lambda rows: np.exp(_log_softmax(rows)),
}


class LpNormalization(OpRun):
    """What the standard says; onnx 1.23 adds up numbers below 0 as they are."""

    op_domain = ""

    def _run(self, x: Array, *, axis: int, p: int) -> tuple[Array]:
        norm = (np.abs(x) ** p).sum(axis, keepdims=True) ** (1 / p)
        return (np.where(norm == 0, 0, x / norm).astype(x.dtype),)


class LRN(OpRun):
    """What the standard says; onnx 1.23 takes the samples for the channels."""

    op_domain = ""

    def _run(
        self, x: Array, *, alpha: float, beta: float, bias: float, size: int
    ) -> tuple[Array]:
        before, channels = (size - 1) // 2, x.shape[1]
        pads = [(0, 0), (before, size - 1 - before), *[(0, 0)] * (x.ndim - 2)]
        squares = np.pad(x**2, pads)
        near = sum(squares[:, i : i + channels] for i in range(size))
        return ((x / (bias + alpha / size * near) ** beta).astype(x.dtype),)


def _evaluate(node: onnx.NodeProto) -> None:
    """Have what trains behave as in evaluation."""
    if node.op_type == "Dropout":
        del node.input[1:]
    if node.op_type == "BatchNormalization" and len(node.output) > 1:
        for attribute in node.attribute:
            if attribute.name == "training_mode":
                attribute.i = 0
        del node.output[1:]
