"""What is cut among the ranks that share a stage's channels, heads, features, words."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from gemsc.base.parts import Part

__all__ = ["CutTensor", "StageShards", "WholeTensor"]


@dataclass(frozen=True, slots=True)
class CutTensor:
    """A parameter or buffer of which each rank has some units of one dimension.

    `parts` are those of all ranks. `noun` says what a unit is: head, feature, channel,
    word.
    """

    name: str
    noun: str
    parts: tuple[Part, ...]

    def told(self, shard: int) -> str:
        """Return what a shard has of it: `heads 0 to 2 of 4`."""
        start, stop = self.parts[shard].rows
        return f"{self.noun}s {start} to {stop} of {self.parts[shard].units}"


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """A parameter that every rank holds as a whole, and why."""

    name: str
    num_bytes: int
    reason: str


@dataclass(frozen=True)
class StageShards:
    """How the ranks of one stage share it.

    `trunk` says how values outside the cut regions are held: "whole", or split by
    "batch" or "sequence": then `split` are the values that are, by the names of their
    nodes, each with the dimension.
    """

    count: int
    trunk: str
    cut: tuple[CutTensor, ...]
    whole: tuple[WholeTensor, ...] = ()
    split: tuple[tuple[str, int], ...] = ()

    def for_evaluation(self, twins: dict[fx.Node, fx.Node] | None) -> StageShards:
        """Return the same cuts for the graph in evaluation mode.

        Values outside the regions are split alike in twins, and whole in other graphs.
        """
        if twins is None:
            return replace(self, trunk="whole", split=())
        names = {node.name: twin.name for node, twin in twins.items()}
        split = tuple((names[n], dim) for n, dim in self.split if n in names)
        return replace(self, split=split)
