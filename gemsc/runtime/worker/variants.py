"""Variants: the graphs of a program at work, of which a step, or its part, runs one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gemsc.messages.message import Input
from gemsc.runtime.tiles.grid import Grid
from gemsc.runtime.transport.device_transport import DeviceTransport
from gemsc.runtime.worker.program import RankPlace, RankProgram, Run
from gemsc.runtime.worker.stages import Stages
from gemsc.runtime.worker.steps import BatchShape
from gemsc.runtime.worker.updates import Updates


@dataclass(frozen=True)
class Variant:
    """A graph of the program at work: the file of a phase, or of another shape.

    `trained` are the parameters that have gradients meanwhile; None: whichever have.
    """

    program: RankProgram
    stages: Stages
    updates: Updates
    forwards: Mapping[Run, Callable[..., Any]]
    shape: BatchShape
    grids: dict[int, Grid]  # by stage, where it is split
    grid: Grid | None  # of what is done beside stages
    trained: frozenset[str] | None = None


class Variants(dict[str, Variant]):
    """All graphs by their names; "" is the program's own."""

    @property
    def updates(self) -> dict[str, Updates]:
        """The updates of a step by the names of its phases; "" is the program's own."""
        updates: dict[str, Updates] = {}
        for name, variant in self.items():  # shapes have those of the program
            if variant.updates not in updates.values():
                updates[name] = variant.updates
        return updates

    @property
    def num_updates(self) -> int:
        """How many updates there were since the start, of all phases."""
        return sum(updates.count for updates in self.updates.values())

    @property
    def inputs(self) -> list[Input]:
        """What this rank reads of each micro-batch, in any graph."""
        programs = (variant.program for variant in self.values())
        return [item for program in programs for item in program.inputs.values()]


def grids_of(
    transport: DeviceTransport, place: RankPlace, program: RankProgram, stages: Stages
) -> tuple[dict[int, Grid], Grid | None]:
    """Give each stage of a tile a grid to talk through; return them, and one beside."""
    tiles, grids = program.tiles, dict[int, Grid]()
    if tiles is None:
        return grids, None
    ranks = tuple(place.first_rank + rank for rank in tiles.ranks)
    for run, stage in stages.items():
        grid = grids.setdefault(run.stage, Grid(transport, ranks, tiles.tile))
        stage.grid = grid  # type: ignore[assignment]
    grid = Grid(transport, ranks, tiles.tile)
    grid.connect(tiles.sums)
    return grids, grid
