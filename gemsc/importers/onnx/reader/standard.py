"""What the standard says of a node: its attributes, and what operands go with them.

A node that is as it says is what the operators may rely on: an exception of theirs is
then a bug of gemsc, and no damage of the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import checker, numpy_helper, shape_inference

from gemsc.importers.onnx.static import Static, Value, computed, numpy_type

MOST = 64  # numbers of an operand that sizes may depend on
FLOATS = frozenset(
    map(onnx.TensorProto.DataType.Value, ("FLOAT16", "DOUBLE", "BFLOAT16"))
)


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
    given = [*operands[: len(node.input)]]
    reason = ""
    # a single number in place of a row of one, and floats of several sizes: torch has
    # no trouble with either
    for each in (given, [*map(_as_row, given)], [*map(_as_float, given)]):
        try:
            _infer(node, each, opsets)
        except (checker.ValidationError, shape_inference.InferenceError) as why:
            reason = reason or _reason(why)
        else:
            return ""
    return reason


def _plain(proto: onnx.NodeProto) -> onnx.NodeProto:
    """Return a node as the file had it."""
    node = onnx.NodeProto()
    node.CopyFrom(proto)
    node.output[:] = [n or f"_{i}" for i, n in enumerate(proto.output)]  # not unused
    if node.op_type == "MatMul":
        del node.input[2:]  # the bias of `fuse_bias`
    return node


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _as_row(operand: Value | None) -> Value | None:
    if not isinstance(operand, Static) or operand.shape:
        return operand
    return computed(operand.name, operand.array.reshape(1))


def _as_float(operand: Value | None) -> Value | None:
    if operand is None or _type(operand).tensor_type.elem_type not in FLOATS:
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
        types[name] = _type(operand)
        if not isinstance(operand, Static) or operand.dtype.kind != "i":
            continue
        if math.prod(operand.shape) <= MOST:
            data[name] = numpy_helper.from_array(operand.array, name)
    schema = onnx.defs.get_schema(proto.op_type, opsets[""], "")
    imports = [onnx.helper.make_opsetid(d, v) for d, v in opsets.items()]
    shape_inference.infer_node_outputs(
        schema, proto, types, data, opset_imports=imports
    )


def _type(operand: Value) -> onnx.TypeProto:
    if isinstance(operand, Static):
        kind = operand.dtype
    else:
        kind = numpy_type(operand.tensor.dtype)
    number = onnx.helper.np_dtype_to_tensor_dtype(kind)
    return onnx.helper.make_tensor_type_proto(number, operand.shape)
