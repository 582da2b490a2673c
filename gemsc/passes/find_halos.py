"""Find halos: what tiles are given, or compute, beyond their own parts.

Example, two tiles one above the other and a convolution of 3 x 3:
    input x of 64 x 64: the upper tile is given rows 0 to 33, the lower one 31 to 64
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from gemsc.base.grid_shape import GridShape
from gemsc.ir.halos import Halos
from gemsc.ir.program import Placement, Program
from gemsc.passes.base import Pass
from gemsc.passes.branches.lowering import lower_node
from gemsc.passes.spatial.classify import probe_of
from gemsc.passes.spatial.fusing import choose_fused
from gemsc.passes.spatial.lowering import Lowering
from gemsc.planner.traffic import exchanges


@dataclass(frozen=True)
class FindHalos(Pass):
    """Lower the first tile to learn what all tiles want of inputs and of each other.

    Inputs come with the halo that their users want; shards have none. Of other
    exchanges one serves up to so many `layers`; 0: each layer has its own. `grids` are
    as for `SplitTiles`.
    """

    name: ClassVar[str] = "find-halos"
    requires: ClassVar[tuple[str, ...]] = ("stages",)
    provides: ClassVar[tuple[str, ...]] = ("halos",)

    grids: tuple[GridShape, ...]
    layers: int = 0

    def apply(self, program: Program) -> Program:
        """Return the program with its halos."""
        if not any(grid.tiles for grid in self.grids):
            return replace(program, halos=Halos())
        low, halos = self._lowering(program), Halos()
        lowered = low.run()
        if self.layers:
            placed = replace(lowered, placement=Placement("", (), self.grids))
            chosen = choose_fused(low, program.require_stages(), self.layers)
            halos = replace(chosen, unfused=_traffic(placed))
            low = self._lowering(program, halos)
            low.run()
        halos = replace(halos, inputs=low.inputs.wide_inputs())
        return replace(program, halos=halos)

    def _lowering(self, program: Program, halos: Halos | None = None) -> Lowering:
        probe = probe_of(program)
        return Lowering(program, self.grids, 0, probe, lower_node, halos=halos)


def _traffic(program: Program) -> dict[int, tuple[int, int]]:
    """Return the exchanges of each stage and their bytes; inputs come with any halo."""
    found = {}
    for stage in program.require_stages():
        sizes = [t.num_bytes for t in exchanges(program, stage, with_inputs=False)]
        found[stage.index] = len(sizes), sum(sizes)
    return found
