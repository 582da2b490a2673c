"""Assign the branches of a fork to ranks, as fast as can be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gemsc.costs.hardware import LinkSpeed

MOST_ASSIGNMENTS = 4096  # that are compared
REPEATED = 0.01  # of a component's seconds: if no more is saved, one rank has it
ALL = -1  # in the place of a rank: each computes it, as it does the trunk


@dataclass(frozen=True, slots=True)
class BranchCost:
    """What counts of a component: its seconds, and the bytes that others need of it.

    `gradient_bytes` are those of the results that need a gradient.
    """

    seconds: float
    num_bytes: int
    gradient_bytes: int


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a stage."""

    count: int
    link: LinkSpeed

    def messages(
        self,
        pieces: Sequence[BranchCost],
        ranks: Sequence[int],
        total: BranchCost | None,
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
            learnt = [total.gradient_bytes if size else 0 for size in held]
        sent = [self.link.seconds(size) if size else 0.0 for size in held]
        gradients = self.link.seconds(max(learnt)) if any(learnt) else 0.0
        return sum(sent) - min(sent) + (self.count - 1) * gradients

    def seconds(
        self,
        pieces: Sequence[BranchCost],
        ranks: Sequence[int],
        total: BranchCost | None,
    ) -> float:
        """Return the seconds of the slowest rank, with the messages."""
        loads = [0.0] * self.count
        for piece, rank in zip(pieces, ranks, strict=True):
            for member in range(self.count) if rank == ALL else (rank,):
                loads[member] += piece.seconds
        return max(loads) + self.messages(pieces, ranks, total)

    def assign(
        self, pieces: tuple[BranchCost, ...], total: BranchCost | None
    ) -> tuple[tuple[int, ...], float]:
        """Return the fastest rank of each piece, heaviest first, and the seconds.

        Up to `MOST_ASSIGNMENTS` all are compared; else the heaviest pieces go to the
        rank with least one by one, and those after them to all ranks.
        """
        if (self.count + 1) ** len(pieces) <= MOST_ASSIGNMENTS:
            options: Iterable[tuple[int, ...]] = self._all(len(pieces))
        else:
            spread = self.spread(pieces)
            on_all = (ALL,) * len(pieces)
            options = (
                (spread + on_all)[:shared] + on_all[shared:]
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

    def spread(self, pieces: Sequence[BranchCost]) -> tuple[int, ...]:
        """Return ranks for pieces, heaviest first: each goes to the rank with least."""
        loads = [0.0] * self.count
        ranks = []
        for piece in pieces:
            rank = loads.index(min(loads))
            loads[rank] += piece.seconds
            ranks.append(rank)
        return tuple(ranks)
