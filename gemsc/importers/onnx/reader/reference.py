"""What an ONNX file gives by the `onnx` package's own reference implementation."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from gemsc.importers.onnx.reader.file import OnnxTensors, load_model
from gemsc.importers.weight import Array


class OnnxReference:
    """A function from inputs to outputs, in evaluation."""

    def __init__(self, tensors: OnnxTensors, inputs: Sequence[str]) -> None:
        """Begin; `inputs` are their names in the order in which they come."""
        self.tensors, self.inputs = tensors, tuple(inputs)

    def __call__(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """Return the outputs."""
        model = load_model(self.tensors.path)
        self._fill(model.graph)
        _evaluate(model.graph)
        given = dict(zip(self.inputs, arrays, strict=True))
        found = ReferenceEvaluator(model).run(None, given)
        return list(found)

    def _fill(self, graph: onnx.GraphProto) -> None:
        """Put tensors that are in other files into the graph."""
        for tensor in graph.initializer:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                array = self.tensors.read(tensor.name)
                tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def _evaluate(graph: onnx.GraphProto) -> None:
    """Have what trains behave as in evaluation."""
    for node in graph.node:
        if node.op_type == "Dropout":
            del node.input[1:]
        if node.op_type == "BatchNormalization" and len(node.output) > 1:
            for attribute in node.attribute:
                if attribute.name == "training_mode":
                    attribute.i = 0
            del node.output[1:]
