"""Place stages: which ranks run which stage of which replica.

Example, four stages on four ranks:
    linear    stage 0 1 2 3 on rank 0 1 2 3
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from gemsc.errors import GemscError
from gemsc.ir.program import Placement, Program
from gemsc.passes.base import Pass

__all__ = ["PLACEMENTS", "PlaceStages"]

PLACEMENTS = ("linear",)


@dataclass(frozen=True)
class PlaceStages(Pass):
    """Give every (replica, stage) its ranks."""

    name: ClassVar[str] = "place-stages"
    requires: ClassVar[tuple[str, ...]] = ("stages",)
    provides: ClassVar[tuple[str, ...]] = ("placement",)

    kind: str = "linear"

    def apply(self, program: Program) -> Program:
        """Return the program with its placement."""
        if self.kind not in PLACEMENTS:
            raise GemscError(
                f"unknown placement '{self.kind}'",
                help=f"choose one of {', '.join(PLACEMENTS)}",
            )
        ranks = tuple((stage.index,) for stage in program.require_stages())
        return replace(program, placement=Placement(self.kind, (ranks,)))
