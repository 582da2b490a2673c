"""A node of an ONNX graph, as the function of its operator sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from torch import nn

from gemsc.errors import GemscError
from gemsc.importers.onnx.names import is_machine_made, wish
from gemsc.importers.onnx.parameters import Parameters
from gemsc.importers.onnx.static import Static, computed
from gemsc.importers.sheet import Sheet, Symbol
from gemsc.importers.weight import Array, Weight


@dataclass(eq=False)
class Node:
    """What an operator works on: operands, attributes, and the sheet to write to.

    `kind` is the operator's name and `opset` the version that the file imports of its
    domain. An operand that the file leaves out is None.
    """

    sheet: Sheet
    kind: str
    name: str
    opset: int
    operands: Sequence[Symbol | Static | None]
    attributes: Mapping[str, Any]
    outputs: Sequence[str]  # "" for one that is not used
    proto: onnx.NodeProto
    parameters: Parameters

    def refuse(self, what: str, help: str | None = None) -> GemscError:
        """Return the error for a node that cannot be had; it names the node."""
        return self.sheet.refuse(what, help)

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute: a number, text, a list of them, or an array."""
        return self.attributes.get(name, default)

    def operand(self, index: int) -> Symbol | Static | None:
        """Return an operand; None where the file gives none."""
        return self.operands[index] if index < len(self.operands) else None

    def array(self, index: int) -> Array | None:
        """Return the numbers of an operand; None where it is left out.

        Raises:
            GemscError: it depends on the inputs of the network.
        """
        operand = self.operand(index)
        if isinstance(operand, Symbol):
            raise self.refuse(
                f"needs a constant as input {index}, which is computed from data here",
                help="export the model with fixed shapes, or keep that part outside",
            )
        return None if operand is None else operand.array

    def setting(self, name: str, index: int) -> list[Any] | None:
        """Return what was an attribute in old opsets and is an input in newer ones.

        A single number is a list of one, as files have it both ways.
        """
        if name in self.attributes:
            found = np.asarray(self.attributes[name])
        else:
            array = self.array(index)
            if array is None:
                return None
            found = array
        numbers: list[Any] = found.reshape(-1).tolist()
        return numbers

    def settings(self, name: str, index: int) -> list[Any]:
        """Return such numbers where there must be some.

        Raises:
            GemscError: the file leaves them out.
        """
        found = self.setting(name, index)
        if found is None:
            raise self.refuse(f"has no {name}")
        return found

    def weight(self, index: int) -> Static | None:
        """Return an operand that a layer holds: one that is known beforehand."""
        operand = self.operand(index)
        return operand if isinstance(operand, Static) else None

    def is_filler(self, index: int, value: float) -> bool:
        """Return whether an operand is what is written where a layer has none.

        Such as a scale of ones, under a name that an exporter has made.
        """
        found = self.weight(index)
        names = found.weight.sources if found is not None else ()
        return (
            found is not None
            and all(map(is_machine_made, names))
            and bool(np.all(found.array == value))
        )

    def held(self, weight: Static | Weight, shape: Sequence[int]) -> Symbol | None:
        """Return the parameter of another layer that has these elements, if any."""
        weight = weight.weight if isinstance(weight, Static) else weight
        return self.parameters.held(weight, tuple(shape))

    def value(self, index: int) -> Symbol:
        """Return an operand as forward names it; what is known becomes a tensor there.

        Raises:
            GemscError: the file leaves it out.
        """
        operand = self.operand(index)
        if operand is None:
            raise self.refuse(f"has no input {index}")
        if isinstance(operand, Symbol):
            return operand
        if operand.trained or len(operand.shape) < (1 if operand.sized else 2):
            return self.parameters.value(self.proto, operand)
        return self._of_batch(operand)

    @property
    def batch(self) -> Symbol | None:
        """The input of the network whose first axis tells the batch."""
        return next((v for v in self.sheet.inputs if 0 in v.batch_axes), None)

    def _of_batch(self, operand: Static) -> Symbol:
        """Return what is known but for the batch; rows that are alike are kept once."""
        row = operand.array[:1]
        batch = self.batch
        if (
            batch is None
            or operand.shape[0] != batch.shape[0]
            or operand.shape[0] == 1
            or not np.array_equal(operand.array, np.broadcast_to(row, operand.shape))
        ):
            return self.parameters.value(self.proto, operand)
        first = self.parameters.value(self.proto, computed(operand.name, row))
        rest = ", ".join(["-1"] * (len(operand.shape) - 1))
        sizes = ", ".join(filter(None, [f"{batch}.shape[0]", rest]))
        return self.sheet.line(wish(self.proto, ""), f"{first}.expand({sizes})")

    def layer(self, module: nn.Module, **weights: Static | Weight | None) -> str:
        """Add a layer with the weights that it has; return the text that names it.

        It stands where the names of its weights say, else where the node's name does.
        """
        given = {key: weight for key, weight in weights.items() if weight is not None}
        return self.parameters.layer(self.proto, module, given)

    def gives(self, text: str, output: int = 0) -> Symbol:
        """Add the line that computes an output."""
        return self.sheet.line(wish(self.proto, self.outputs[output]), text)


# Returns the values of the outputs in their order; None for one that is not used
Operator = Callable[[Node], "Symbol | Sequence[Symbol | None]"]
