"""Split tiles: the graph that one tile of a split stage runs.

Example, two tiles one above the other, on the upper one:
    %conv = call_module conv(%x)                       # before, 64 x 64, padding 1
    %halo = redistribute(%x, Exchange(...))            # after: 34 x 66 of 64 x 64
    %conv = call_module conv(%halo)                    # 32 x 64, padding 0
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gemsc.base.grid_shape import GridShape
from gemsc.base.parts import Part
from gemsc.errors import InternalError
from gemsc.ir import meta
from gemsc.ir.flow import owned_tensors
from gemsc.ir.halos import Halos
from gemsc.ir.holder import attribute
from gemsc.ir.program import Program
from gemsc.passes.base import Pass
from gemsc.passes.branches.lowering import lower_node
from gemsc.passes.shards.local import put_parts
from gemsc.passes.spatial.classify import probe_of
from gemsc.passes.spatial.lowering import Lowering


@dataclass(frozen=True)
class SplitTiles(Pass):
    """Lower the stages that have a grid to what one tile of it runs.

    `grids` has the shape of each stage's grid. `tile` is the tile whose graph is
    wanted; a stage with a smaller grid is lowered for tile `tile % size`, so that one
    program holds all stages and its layouts say what every tile of every stage holds.

    A value that goes from one stage to another with the same grid arrives as it is
    held. Where the grids differ, the later stage begins with a `redistribute` node
    whose exchange has as many held boxes as the earlier grid has tiles and as many
    wanted ones as its own: that node is what the transfer does.

    With `rings`, attention whose keys are cut by tokens does not gather them.

    What tiles have beyond their own parts is in `program.halos`.

    The result has blocks and stages of the new nodes, the placement, and no transfers.
    """

    requires = ("stages", "halos")
    provides = ("stages",)
    of_one_rank = True

    grids: tuple[GridShape, ...]
    tile: int = 0
    training: bool = True
    rings: bool = False

    def apply(self, program: Program) -> Program:
        """Return the program of one tile, with layouts and without facts."""
        num_stages = len(program.require_stages())
        if len(self.grids) != num_stages:
            raise InternalError(f"{len(self.grids)} grids for {num_stages} stages")
        low = Lowering(
            program,
            self.grids,
            self.tile,
            probe_of(program),
            program.halos or Halos(),
            lower_node,
            rings=self.rings,
            training=self.training,
        )
        parts = _parts(program, self.tile)
        names = {alias: parts[n] for alias, n in program.aliases.items() if n in parts}
        owned = _owned(program, parts)
        lowered = replace(low.run(), tile=self.tile, parts=parts, owned=owned)
        put_parts(lowered.module, parts | names)
        for node in lowered.graph.nodes:
            meta.drop_facts(node)
        return lowered


def _owned(program: Program, parts: dict[str, Part]) -> tuple[tuple[str, ...], ...]:
    """Return what a rank that has these parts has of each stage."""
    nothing = {name for name, part in parts.items() if not part.share}
    owned = owned_tensors(program)
    return tuple(tuple(n for n in names if n not in nothing) for names in owned)


def _parts(program: Program, tile: int) -> dict[str, Part]:
    """Return what one rank of each grid has of the tensors that ranks share out."""
    parts: dict[str, Part] = {}
    for shards in program.shards.values():
        rank = tile % shards.count
        parts |= {tensor.name: tensor.parts[rank] for tensor in shards.cut}
        for name, owner in shards.placed:
            shape = tuple(attribute(program.module, name).shape)
            parts[name] = Part(shape) if owner == rank else Part.nothing(shape)
    return parts
