"""Halos: which values tiles compute beyond their own part, and which they fetch so."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from gemsc.boxes import Box

__all__ = ["Halos", "Need"]


@dataclass(frozen=True, slots=True)
class Need:
    """What each tile wants of a value; outside is `fill`, or the other side."""

    source: fx.Node
    wanted: tuple[Box, ...]
    fill: float
    wraps: bool = False


@dataclass(frozen=True)
class Halos:
    """The choice of wide exchanges, by names of nodes.

    `wide` are values of which each tile computes more than it owns: the layer that
    wants a halo of such a value finds it there. `fetched` are values, by the stage that
    uses them, of which one exchange brings all that several users want. `unfused` has
    the exchanges of each stage, and their bytes, that there would be without.
    """

    wide: dict[str, tuple[Box, ...]] = field(default_factory=dict)
    fetched: dict[tuple[str, int], tuple[Box, ...]] = field(default_factory=dict)
    unfused: dict[int, tuple[int, int]] = field(default_factory=dict)

    def of_twin(self, twins: dict[fx.Node, fx.Node]) -> Halos:
        """Return the same choice for a graph with other names."""
        names = {node.name: twin.name for node, twin in twins.items()}
        return Halos(
            {names[name]: boxes for name, boxes in self.wide.items()},
            {(names[n], stage): boxes for (n, stage), boxes in self.fetched.items()},
            self.unfused,
        )
