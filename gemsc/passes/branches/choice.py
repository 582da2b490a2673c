"""Choose which forks of a stage are shared out, and which rank computes which branch.

A fork saves the seconds of all its branches, less those of the rank with most, less its
messages. Of the forks of which no two overlap in the model's order those are taken that
save most together: an outer one, or several inside of its branches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from torch import fx

from gemsc.costs.hardware import LinkSpeed
from gemsc.ir import meta
from gemsc.ir.flow import used_tensors
from gemsc.ir.program import Program, Stage
from gemsc.ir.shards import Branch, Fork, Placed
from gemsc.passes.branches.forks import Finder, ForkWindow
from gemsc.passes.branches.names import names_of

__all__ = ["choose_forks", "placed_tensors"]

MOST_ASSIGNMENTS = 4096  # that are compared
MOST_TOLD = 4  # forks that are not shared out, of a stage
LEAST_TOLD = 0.01  # of a stage's seconds: what they would save without messages
CROSSING = "all of it must be recomputed or nothing: name a module that holds it"
NOT_PLACED = "the plan places none of them"
REPEATED = 0.01  # of a component's seconds: if no more is saved, one rank has it
ALL = -1  # in the place of a rank: each computes it, as it does the trunk


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A fork, and the positions of the first node of its branches and of its join.

    `to_share` are the seconds of all that is before the join, but the slowest part.
    """

    fork: Fork
    first: int
    last: int
    to_share: float


@dataclass(frozen=True, slots=True)
class _Piece:
    """What counts of a component: its seconds, and the bytes that others need of it.

    `gradient_bytes` are those of the results that need a gradient.
    """

    seconds: float
    num_bytes: int
    gradient_bytes: int


@dataclass(frozen=True)
class _Ranks:
    """The ranks that share a stage."""

    count: int
    link: LinkSpeed

    def messages(
        self, pieces: Sequence[_Piece], ranks: Sequence[int], total: _Piece | None
    ) -> float:
        """Return the seconds of a join's messages, forward and backward.

        Forward each rank gets what the others computed; backward the gradients of what
        it computed itself, an addend from each of the others. Of a sum, `total`, each
        rank has one addend.
        """
        held = [0] * self.count
        learnt = [0] * self.count
        for piece, rank in zip(pieces, ranks, strict=True):
            if rank != ALL:
                held[rank] += piece.num_bytes
                learnt[rank] += piece.gradient_bytes
        if total is not None:
            held = [
                total.num_bytes if rank in ranks else 0 for rank in range(len(held))
            ]
            learnt = [total.gradient_bytes if each else 0 for each in held]
        sent = [self.link.seconds(each) if each else 0.0 for each in held]
        gradients = self.link.seconds(max(learnt)) if any(learnt) else 0.0
        return sum(sent) - min(sent) + (self.count - 1) * gradients

    def seconds(
        self, pieces: Sequence[_Piece], ranks: Sequence[int], total: _Piece | None
    ) -> float:
        """Return the seconds of the slowest rank, with the messages."""
        loads = [0.0] * self.count
        for piece, rank in zip(pieces, ranks, strict=True):
            for each in range(self.count) if rank == ALL else (rank,):
                loads[each] += piece.seconds
        return max(loads) + self.messages(pieces, ranks, total)

    def assign(
        self, pieces: tuple[_Piece, ...], total: _Piece | None
    ) -> tuple[tuple[int, ...], float]:
        """Return the fastest rank of each piece, heaviest first, and the seconds.

        Up to `MOST_ASSIGNMENTS` all are compared; else the heaviest pieces go to the
        rank with least one by one, and those after them to all ranks.
        """
        if (self.count + 1) ** len(pieces) <= MOST_ASSIGNMENTS:
            options: Iterable[tuple[int, ...]] = self._all(len(pieces))
        else:
            spread = self.spread(pieces)
            rest = (ALL,) * len(pieces)
            options = (
                (spread + rest)[:shared] + rest[shared:]
                for shared in reversed(range(len(pieces) + 1))
            )
        best: tuple[int, ...] = ()
        least = float("inf")
        for ranks in options:
            repeated = sum(
                p.seconds for p, r in zip(pieces, ranks, strict=True) if r == ALL
            )
            price = self.seconds(pieces, ranks, total) + REPEATED * repeated
            if not best or price < least * (1 - 1e-9):
                best, least = ranks, price
        return best, self.seconds(pieces, best, total)

    def _all(self, pieces: int) -> Iterator[tuple[int, ...]]:
        """Yield all assignments, but those that only name the ranks otherwise."""
        if not pieces:
            yield ()
            return
        for ranks in self._all(pieces - 1):
            used = max(ranks, default=ALL) + 1
            for rank in range(min(used + 1, self.count)):
                yield (*ranks, rank)
            yield (*ranks, ALL)

    def spread(self, pieces: Sequence[_Piece]) -> tuple[int, ...]:
        """Return ranks for pieces, heaviest first: each goes to the rank with least."""
        loads = [0.0] * self.count
        ranks = []
        for piece in pieces:
            rank = loads.index(min(loads))
            loads[rank] += piece.seconds
            ranks.append(rank)
        return tuple(ranks)


