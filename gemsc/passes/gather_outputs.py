"""Gather outputs: what the model returns is put together where the loss is.

Example, a U-Net that is tiled from end to end, in evaluation:
    return %head                      # before: each rank has its tile of it
    %whole = whole(%head)             # after: each rank gets all of it
    return %whole
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from gemsc.ir import meta
from gemsc.ir.program import Program
from gemsc.ir.staged import copy_graph, keep_stages
from gemsc.passes.base import Pass

__all__ = ["DropMarks", "GatherOutputs", "whole"]


def whole(value: Any) -> Any:
    """Return the value as it is: a mark in a graph for what must not be split."""
    return value


@dataclass(frozen=True)
class GatherOutputs(Pass):
    """Mark each output in the stage of the loss; the marks split like any operation.

    No rule says how to split `whole`, so its argument is gathered.
    """

    name: ClassVar[str] = "gather-outputs"
    requires: ClassVar[tuple[str, ...]] = ("stages", "placement")

    def apply(self, program: Program) -> Program:
        """Return the program with a mark on each output that a node computes."""
        graph, mapping = copy_graph(program)
        home = program.require_stages()[program.home]
        computed = [n for n in program.outputs if n in set(program.compute_nodes)]
        outputs = list(dict.fromkeys(computed))
        marks: dict[fx.Node, fx.Node] = {}
        with graph.inserting_after(mapping[home.nodes[-1]]):
            for node in reversed(outputs):
                mark = graph.call_function(whole, (mapping[node],))
                meta.copy_meta(node, mark)
                marks[mapping[node]] = mark
        given = tuple(marks.get(mapping[node], mapping[node]) for node in program.outputs)
        loss = mapping[program.loss] if program.loss is not None else None
        mapping[program.output].args = ((loss, given),)
        added = tuple(marks[mapping[node]] for node in outputs)
        return keep_stages(program, graph, mapping, {home.index: added})


@dataclass(frozen=True)
class DropMarks(Pass):
    """Take the marks out again, once the stages are split."""

    name: ClassVar[str] = "drop-marks"
    requires: ClassVar[tuple[str, ...]] = ("stages",)

    def apply(self, program: Program) -> Program:
        """Return the program without calls of `whole`."""
        graph, mapping = copy_graph(program)
        for node in [n for n in program.graph.nodes if n.target is whole]:
            mark = mapping.pop(node)
            (value,) = mark.all_input_nodes
            mark.replace_all_uses_with(value)
            graph.erase_node(mark)
        return keep_stages(program, graph, mapping)
