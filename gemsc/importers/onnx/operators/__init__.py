"""The operators by name, `OPERATORS`: each module adds its functions to the table."""

from gemsc.importers.onnx.operators import (  # noqa: F401
    elementwise,
    layers,
    places,
    resize,
    sequence,
    shape,
    windows,
)
from gemsc.importers.onnx.operators.control import CONTROL as CONTROL
from gemsc.importers.onnx.operators.node import OPERATORS as OPERATORS
