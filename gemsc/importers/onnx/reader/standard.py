"""What the standard says of a node: its attributes, and what operands go with them.

A node that is as it says is what the operators may rely on: an exception of theirs is
then a bug of gemsc, and no damage of the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import onnx
from onnx import checker, numpy_helper, shape_inference

from gemsc.importers.onnx.static import Static, Value, computed, numpy_type

__all__ = ["broken_schema", "broken_shapes"]

MOST = 64  # numbers of an operand that sizes may depend on


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
    try:
        try:
            _infer(node, operands, opsets)
        except shape_inference.InferenceError:
            if all(map(_is_row, operands)):
                raise
            _infer(node, [*map(_as_row, operands)], opsets)
    except shape_inference.InferenceError as why:
        return _reason(why)
    except checker.ValidationError:  # of types alone, which PyTorch may take
        return ""
    return ""


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


def _is_row(operand: Value | None) -> bool:
    return not isinstance(operand, Static) or bool(operand.shape)


def _as_row(operand: Value | None) -> Value | None:
    """Return a single number as a row of one: torch writes a single axis so."""
    if not isinstance(operand, Static) or operand.shape:
        return operand
    return computed(operand.name, operand.array.reshape(1))


def _infer(
    proto: onnx.NodeProto, operands: Sequence[Value | None], opsets: Mapping[str, int]
) -> None:
    """Have `onnx` find the types and sizes of the results, as it does for a graph."""
    types, data = {}, {}
    for name, operand in zip(proto.input, operands, strict=True):
        if operand is None:
            continue
        types[name] = _type(operand)
        if not isinstance(operand, Static) or operand.dtype.kind not in "if":
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
