"""Place stages: which ranks run which stage of which replica.

Example, four ranks:
    linear    stages 0 1 2 3             on ranks 0 1 2 3
    mirrored  the same, and replica 1    on ranks 3 2 1 0
    folded    stages 0 1 2 3 4 5 6 7     on ranks 0 1 2 3 3 2 1 0
    looped    stages 0 1 2 3 4 5 6 7     on ranks 0 1 2 3 0 1 2 3
    explicit  any ranks for the stages of one replica, as the user lists them

A grid of ranks is placed like one rank: with a grid of 2 x 2 and two lone ranks
    linear    stages 0 1 2               on ranks 0-3 4 5
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from gemsc.base.grid_shape import GridShape
from gemsc.ir.program import Placement, Program
from gemsc.passes.base import Pass


@dataclass(frozen=True)
class PlaceStages(Pass):
    """Give every (replica, stage) its ranks.

    `rows[replica][stage]` is a group of ranks, `groups` are the shapes of their grids;
    `kind` is the name of such rows.
    """

    requires = ("stages",)
    provides = ("placement",)

    kind: str
    rows: tuple[tuple[int, ...], ...]
    groups: tuple[GridShape, ...]

    def apply(self, program: Program) -> Program:
        """Return the program with its placement."""
        edges = [0, *accumulate(grid.size for grid in self.groups)]
        members = [tuple(range(start, end)) for start, end in pairwise(edges)]
        ranks = tuple(tuple(members[group] for group in row) for row in self.rows)
        grids = tuple(self.groups[group] for group in self.rows[0])
        grids = grids if any(self.groups) else ()
        return replace(program, placement=Placement(self.kind, ranks, grids))
