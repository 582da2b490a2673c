"""Local batchnorm: each tile normalises by its own statistics; not what one rank does.

Example, on a tile:
    %bn = batch_norm(grid, %conv, %bn1)   # before: statistics of all tiles
    %bn = call_module bn1(%conv)          # after: of this one, nothing is sent
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.nn import functional as F

from gemsc.ir import meta
from gemsc.ir.holder import copied_graph
from gemsc.ir.program import Program
from gemsc.ir.staged import moved
from gemsc.passes.base import Pass
from gemsc.runtime import tiles


@dataclass(frozen=True)
class LocalBatchnorm(Pass):
    """Let BatchNorm work as if each tile were an image of its own.

    It needs no messages. The result is not that of one rank; the running statistics
    that are saved are those of the first tile.
    """

    requires = ("stages",)

    def apply(self, program: Program) -> Program:
        """Return the program with the user's own layers in the place of the grid's."""
        changed = moved(program, *copied_graph(program.graph))
        for node in changed.graph.nodes:
            if node.target is tiles.functional_batch_norm:
                node.target, node.args = F.batch_norm, node.args[1:]
            if node.target is tiles.batch_norm:
                node.op, node.target = "call_module", meta.layer(node)
                node.args, node.kwargs = node.args[1:2], {}
        return changed
