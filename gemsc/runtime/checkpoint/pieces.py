"""Pieces: which elements of a whole tensor are somewhere, on a rank or in a file.

Example, the queries, keys and values of a weight of 384 x 128: the first rank of two
has, of each, two of four heads of 32 rows; with --shard-optimizer and two holders, the
second one updates the last 96 of these 192 rows.

    part = TensorPiece.of_part(Part((384, 128), outer=3, units=4, rows=(0, 2)))
    part.intervals           (((0, 64), (128, 192), (256, 320)), ((0, 128),))
    part.rows(96, 192)       (((160, 192), (256, 320)), ((0, 128),))

A rank that wants a piece takes its overlaps with the pieces that were stored, whoever
stored them.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from gemsc.base.boxes import Interval

if TYPE_CHECKING:
    from gemsc.base.parts import Part

Slices = tuple[slice, ...]
PRIME = 2**61 - 1


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """Some elements of a tensor of `shape`: all in some intervals of each dimension.

    The intervals of a dimension are half-open, in order and apart. A number has one
    dimension of one row.
    """

    shape: tuple[int, ...]
    intervals: tuple[tuple[Interval, ...], ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> TensorPiece:
        """Return all of a tensor."""
        sizes = tuple(shape) or (1,)
        return cls(tuple(shape), tuple(_joined([(0, size)]) for size in sizes))

    @classmethod
    def of_part(cls, part: Part) -> TensorPiece:
        """Return what a rank has of a tensor that the ranks of a stage share out."""
        intervals = list(cls.whole(part.shape).intervals)
        intervals[part.dim] = _joined(part.intervals)
        return cls(part.shape, tuple(intervals))

    @classmethod
    def read(
        cls, shape: Sequence[int], intervals: Sequence[Sequence[Any]]
    ) -> TensorPiece:
        """Return a piece that was written as JSON, with lists for tuples."""
        rows = (tuple((start, stop) for start, stop in row) for row in intervals)
        return cls(tuple(shape), tuple(rows))

    def rows(self, start: int, stop: int) -> TensorPiece:
        """Return some rows of this piece, counted in it, of its first dimension."""
        intervals, seen = [], 0
        for first, last in self.intervals[0]:
            shift = first - seen
            intervals.append((max(start + shift, first), min(stop + shift, last)))
            seen += last - first
        return TensorPiece(self.shape, (_joined(intervals), *self.intervals[1:]))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of a tensor that holds the piece."""
        return tuple(sum(b - a for a, b in row) for row in self.intervals)

    @property
    def count(self) -> int:
        """The number of elements."""
        return prod(self.sizes)

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the tensor."""
        return self == TensorPiece.whole(self.shape)

    def overlap(self, other: TensorPiece) -> Iterator[tuple[Slices, Slices]]:
        """Yield which slices of this piece are which slices of another."""
        pairs = zip(self.intervals, other.intervals, strict=True)
        for common in product(*(_common(*pair) for pair in pairs)):
            ours = tuple(slice(at, at + size) for _, size, at, _ in common)
            yield ours, tuple(slice(at, at + size) for _, size, _, at in common)


def make_up(wanted: TensorPiece, pieces: Iterable[TensorPiece]) -> bool:
    """Whether some pieces have all of a piece, and no element of it twice.

    The work is that of reading them. Each row of a dimension has a random number, and
    an element the product of its rows' numbers: if the sum over all pieces is that of
    the piece that is wanted, each element is there once. That is an identity of
    polynomials modulo PRIME: a wrong answer has the probability 1e-17.
    """
    draw = partial(random.Random(0).randrange, PRIME)  # not the user's generator
    sums = [defaultdict[int, int](draw) for _ in wanted.intervals]  # before a place

    def sum_of(other: TensorPiece) -> int:
        pairs = zip(sums, wanted.intervals, other.intervals, strict=True)
        return prod(
            sum(row[a + size] - row[a] for a, size, *_ in _common(*pair))
            for row, *pair in pairs
        )

    return (sum(map(sum_of, pieces)) - sum_of(wanted)) % PRIME == 0


def _joined(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Leave out empty intervals; let those that touch be one."""
    joined: list[Interval] = []
    for start, stop in intervals:
        if joined and start == joined[-1][1] < stop:
            joined[-1] = joined[-1][0], stop
        elif start < stop:
            joined.append((start, stop))
    return tuple(joined)


def _common(
    row: tuple[Interval, ...], other: tuple[Interval, ...]
) -> Iterator[tuple[int, int, int, int]]:
    """Yield what two rows of intervals have in common.

    That is its start and size, and its places among the rows of one and of the other.
    """
    own_place = other_place = at = 0
    for first, last in row:
        while at < len(other):
            start, stop = other[at]
            low, high = max(first, start), min(last, stop)
            if low < high:
                yield (
                    low,
                    high - low,
                    own_place + low - first,
                    other_place + low - start,
                )
            if stop > last:
                break
            other_place += stop - start
            at += 1
        own_place += last - first
