"""Annotate tiles: costs and saved bytes of what one tile runs.

Example, a tile of 2 x 2:
    %conv = call_module conv1(halo)  9.4 MFLOP ...          # before, from the model
    %conv = call_module conv1(halo)  2.4 MFLOP, 0.3 MiB saved ...     # after
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gemsc.ir.program import Program
from gemsc.ir.staged import keep_stages
from gemsc.passes.annotate import Annotate
from gemsc.passes.base import Pass

__all__ = ["AnnotateTiles"]


@dataclass(frozen=True)
class AnnotateTiles(Pass):
    """Run `Annotate` on a graph that is cut into stages already, and keep those."""

    name: ClassVar[str] = "annotate-tiles"
    requires: ClassVar[tuple[str, ...]] = ("stages",)

    training: bool = True

    def apply(self, program: Program) -> Program:
        """Return the program with facts on every node."""
        annotated = Annotate(training=self.training).apply(program)
        nodes = zip(program.graph.nodes, annotated.graph.nodes, strict=True)
        return keep_stages(program, annotated.graph, dict(nodes))
