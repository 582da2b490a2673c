"""The nodes of a graph in their order: folded, or written to the sheet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import onnx

from gemsc.errors import GemscError, InternalError
from gemsc.importers.onnx.node import Node, Operator
from gemsc.importers.onnx.parameters import Parameters
from gemsc.importers.onnx.reader.control import CONTROL, Control
from gemsc.importers.onnx.reader.file import DAMAGED, OnnxTensors
from gemsc.importers.onnx.reader.fold import NoFitError, folded
from gemsc.importers.onnx.reader.standard import broken_schema, broken_shapes
from gemsc.importers.onnx.static import Static, Value, computed, numpy_type
from gemsc.importers.sheet import Sheet, Symbol
from gemsc.importers.weight import Array, same

Values = dict[str, Value]
Found = TypeVar("Found")
NO_FIT = "has operands or attributes that do not fit"


class Walk:
    """What is known while the nodes are read."""

    def __init__(
        self,
        sheet: Sheet,
        tensors: OnnxTensors,
        opsets: Mapping[str, int],
        trained: set[str],
        used: set[str],
        operators: Mapping[str, Operator],
    ) -> None:
        """Begin; `trained` are tensors that are parameters, `used` names of values."""
        self.used = used
        self.sheet, self.tensors, self.trained = sheet, tensors, trained
        self.opsets, self.operators = dict(opsets), operators
        self.parameters = Parameters(sheet, lambda name: tensors.table[name].shape)
        self.control = Control(sheet, self.run, self._single, self._as_value, used)

    def _as_value(self, proto: onnx.NodeProto, value: Value) -> Symbol:
        if isinstance(value, Symbol):
            return value
        return self.parameters.value(proto, value)

    def run(self, graph: onnx.GraphProto, values: Values) -> None:
        """Read a graph; `values` has what it is given, and then all that it gives.

        Raises:
            GemscError: a node that cannot be had.
        """
        for tensor in graph.initializer:
            values[tensor.name] = self._static(tensor.name, tensor)
        for proto in graph.node:
            name = proto.name or next(iter(proto.output), "")
            with self.sheet.place(f"{proto.op_type} '{name}'"):
                found = self._node(proto, values)
                outputs = list(proto.output)
                if len(found) < len([o for o in outputs if o]):
                    found = [*found, *[None] * (len(outputs) - len(found))]
                for output, value in zip(outputs, found, strict=False):
                    if output and value is not None:
                        values[output] = value

    def _static(self, name: str, tensor: onnx.TensorProto) -> Static:
        """Return a tensor of the file."""
        known = self.tensors.table.get(name)
        if known is None or known.shape != tuple(tensor.dims):
            return computed(name, self.tensors.array(name, tensor))
        is_trained = name in self.trained
        return Static(
            name, known.shape, known.dtype, same(name), self.tensors.read, is_trained
        )

    # -------------------------------------------------------------------- one node

    def _node(self, proto: onnx.NodeProto, values: Values) -> Sequence[Value | None]:
        if proto.op_type in CONTROL:
            return self._found(lambda: self.control.node(proto, values))
        operands = [self._operand(name, values) for name in proto.input]
        if proto.op_type == "Constant":
            return self._constant(proto)
        if proto.op_type in ("Shape", "Size") and operands:
            return [self._shape(proto, operands[0])]
        if proto.op_type == "Identity" and operands:
            return operands
        return self._single(proto, operands, is_of_file=True)

    def _single(
        self,
        proto: onnx.NodeProto,
        operands: Sequence[Value | None],
        *,
        is_of_file: bool = False,
    ) -> Sequence[Value | None]:
        """Return what a node gives: numbers where it can, else lines."""
        if is_of_file:
            self._refuse_broken(broken_schema(proto, self.opsets))
        if proto.op_type == "CastLike" and isinstance(operands[1], Symbol):
            like = np.zeros(1, numpy_type(operands[1].tensor.dtype))
            operands = [operands[0], computed("like", like)]
        known = [o for o in operands if not isinstance(o, Symbol)]
        if len(known) == len(operands):
            try:
                result = self._found(lambda: folded(proto, known, self.opsets))
            except NoFitError as why:
                raise self.sheet.refuse(f"{NO_FIT}: {why}", DAMAGED) from why
            if result is not None:
                return self._in_order(proto, result)
        if is_of_file and proto.op_type in self.operators:
            self._refuse_broken(broken_shapes(proto, operands, self.opsets))
        return self._operator(proto, operands)

    def _refuse_broken(self, reason: str) -> None:
        if reason:
            raise self.sheet.refuse(f"{NO_FIT}: {reason}", DAMAGED)

    def _found(self, function: Callable[[], Found]) -> Found:
        """Return what a function of ours gives: an exception of it is a bug."""
        try:
            return function()
        except (NoFitError, GemscError, InternalError):
            raise
        except Exception as why:
            reason = str(why).split("\n")[0]
            words = self.sheet.refuse(f"{type(why).__name__}: {reason}").message
            raise InternalError(words) from why

    def _in_order(
        self, proto: onnx.NodeProto, found: Sequence[Value]
    ) -> Sequence[Value | None]:
        rest = iter(found)
        return [next(rest) if name else None for name in proto.output]

    def _operand(self, name: str, values: Values) -> Value | None:
        if not name:
            return None
        if name not in values:
            raise self.sheet.refuse(f"takes '{name}', which no node gives", DAMAGED)
        return values[name]

    def _operator(
        self, proto: onnx.NodeProto, operands: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        function = self.operators.get(proto.op_type)
        if function is None or proto.domain not in ("", "ai.onnx"):
            raise self.sheet.refuse("is an operator that gemsc does not know")
        node = Node(
            self.sheet,
            proto.op_type,
            proto.name,
            self.opsets[""],
            operands,
            {a.name: self._attribute(a) for a in proto.attribute},
            [name if name in self.used else "" for name in proto.output],
            proto,
            self.parameters,
        )
        found = self._found(lambda: function(node))
        return [found] if isinstance(found, Symbol) else list(found)

    def _attribute(self, attribute: onnx.AttributeProto) -> Any:
        kinds = onnx.AttributeProto
        if attribute.type == kinds.TENSOR:
            return self.tensors.array(attribute.name, attribute.t)
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

    # --------------------------------------------------- what is no operator

    def _constant(self, proto: onnx.NodeProto) -> list[Value]:
        if not proto.attribute:
            raise self.sheet.refuse("has no value")
        attribute = proto.attribute[0]
        if attribute.name == "value":
            return [self._static(proto.output[0], attribute.t)]
        value = onnx.helper.get_attribute_value(attribute)
        kinds = {"value_float": "f4", "value_int": "i8"}
        kind = kinds.get(attribute.name.removesuffix("s"))
        if kind is None:
            raise self.sheet.refuse(f"has a {attribute.name}, which torch has not")
        return [computed(proto.output[0], np.asarray(value, kind))]

    def _shape(self, proto: onnx.NodeProto, operand: Value | None) -> Static:
        assert operand is not None
        shape: Sequence[int] = operand.shape
        if proto.op_type == "Size":
            array: Array = np.asarray(np.prod(shape, dtype=np.int64))
        else:
            said = {a.name: a.i for a in proto.attribute}
            array = np.asarray(shape, np.int64)[said.get("start", 0) : said.get("end")]
        is_sized = isinstance(operand, Symbol) or operand.sized
        return computed(proto.output[0], array, sized=is_sized)


def shortest(value: float) -> float:
    """Return the decimal that was meant by a number of 32 bits: 0.1."""
    return float(str(np.float32(value)))
