"""Layers of a lowered program: the user's, some with other settings."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import fx, nn

from gemsc.ir.holder import put_layer, shallow_copy
from gemsc.ir.program import Program
from gemsc.passes.spatial.values import Refused

__all__ = ["Layers"]


class Layers:
    """The module of a lowered program: the user's own, which stays as it is."""

    def __init__(self, program: Program, lowered: nn.Module) -> None:
        self._old = program.module
        self._new = lowered
        self._calls = Counter(
            str(n.target) for n in program.graph.nodes if n.op == "call_module"
        )

    def is_shared(self, path: str) -> bool:
        """Whether a layer is called more than once."""
        return self._calls[path] > 1

    def replace(self, path: str, layer: nn.Module) -> None:
        """Put a layer in the place of the user's, whose module stays as it is."""
        put_layer(self._new, path, layer)

    def changed(self, node: fx.Node, changes: dict[str, Any]) -> nn.Module:
        """Return a copy of a node's layer with other settings; the same parameters.

        Raises:
            Refused: the layer is called elsewhere too.
        """
        path = str(node.target)
        if self.is_shared(path):
            raise Refused("the layer is called more than once")
        layer = shallow_copy(self._old.get_submodule(path))
        for name, value in changes.items():
            setattr(layer, name, value)
        return layer
