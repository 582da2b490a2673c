"""The nodes of a graph in their order: folded, or written to the sheet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import onnx

from gemsc.errors import GemscError, InternalError
from gemsc.importers.onnx.file import OnnxTensors
from gemsc.importers.onnx.operators import CONTROL, OPERATORS
from gemsc.importers.onnx.operators.names import node_name
from gemsc.importers.onnx.operators.node import DAMAGED, Node, Result
from gemsc.importers.onnx.operators.parameters import (
    Parameters,
    Static,
    Value,
    computed,
)
from gemsc.importers.onnx.standard import (
    NoFitError,
    broken_schema,
    broken_shapes,
    folded,
)
from gemsc.importers.sheet import Sheet, Symbol
from gemsc.importers.weight import same

Values = dict[str, Any]  # a Value, or a list of them
Returned = TypeVar("Returned")
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
    ) -> None:
        """Begin; `trained` are tensors that are parameters, `used` names of values."""
        self.sheet, self.tensors, self.trained = sheet, tensors, trained
        self.used, self.opsets = used, dict(opsets)
        self.parameters = Parameters(sheet, lambda name: tensors.table[name].shape)

    def run(self, graph: onnx.GraphProto, values: Values) -> None:
        """Read a graph; `values` has what it is given, and then all that it gives.

        Raises:
            GemscError: a node that cannot be had.
        """
        for tensor in graph.initializer:
            values[tensor.name] = self._static(tensor.name, tensor)
        for proto in graph.node:
            with self.sheet.place(f"{proto.op_type} '{node_name(proto)}'"):
                results = self._node(proto, values)
                for output, value in zip(proto.output, results, strict=False):
                    if output and value is not None:
                        values[output] = value

    def _run_inside(
        self, around: Values, graph: onnx.GraphProto, inputs: Sequence[Value]
    ) -> list[Value]:
        """Read a graph within a node; return what it gives."""
        names = [value.name for value in graph.input]
        inside = around | dict(zip(names, inputs, strict=False))
        self.run(graph, inside)
        return [self._operand(output.name, inside) for output in graph.output]

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

    def _node(self, proto: onnx.NodeProto, values: Values) -> Sequence[Any]:
        if proto.op_type == "Constant":
            return [self._constant(proto)]
        operands = [self._operand(name, values) for name in proto.input]
        self._refuse_broken(broken_schema(proto, self.opsets))
        outputs = [name if name in self.used else "" for name in proto.output]
        if proto.op_type in CONTROL:
            function = CONTROL[proto.op_type]
            return self._called(function, proto, operands, outputs, values)
        for name, operand in zip(proto.input, operands, strict=True):
            if isinstance(operand, list):
                raise self.sheet.refuse(f"takes '{name}', which is not a tensor")
        results = self._known(proto, operands)
        if results is not None:
            return results
        if proto.op_type in OPERATORS:
            self._refuse_broken(broken_shapes(proto, operands, self.opsets))
        return self._operator(proto, operands, outputs)

    def _single(
        self, proto: onnx.NodeProto, operands: Sequence[Value]
    ) -> Sequence[Value | None]:
        """Return what a node gives that is part of one of the file."""
        known = self._known(proto, operands)
        return known or self._operator(proto, operands, list(proto.output))

    def _operand(self, name: str, values: Values) -> Any:
        if name and name not in values:
            raise self.sheet.refuse(f"takes '{name}', which no node gives", DAMAGED)
        return values[name] if name else None

    def _known(
        self, proto: onnx.NodeProto, operands: Sequence[Value | None]
    ) -> Sequence[Value | None] | None:
        """Return what a node gives if that can be told now."""
        known = [o for o in operands if not isinstance(o, Symbol)]
        if len(known) < len(operands):
            return None
        try:
            results = self._checked(lambda: folded(proto, known, self.opsets))
        except NoFitError as why:
            raise self.sheet.refuse(f"{NO_FIT}: {why}", DAMAGED) from why
        if results is None:
            return None
        ordered = iter(results)
        return [next(ordered) if name else None for name in proto.output]

    def _operator(
        self, proto: onnx.NodeProto, operands: Sequence[Any], outputs: Sequence[str]
    ) -> Sequence[Any]:
        function = OPERATORS.get(proto.op_type)
        if function is None or proto.domain not in ("", "ai.onnx"):
            raise self.sheet.refuse("is an operator that gemsc does not know")
        return self._called(function, proto, operands, outputs, {})

    def _called(
        self,
        function: Callable[[Node], Result],
        proto: onnx.NodeProto,
        operands: Sequence[Any],
        outputs: Sequence[str],
        values: Values,
    ) -> Sequence[Any]:
        make = partial(Node, self.sheet, self.parameters, proto, self.opsets[""])
        run = partial(self._run_inside, values)
        results = self._checked(
            lambda: function(make(operands, outputs, run, self._single))
        )
        return [results] if isinstance(results, Symbol) else results

    def _refuse_broken(self, reason: str) -> None:
        if reason:
            raise self.sheet.refuse(f"{NO_FIT}: {reason}", DAMAGED)

    def _checked(self, function: Callable[[], Returned]) -> Returned:
        """Return what a function of ours gives: an exception of it is a bug."""
        try:
            return function()
        except (NoFitError, GemscError, InternalError):
            raise
        except Exception as why:
            reason = str(why).split("\n")[0]
            words = self.sheet.refuse(f"{type(why).__name__}: {reason}").message
            raise InternalError(words) from why

    def _constant(self, proto: onnx.NodeProto) -> Static:
        if not proto.attribute:
            raise self.sheet.refuse("has no value")
        attribute = proto.attribute[0]
        if attribute.name == "value":
            return self._static(proto.output[0], attribute.t)
        value = onnx.helper.get_attribute_value(attribute)
        kinds = {"value_float": "f4", "value_int": "i8"}
        kind = kinds.get(attribute.name.removesuffix("s"))
        if kind is None:
            raise self.sheet.refuse(f"has a {attribute.name}, which torch has not")
        return computed(proto.output[0], np.asarray(value, kind))
