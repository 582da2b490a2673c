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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from math import prod
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from gemsc.base.boxes import Interval

if TYPE_CHECKING:
    from gemsc.base.parts import Part

Slices = tuple[slice, ...]


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
        found, seen = [], 0
        for first, last in self.intervals[0]:
            shift = first - seen
            found.append((max(start + shift, first), min(stop + shift, last)))
            seen += last - first
        return TensorPiece(self.shape, (_joined(found), *self.intervals[1:]))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of a tensor that holds the piece."""
        return tuple(sum(b - a for a, b in each) for each in self.intervals)

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
        for found in product(*(_common(*each) for each in pairs)):
            yield tuple(own for own, _ in found), tuple(their for _, their in found)


def make_up(wanted: TensorPiece, pieces: Iterable[TensorPiece]) -> bool:
    """Whether some pieces have all of a piece, and no element of it twice."""
    parts = [_intersection(wanted, piece) for piece in pieces]
    parts = [part for part in parts if part.count]
    if sum(part.count for part in parts) != wanted.count:
        return False
    return not _overlap([part.intervals for part in parts])


def _overlap(boxes: list[tuple[tuple[Interval, ...], ...]], dim: int = 0) -> bool:
    """Whether two of some pieces, alike before `dim`, have an element in common.

    Goes along the dimension; those that are at one place are alike in it.
    """
    if len(boxes) < 2:
        return False
    if dim == len(boxes[0]):
        return True
    ends = sorted(
        (place, is_start, number)
        for number, box in enumerate(boxes)
        for interval in box[dim]
        for is_start, place in enumerate(interval[::-1])
    )
    here: dict[int, None] = {}
    for _, group in groupby(ends, key=itemgetter(0)):
        is_start = 0
        for _, is_start, number in group:  # what ends here comes first
            if is_start:
                here[number] = None
            else:
                del here[number]
        if is_start and _overlap([boxes[number] for number in here], dim + 1):
            return True
    return False


def _intersection(one: TensorPiece, other: TensorPiece) -> TensorPiece:
    pairs = zip(one.intervals, other.intervals, strict=True)
    return TensorPiece(
        one.shape,
        tuple(
            _joined((max(a, c), min(b, d)) for a, b in own for c, d in their)
            for own, their in pairs
        ),
    )


def _joined(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Leave out empty intervals; let those that touch be one."""
    found: list[Interval] = []
    for start, stop in intervals:
        if found and start == found[-1][1] < stop:
            found[-1] = found[-1][0], stop
        elif start < stop:
            found.append((start, stop))
    return tuple(found)


def _common(
    own: tuple[Interval, ...], other: tuple[Interval, ...]
) -> list[tuple[slice, slice]]:
    """Return what two rows of intervals have in common: its places in both."""
    found = []
    own_place = 0
    for first, last in own:
        other_place = 0
        for start, stop in other:
            low, high = max(first, start), min(last, stop)
            if low < high:
                places = own_place + low - first, other_place + low - start
                size = high - low
                found.append(
                    (
                        slice(places[0], places[0] + size),
                        slice(places[1], places[1] + size),
                    )
                )
            other_place += stop - start
        own_place += last - first
    return found
