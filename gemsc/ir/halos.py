"""Halos: which values tiles compute, fetch or are given beyond their own part."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from gemsc.base.boxes import Box
from gemsc.base.grid_shape import GridShape

Wide = dict[tuple[tuple[str | int, ...], GridShape], tuple[Box, ...]]
"""What the tiles of a grid are given of an input, by the input's path and the grid."""


@dataclass(frozen=True, slots=True)
class Need:
    """What each tile wants of a value; outside is padding, or the other side."""

    source: fx.Node
    wanted: tuple[Box, ...]
    wraps: bool = False


@dataclass(frozen=True)
class Halos:
    """The choice of wide exchanges, by names of nodes.

    `wide` are values of which each tile computes more than it owns: the layer that
    wants a halo of such a value finds it there. `fetched` are values, by the stage that
    uses them, of which one exchange brings all that several users want. `inputs` come
    with more than the tile's own part. `unfused` has the exchanges of each stage, and
    their bytes, that there would be without.
    """

    wide: dict[str, tuple[Box, ...]] = field(default_factory=dict)
    fetched: dict[tuple[str, int], tuple[Box, ...]] = field(default_factory=dict)
    inputs: Wide = field(default_factory=dict)
    unfused: dict[int, tuple[int, int]] = field(default_factory=dict)

    def for_evaluation(self, twins: dict[fx.Node, fx.Node] | None) -> Halos:
        """Return the choice for the graph in evaluation mode.

        Inputs are read as in training: what more evaluation wants is exchanged. The
        rest of the choice is the same for twins, and none for another graph.
        """
        if twins is None:
            return Halos(inputs=self.inputs)
        names = {node.name: twin.name for node, twin in twins.items()}
        return Halos(
            {names[name]: boxes for name, boxes in self.wide.items()},
            {(names[n], stage): boxes for (n, stage), boxes in self.fetched.items()},
            self.inputs,
            self.unfused,
        )
