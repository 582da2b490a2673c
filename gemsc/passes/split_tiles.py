"""Split tiles: the graph that one tile of a split stage runs.

Example, two tiles one above the other, on the upper one:
    %conv = call_module conv(%x)                       # before, 64 x 64, padding 1
    %halo = redistribute(%x, Exchange(...))            # after: 34 x 66 of 64 x 64
    %conv = call_module conv(%halo)                    # 32 x 64, padding 0
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar
from weakref import WeakKeyDictionary

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gemsc.errors import InternalError
from gemsc.ir import meta
from gemsc.ir.fake import fake_copy
from gemsc.ir.program import Program
from gemsc.passes.base import Pass
from gemsc.passes.spatial.classify import Probe
from gemsc.passes.spatial.fusing import choose_fused
from gemsc.passes.spatial.halos import Halos
from gemsc.passes.spatial.lowering import Lowering
from gemsc.passes.spatial.rules import lower_call
from gemsc.planner.tiles import exchanges

__all__ = ["SplitTiles", "find_halos"]

NO_HALOS = Halos()
_PROBES: WeakKeyDictionary[nn.Module, Probe] = WeakKeyDictionary()


@dataclass(frozen=True)
class SplitTiles(Pass):
    """Lower the stages that have a grid to what one tile of it runs.

    `grids` has one entry per stage: tiles along each spatial axis, () for a stage that
    is not split. `tile` is the tile whose graph is wanted; a stage with a smaller grid
    is lowered for tile `tile % size`, so that one program holds all stages and its
    layouts say what every tile of every stage holds.

    A value that goes from one stage to another with the same grid arrives as it is
    held. Where the grids differ, the later stage begins with a `redistribute` node
    whose exchange has as many held boxes as the earlier grid has tiles and as many
    wanted ones as its own: that node is what the transfer does.

    `halos` are what tiles have beyond their own parts, from `find_halos`.

    The result has blocks and stages of the new nodes, the placement, and no transfers.
    """

    name: ClassVar[str] = "split-tiles"
    requires: ClassVar[tuple[str, ...]] = ("stages",)
    provides: ClassVar[tuple[str, ...]] = ("stages",)

    grids: tuple[tuple[int, ...], ...]
    tile: int = 0
    halos: Halos = NO_HALOS
    training: bool = True

    def apply(self, program: Program) -> Program:
        """Return the program of one tile, with layouts and without facts."""
        num_stages = len(program.require_stages())
        if len(self.grids) != num_stages:
            raise InternalError(f"{len(self.grids)} grids for {num_stages} stages")
        low = Lowering(
            program,
            self.grids,
            self.tile,
            _probe(program),
            lower_call,
            halos=self.halos,
            training=self.training,
        )
        lowered = replace(low.run(), tile=self.tile, unfused=self.halos.unfused)
        for node in lowered.graph.nodes:
            meta.drop_facts(node)
        return lowered


def find_halos(
    program: Program, grids: tuple[tuple[int, ...], ...], layers: int = 0
) -> Halos:
    """Return what tiles have beyond their own parts, the same for all tiles.

    Inputs come with the halo that their users want. Of other exchanges one serves up
    to so many layers; 0: each layer has its own.
    """
    probe = _probe(program)
    low = Lowering(program, grids, 0, probe, lower_call)
    done = low.run()
    halos = Halos()
    if layers:
        unfused = _traffic(done) if program.placement else {}
        halos = replace(
            choose_fused(low, program.require_stages(), layers), unfused=unfused
        )
        low = Lowering(program, grids, 0, probe, lower_call, halos=halos)
        low.run()
    return replace(halos, inputs=low.inputs.wide_inputs())


def _traffic(program: Program) -> dict[int, tuple[int, int]]:
    """Return the exchanges of each stage and their bytes; inputs come with any halo."""
    found = {}
    for stage in program.require_stages():
        sizes = [t.num_bytes for t in exchanges(program, stage, with_inputs=False)]
        found[stage.index] = len(sizes), sum(sizes)
    return found


def _probe(program: Program) -> Probe:
    """Return what classifies the program's nodes, the same for all tiles."""
    if program.module not in _PROBES:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        _PROBES[program.module] = Probe(mode, fake_copy(program.module, mode))
    return _PROBES[program.module]
