"""Choose which forks of a stage are shared out, and which rank computes which branch.

A fork saves the seconds of all its branches, less those of the rank with most, less its
messages. Of the forks of which no two overlap in the model's order those are taken that
save most together: an outer one, or several inside of its branches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from torch import fx

from gemsc.costs.hardware import LinkSpeed
from gemsc.ir import meta
from gemsc.ir.flow import used_tensors
from gemsc.ir.program import Program, Stage
from gemsc.ir.segments import segment_name
from gemsc.ir.shards import Fork, Placed
from gemsc.passes.branches.assignment import ALL, BranchCost, Ranks
from gemsc.passes.branches.candidates import NO_GAIN, ForkChoice, heaviest, names_of
from gemsc.passes.branches.forks import Finder, ForkWindow

MOST_TOLD = 4  # forks that are not shared out, of a stage
LEAST_TOLD = 0.01  # of a stage's seconds: what they would save without messages
CROSSING = "recompute all of it or nothing of it"
NOT_PLACED = "the plan places none of them"


def choose_forks(
    program: Program,
    stage: Stage,
    count: int,
    link: LinkSpeed,
    *,
    keep_whole: Mapping[str, str] = {},
    placed: Placed | None = None,
    tiles: int = 1,
) -> tuple[Fork, ...]:
    """Return the forks whose branches `count` ranks share, in order, then others.

    The others have a reason: they were considered, and sharing them gains nothing.
    `link` connects the ranks; the trunk is whole on each. `keep_whole` are modules and
    tensors that all ranks use, each with the reason. With `placed`, by the names of
    joins the names of each rank's branches, these are shared out so, and no others. Of
    several `tiles`, so many ranks share each; seconds are those of one.
    """
    finder = Finder(program, stage, keep_whole, tiles=tiles)
    ranks = Ranks(count, link)
    choose = _Chooser(finder, ranks)
    again = _recomputed(program, finder)
    forks: list[ForkChoice] = []
    wanted: list[ForkChoice] = []
    ends = {place for first, last in again for place in (first - 1, last)}
    for join, added in finder.joins():
        for window in finder.windows(join, added, ends):
            made = choose.candidate(window)
            if any(_crosses(made, part) for part in again):
                made = replace(made, reason=CROSSING)
            forks.append(made)
            if placed is not None and window.join.name in placed:
                mine = choose.as_placed(window, placed[window.join.name])
                wanted += (c for c in mine if not any(_crosses(c, o) for o in again))
        if any(not fork.reason for fork in forks if fork.last == join):
            ends.add(join)
    chosen = heaviest([fork for fork in forks if not fork.reason])
    if placed is not None:
        forks = [replace(fork, reason=NOT_PLACED) for fork in forks]
        chosen = heaviest(wanted, 1.0 + sum(abs(c.saved) for c in wanted))
    seconds = sum(meta.facts(node).seconds for node in stage.nodes) / tiles
    least = LEAST_TOLD * seconds if chosen else 0.0
    told = [
        replace(fork, reason=f"{CROSSING}: --recompute {_run(program, finder, fork)}")
        if fork.reason == CROSSING
        else fork
        for fork in _told([fork for fork in forks if fork.reason], chosen, least)
    ]
    return tuple(choice.fork() for choice in (*chosen, *told))


def placed_tensors(
    program: Program,
    stage: Stage,
    rank_of: Mapping[str, int],
    elsewhere: Collection[str],
) -> tuple[tuple[str, int], ...]:
    """Return the parameters and buffers that one rank alone needs, each with the rank.

    Nodes of its branches, as `rank_of` says, use them and nothing else does, in the
    stage or in others, which use `elsewhere`. Names are the first ones of tied tensors.
    """
    users: dict[str, set[int]] = {}
    for node in stage.nodes:
        for name in used_tensors(program, [node]):
            users.setdefault(name, set()).add(rank_of.get(node.name, ALL))
    return tuple(
        (name, next(iter(ranks)))
        for name, ranks in users.items()
        if len(ranks) == 1 and ALL not in ranks and name not in elsewhere
    )


class _Chooser:
    """Makes candidates of windows; like ones are assigned once."""

    def __init__(self, finder: Finder, ranks: Ranks) -> None:
        self.finder, self.ranks = finder, ranks
        self.assign = cache(ranks.assign)

    def candidate(self, window: ForkWindow) -> ForkChoice:
        """Return the best that can be done with a window."""
        parts, ranks = window.components, [ALL] * len(window.components)
        free = [number for number, part in enumerate(parts) if not part.stays]
        free.sort(key=lambda number: -parts[number].seconds)
        pieces = tuple(self._piece(parts[n].seconds, parts[n].results) for n in free)
        chosen, least = self.assign(pieces, self._total(window))
        seconds = sum(piece.seconds for piece in pieces)
        gains = least < seconds * (1 - 1e-9) and len({*chosen} - {ALL}) > 1
        if not gains:
            chosen = self.ranks.spread(pieces)
            least = self.ranks.seconds(pieces, chosen, self._total(window))
        for number, rank in zip(free, chosen, strict=True):
            ranks[number] = rank
        return ForkChoice.of(
            self.finder, window, ranks, seconds - least, "" if gains else NO_GAIN
        )

    def as_placed(
        self, window: ForkWindow, placed: Sequence[Sequence[str]]
    ) -> Iterator[ForkChoice]:
        """Yield the fork with these branches on each rank, if the window has them."""
        parts = window.components
        _, names = names_of(parts)
        rank_of = {name: rank for rank, group in enumerate(placed) for name in group}
        free = {n for n, part in zip(names, parts, strict=True) if not part.stays}
        if rank_of.keys() <= free:
            pieces = [self._piece(part.seconds, part.results) for part in parts]
            ranks = [rank_of.get(name, ALL) for name in names]
            seconds = sum(piece.seconds for piece in pieces)
            saved = seconds - self.ranks.seconds(pieces, ranks, self._total(window))
            yield ForkChoice.of(self.finder, window, ranks, saved)

    def _total(self, window: ForkWindow) -> BranchCost | None:
        """Return what each rank sends of a sum, None where the join is no sum."""
        return self._piece(0.0, (window.join,)) if window.added else None

    def _piece(self, seconds: float, results: Sequence[fx.Node]) -> BranchCost:
        """Return what one tile's part of a component costs."""
        tiles = self.finder.tiles
        facts = [(meta.facts(n).output_bytes // tiles, n) for n in results]
        learnt = sum(size for size, node in facts if meta.needs_gradient(node))
        return BranchCost(seconds, sum(size for size, _ in facts), learnt)


def _recomputed(program: Program, finder: Finder) -> list[tuple[int, int]]:
    """Return where the parts begin and end that run again in the backward."""
    spans = []
    for segment in program.segments or ():
        again = segment.blocks if segment.kind == "recompute" else ()
        places = [
            finder.position[node]
            for block in program.blocks or ()
            if block.index in again
            for node in block.nodes
            if node in finder.position
        ]
        if places:
            spans.append((min(places), max(places)))
    return spans


def _crosses(candidate: ForkChoice, part: tuple[int, int]) -> bool:
    """Whether a fork has something in common with a part and is not inside of it."""
    first, last = part
    if candidate.last < first or last < candidate.first:
        return False
    return not first <= candidate.first < candidate.last <= last


def _run(program: Program, finder: Finder, candidate: ForkChoice) -> str:
    """Return the name of the blocks in which a fork lies."""
    nodes = {*finder.nodes[candidate.first : candidate.last + 1]}
    blocks = program.blocks or ()
    return segment_name([b for b in blocks if not nodes.isdisjoint(b.nodes)], blocks)


def _told(
    candidates: list[ForkChoice], chosen: Sequence[ForkChoice], least: float
) -> list[ForkChoice]:
    """Return what a user would ask about: the largest that overlap with no others."""
    told: list[ForkChoice] = []
    for fork in sorted(candidates, key=lambda fork: (-fork.to_share, fork.last)):
        if len(told) == MOST_TOLD or fork.to_share < least:
            break
        if not any(fork.overlaps(other) for other in (*chosen, *told)):
            told.append(fork)
    return sorted(told, key=lambda fork: fork.last)
