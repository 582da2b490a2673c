"""What the text of one stage is made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from gemsc.codegen.parts import Segments
from gemsc.ir.flow import StageFlow
from gemsc.ir.program import Program

__all__ = ["StageText"]


@dataclass(frozen=True, slots=True)
class StageText:
    """What `write_stage` needs to know of one stage.

    `twins` maps each node to its like in the graph for evaluation; where the two graphs
    differ in more than constants it is None and the class gets a second forward, for
    `evaluation`. `structure` turns the texts of the outputs into what the model
    returns. `segments` are blocks that are recomputed or offloaded, with their nodes.
    """

    class_name: str
    docstring: str
    program: Program
    flow: StageFlow
    owned: tuple[str, ...]
    names: dict[fx.Node, str]
    twins: dict[fx.Node, fx.Node] | None
    evaluation: StageFlow
    structure: Callable[[list[str]], str]
    segments: Segments = ()
    tile: int | None = None  # of the stage's grid, if it has one

    @property
    def apart(self) -> bool:
        """Whether evaluation has a forward of its own."""
        return self.twins is None