def choose_forks(
    program: Program,
    stage: Stage,
    count: int,
    link: LinkSpeed,
    *,
    keep_whole: Mapping[str, str] = {},
    placed: Placed | None = None,
) -> tuple[Fork, ...]:
    """Return the forks whose branches `count` ranks share, in order, then others.

    The others have a reason: they were considered, and sharing them gains nothing.
    `link` connects the ranks; the trunk is whole on each. `keep_whole` are modules and
    tensors that all ranks use, each with the reason. With `placed`, by the names of
    joins the names of each rank's branches, these are shared out so, and no others.
    """
    finder = Finder(program, stage, keep_whole)
    ranks = _Ranks(count, link)
    choose = _Chooser(finder, ranks)
    again = _recomputed(program, finder)
    found: list[_Candidate] = []
    wanted: list[_Candidate] = []
    ends = {place for first, last in again for place in (first - 1, last)}
    for join, added in finder.joins():
        for window in finder.windows(join, added, ends):
            made = choose.candidate(window)
            if any(_crosses(made, each) for each in again):
                made = replace(made, fork=replace(made.fork, reason=CROSSING))
            found.append(made)
            if placed is not None and window.join.name in placed:
                mine = choose.as_placed(window, placed[window.join.name])
                wanted += (c for c in mine if not any(_crosses(c, o) for o in again))
        if any(not each.fork.reason for each in found if each.last == join):
            ends.add(join)
    chosen = _heaviest([each for each in found if not each.fork.reason])
    if placed is not None:
        found = [replace(c, fork=replace(c.fork, reason=NOT_PLACED)) for c in found]
        chosen = _heaviest(wanted, 1.0 + sum(abs(c.fork.saved) for c in wanted))
    seconds = sum(meta.facts(node).seconds for node in stage.nodes)
    least = LEAST_TOLD * seconds if chosen else 0.0
    told = _told([each for each in found if each.fork.reason], chosen, least)
    return tuple(each.fork for each in (*chosen, *told))


def placed_tensors(
    program: Program, stage: Stage, forks: Iterable[Fork], elsewhere: Collection[str]
) -> tuple[tuple[str, int], ...]:
    """Return the parameters and buffers that one rank alone needs, each with the rank.

    Nodes of its branches use them and nothing else does, in the stage or in others,
    which use `elsewhere`. Names are the first ones of tied tensors.
    """
    rank_of = {
        name: branch.rank
        for fork in forks
        if not fork.reason
        for branch in fork.branches
        for name in branch.nodes
    }
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

    def __init__(self, finder: Finder, ranks: _Ranks) -> None:
        self.finder, self.ranks = finder, ranks
        self.assign = cache(ranks.assign)

    def candidate(self, window: ForkWindow) -> _Candidate:
        """Return the fork of a window, with its reason if it is not shared out."""
        free = [each for each in window.components if not each.stays]
        free.sort(key=lambda each: -each.seconds)
        pieces = tuple(_piece(each.seconds, each.results) for each in free)
        total = _piece(0.0, (window.join,)) if window.added else None
        ranks, least = self.assign(pieces, total)
        seconds = sum(piece.seconds for piece in pieces)
        shared = {c.nodes: r for c, r in zip(free, ranks, strict=True) if r != ALL}
        if least < seconds * (1 - 1e-9) and len(set(shared.values())) > 1:
            return self._made(window, shared, seconds - least)
        ranks = self.ranks.spread(pieces)
        shared = dict(zip((c.nodes for c in free), ranks, strict=True))
        saved = seconds - self.ranks.seconds(pieces, ranks, total)
        made = self._made(window, shared, saved)
        return replace(made, fork=replace(made.fork, reason=_reason(window, made.fork)))

    def as_placed(
        self, window: ForkWindow, placed: Sequence[Sequence[str]]
    ) -> Iterator[_Candidate]:
        """Yield the fork with these branches on each rank, if the window has them."""
        _, names = names_of(window.components)
        parts = zip(names, window.components, strict=True)
        rank_of = {name: rank for rank, own in enumerate(placed) for name in own}
        free = {name: each for name, each in parts if not each.stays}
        if rank_of.keys() <= free.keys():
            pieces = [_piece(each.seconds, each.results) for each in free.values()]
            total = _piece(0.0, (window.join,)) if window.added else None
            ranks = [rank_of.get(name, ALL) for name in free]
            seconds = sum(piece.seconds for piece in pieces)
            saved = seconds - self.ranks.seconds(pieces, ranks, total)
            shared = {free[name].nodes: rank for name, rank in rank_of.items()}
            yield self._made(window, shared, saved)

    def _made(
        self,
        window: ForkWindow,
        ranks: Mapping[tuple[fx.Node, ...], int],
        saved: float,
    ) -> _Candidate:
        parts = window.components
        name, names = names_of(parts)
        branches = tuple(
            Branch(own, tuple(n.name for n in c.nodes), ranks[c.nodes], c.seconds)
            for own, c in zip(names, parts, strict=True)
            if c.nodes in ranks
        )
        join, position = window.join, self.finder.position
        added = tuple(node.name for node in window.added)
        nodes = [n for c in parts for n in c.nodes if c.nodes in ranks or not ranks]
        fork = Fork(name, join.name, branches, added, saved)
        first, seconds = min(position[n] for n in nodes), [c.seconds for c in parts]
        return _Candidate(fork, first, position[join], sum(seconds) - max(seconds))


