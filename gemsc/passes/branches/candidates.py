"""Candidates: what may be a fork, of which those are taken that save most together."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from torch import fx

from gemsc.ir import meta
from gemsc.ir.flow import base_name, layer_path, shared_path, shared_start, unique_names
from gemsc.ir.holder import attributes_of
from gemsc.ir.shards import Branch, Fork
from gemsc.passes.branches.assignment import ALL
from gemsc.passes.branches.forks import Component, Finder, ForkWindow

NO_GAIN = "nothing is saved"


@dataclass(frozen=True, slots=True)
class ForkChoice:
    """A window as a fork: the rank of each component, or all of them.

    `first` and `last` are the places of the first node of its branches and of its join.
    """

    window: ForkWindow
    ranks: tuple[int, ...]
    saved: float
    first: int
    last: int
    reason: str = ""

    @classmethod
    def of(
        cls,
        finder: Finder,
        window: ForkWindow,
        ranks: Sequence[int],
        saved: float,
        reason: str = "",
    ) -> ForkChoice:
        """Return a window as a fork."""
        parts = window.components
        shared = [c for c, r in zip(parts, ranks, strict=True) if r != ALL] or parts
        first = min(min(part.places) for part in shared)
        last = finder.position[window.join]
        return cls(window, tuple(ranks), saved, first, last, reason)

    @property
    def to_share(self) -> float:
        """The seconds of all that is before the join, but the slowest part."""
        seconds = [part.seconds for part in self.window.components]
        return sum(seconds) - max(seconds)

    def fork(self) -> Fork:
        """Return it with names."""
        window = self.window
        name, names = names_of(window.components)
        branches = tuple(
            Branch(branch_name, tuple(n.name for n in part.nodes), rank, part.seconds)
            for branch_name, part, rank in zip(
                names, window.components, self.ranks, strict=True
            )
            if rank != ALL
        )
        added = tuple(node.name for node in window.added)
        fork = Fork(name, window.join.name, branches, added, self.saved, self.reason)
        if self.reason == NO_GAIN:
            return replace(fork, reason=_reason(window, fork))
        return fork

    def overlaps(self, other: ForkChoice) -> bool:
        """Whether two have a part of the stage's nodes in common."""
        return self.first <= other.last and other.first <= self.last


def _reason(window: ForkWindow, fork: Fork) -> str:
    """Return why the branches of a fork are not shared out."""
    stay = [part for part in window.components if part.stays]
    if stay:
        slowest = max(stay, key=lambda part: part.seconds)
        others = [branch.seconds for branch in fork.branches]
        if len(others) < 2 or slowest.seconds >= max(others):
            return f"all ranks compute {names_of([slowest])[0]}: {slowest.stays}"
    slowest_branch = max(fork.branches, key=lambda branch: branch.seconds)
    share = slowest_branch.seconds / fork.seconds
    if share > 0.5:
        return f"{slowest_branch.name} alone takes {100 * share:.0f} % of {fork.name}"
    return "its messages take longer than what is saved"


def heaviest(candidates: list[ForkChoice], bonus: float = 0.0) -> list[ForkChoice]:
    """Return those that save most together, of which no two overlap, in order.

    Each counts for a `bonus` more: if that is large, as many as can be are taken.
    """
    order = sorted(candidates, key=lambda choice: (choice.last, -choice.first))
    lasts = [choice.last for choice in order]
    best: list[tuple[float, list[ForkChoice]]] = [(0.0, [])]
    for number, choice in enumerate(order):
        saved, before = best[bisect_right(lasts, choice.first - 1, hi=number)]
        taken = saved + choice.saved + bonus, [*before, choice]
        best.append(max(best[-1], taken, key=itemgetter(0)))
    return best[-1][1]


def names_of(parts: Sequence[Component]) -> tuple[str, list[str]]:
    """Return the name of a fork, and that of each of its components.

    The fork is called after the module in which all their layers are, or after them:
    `image and text`.
    """
    layers = [node for part in parts for node in part.nodes if _has_weights(node)]
    fork = shared_path(map(layer_path, layers))
    names = list(unique_names(_name(part.nodes, fork) for part in parts))
    between = " and " if len(names) < 3 else " to "
    return fork or between.join(dict.fromkeys([names[0], names[-1]])), names


def _name(nodes: Sequence[fx.Node], fork: str) -> str:
    """Return `one.b` of layers one.b.0 and one.b.1, and of one.b_0 and one.b_1.

    Else it is that of the slowest layer; of no layers, the variable's.
    """
    layers = [node for node in nodes if _has_weights(node)]
    if not layers:
        return f"{fork}.{base_name(nodes[0])}" if fork else base_name(nodes[0])
    heavy = [node for node in layers if meta.facts(node).heavy] or layers
    shared = shared_path(map(layer_path, layers))
    letters = "".join(shared_start(map(layer_path, heavy))).rstrip("._")
    slowest = layer_path(max(heavy, key=lambda node: meta.facts(node).seconds))
    depth = len(fork.split(".")) + 1 if fork else 1
    word = ".".join(slowest.split(".")[:depth])
    longer = (name for name in (shared, letters, word) if len(name) > len(fork))
    return next(longer, fork)


def _has_weights(node: fx.Node) -> bool:
    facts = meta.facts(node)
    is_layer = facts.heavy or facts.parameter_bytes > 0
    return is_layer and bool(attributes_of(node))
