"""Place stages: which ranks run which stage of which replica.

Example, four ranks:
    linear    stages 0 1 2 3             on ranks 0 1 2 3
    mirrored  the same, and replica 1    on ranks 3 2 1 0
    folded    stages 0 1 2 3 4 5 6 7     on ranks 0 1 2 3 3 2 1 0
    looped    stages 0 1 2 3 4 5 6 7     on ranks 0 1 2 3 0 1 2 3
    explicit  any ranks for the stages of one replica, as the user lists them
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from gemsc.ir.program import Placement, Program
from gemsc.passes.base import Pass
from gemsc.schedules import place

__all__ = ["PlaceStages"]


@dataclass(frozen=True)
class PlaceStages(Pass):
    """Give every (replica, stage) its rank."""

    name: ClassVar[str] = "place-stages"
    requires: ClassVar[tuple[str, ...]] = ("stages",)
    provides: ClassVar[tuple[str, ...]] = ("placement",)

    kind: str = "linear"
    num_ranks: int = 1
    num_replicas: int = 1
    explicit: tuple[int, ...] = ()

    def apply(self, program: Program) -> Program:
        """Return the program with its placement."""
        num_stages = len(program.require_stages())
        rows: tuple[tuple[int, ...], ...] = (self.explicit,)
        if not self.explicit:
            rows = place(self.kind, num_stages, self.num_ranks, self.num_replicas)
        ranks = tuple(tuple((rank,) for rank in row) for row in rows)
        return replace(program, placement=Placement(self.kind, ranks))