def _recomputed(program: Program, finder: Finder) -> list[tuple[int, int]]:
    """Return where the parts begin and end that run again in the backward."""
    found = []
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
            found.append((min(places), max(places)))
    return found


def _crosses(candidate: _Candidate, part: tuple[int, int]) -> bool:
    """Whether a fork has something in common with a part and is not inside of it."""
    first, last = part
    if candidate.last < first or last < candidate.first:
        return False
    return not first <= candidate.first < candidate.last <= last


def _piece(seconds: float, results: Sequence[fx.Node]) -> _Piece:
    sizes = [(meta.facts(n).output_bytes, meta.needs_gradient(n)) for n in results]
    learnt = sum(size for size, needed in sizes if needed)
    return _Piece(seconds, sum(size for size, _ in sizes), learnt)


def _reason(window: ForkWindow, fork: Fork) -> str:
    """Return why the branches of a fork are not shared out."""
    stay = [each for each in window.components if each.stays]
    if stay:
        slowest = max(stay, key=lambda each: each.seconds)
        others = [branch.seconds for branch in fork.branches]
        if len(others) < 2 or slowest.seconds >= max(others):
            return f"all ranks compute {names_of([slowest])[0]}: {slowest.stays}"
    slowest_branch = max(fork.branches, key=lambda branch: branch.seconds)
    share = slowest_branch.seconds / fork.seconds
    if share > 0.5:
        return f"{slowest_branch.name} alone takes {100 * share:.0f} % of {fork.name}"
    return "its messages take longer than what is saved"


def _heaviest(candidates: list[_Candidate], bonus: float = 0.0) -> list[_Candidate]:
    """Return those that save most together, of which no two overlap, in order.

    Each counts for a `bonus` more: if that is large, as many as can be are taken.
    """
    order = sorted(candidates, key=lambda each: (each.last, -each.first))
    lasts = [each.last for each in order]
    best: list[tuple[float, list[_Candidate]]] = [(0.0, [])]
    for number, each in enumerate(order):
        saved, before = best[bisect_right(lasts, each.first - 1, hi=number)]
        best.append(
            max(
                best[-1], (saved + each.fork.saved + bonus, [*before, each]), key=_saved
            )
        )
    return best[-1][1]


def _saved(choice: tuple[float, list[_Candidate]]) -> float:
    return choice[0]


def _told(
    candidates: list[_Candidate], chosen: Sequence[_Candidate], least: float
) -> list[_Candidate]:
    """Return what a user would ask about: the largest that overlap with no others."""
    found: list[_Candidate] = []
    for each in sorted(candidates, key=lambda each: (-each.to_share, each.last)):
        if len(found) == MOST_TOLD or each.to_share < least:
            break
        if not any(_overlap(each, other) for other in (*chosen, *found)):
            found.append(each)
    return sorted(found, key=lambda each: each.last)


def _overlap(one: _Candidate, other: _Candidate) -> bool:
    return one.first <= other.last and other.first <= one.last
