"""How ranks share a stage: what is cut among them, and who computes which branch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from gemsc.base.parts import Part

Placed = Mapping[str, Sequence[Sequence[str]]]  # by joins, the branches of each rank


@dataclass(frozen=True, slots=True)
class CutTensor:
    """A parameter or buffer of which each rank has some units of one dimension.

    `parts` are those of all ranks. `noun` says what a unit is: head, feature, channel,
    word.
    """

    name: str
    noun: str
    parts: tuple[Part, ...]

    def told(self, rank: int) -> str:
        """Return what a rank of the stage has of it: `heads 0 to 2 of 4`."""
        part = self.parts[rank % len(self.parts)]
        start, stop = part.rows
        return f"{self.noun}s {start} to {stop} of {part.units}"


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """A parameter that every rank holds as a whole, and why."""

    name: str
    num_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Branch:
    """Nodes between a fork and its join that share no value with other branches there.

    `nodes` are their names, in the order of the model; `rank` is that of the stage's
    grid which computes them, of all samples. `seconds` are those of forward and
    backward.
    """

    name: str
    nodes: tuple[str, ...]
    rank: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Fork:
    """Branches side by side, and the node that joins them: by a sum, or otherwise.

    `join` is the name of the node that all results of the branches go to. Where it adds
    them up, `added` are the additions in the order of the model, the join last.
    `seconds` are those of all branches; `saved` those that sharing them out saves, less
    what its messages take. `reason` says why they are not shared out, "" if they are.
    """

    name: str
    join: str
    branches: tuple[Branch, ...]
    added: tuple[str, ...] = ()
    saved: float = 0.0
    reason: str = ""

    @property
    def seconds(self) -> float:
        """The seconds of all branches, forward and backward."""
        return sum(branch.seconds for branch in self.branches)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes of all branches, and of those that join them."""
        inside = (name for branch in self.branches for name in branch.nodes)
        return (*inside, *dict.fromkeys((*self.added, self.join)))

    def renamed(self, names: Mapping[str, str]) -> Fork:
        """Return the fork of another graph, whose nodes have other names."""
        branches = tuple(
            replace(branch, nodes=tuple(names[n] for n in branch.nodes))
            for branch in self.branches
        )
        added = tuple(names[n] for n in self.added)
        return replace(self, join=names[self.join], branches=branches, added=added)


@dataclass(frozen=True)
class StageShards:
    """How the ranks of one stage share it.

    `forks` are those whose branches are shared out, and those that were considered.
    `placed` are the parameters and buffers that one rank alone holds, those of its
    branches, each with the rank.

    `trunk` says how values outside the cut regions are held: "whole", or split by
    "batch" or "sequence": then `split` are the values that are, by the names of their
    nodes, each with the dimension.
    """

    count: int
    trunk: str
    cut: tuple[CutTensor, ...]
    whole: tuple[WholeTensor, ...] = ()
    split: tuple[tuple[str, int], ...] = ()
    forks: tuple[Fork, ...] = ()
    placed: tuple[tuple[str, int], ...] = ()

    @cached_property
    def rank_of(self) -> dict[str, int]:
        """The rank that computes each node of a branch, by its name."""
        return {
            node: branch.rank
            for fork in self.forks
            if not fork.reason
            for branch in fork.branches
            for node in branch.nodes
        }

    @cached_property
    def split_dims(self) -> dict[str, int]:
        """The dimension in which each value is split, by its name."""
        return dict(self.split)

    @cached_property
    def fork_of(self) -> dict[str, Fork]:
        """The fork of each node of a branch and of its join, by the node's name."""
        return {
            node: fork for fork in self.forks if not fork.reason for node in fork.nodes
        }

    def branches_of(self, rank: int) -> list[str]:
        """Return the names of the branches that a rank computes."""
        shared = (fork for fork in self.forks if not fork.reason)
        return [b.name for fork in shared for b in fork.branches if b.rank == rank]

    def renamed(self, names: Mapping[str, str]) -> StageShards:
        """Return those of a graph of the same nodes, which have other names."""
        split = tuple((names[n], dim) for n, dim in self.split if n in names)
        forks = tuple(fork.renamed(names) for fork in self.forks)
        return replace(self, split=split, forks=forks)
