"""Boxes: one half-open interval of global indices per dimension of a value."""

from __future__ import annotations

from itertools import product
from math import prod

from gemsc.errors import InternalError

Interval = tuple[int, int]
Box = tuple[Interval, ...]


def everything(shape: tuple[int, ...]) -> Box:
    """Return the box of all elements."""
    return tuple((0, size) for size in shape)


def first_cut(shape: tuple[int, ...], box: Box) -> int | None:
    """Return the first dimension of which a box has a part; None if it has all."""
    cut = (d for d, sides in enumerate(everything(shape)) if sides != box[d])
    return next(cut, None)


def tile_boxes(*axes: Interval | list[Interval]) -> tuple[Box, ...]:
    """Return the boxes of a grid of tiles, row-major: a list has an axis' cuts.

    `tile_boxes((0, 3), [(0, 4), (4, 8)])` is `(((0, 3), (0, 4)), ((0, 3), (4, 8)))`.
    """
    cuts = [axis if isinstance(axis, list) else [axis] for axis in axes]
    return tuple(product(*cuts))


def shape_of(box: Box) -> tuple[int, ...]:
    """Return the lengths of the intervals."""
    if any(stop < start for start, stop in box):
        raise InternalError(f"box {box} ends before it begins")
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """Return the number of elements."""
    return prod(shape_of(box))


def intersection(a: Box, b: Box) -> Box:
    """Return what two boxes share; where nothing is shared, an empty interval."""
    result = []
    for (a_start, a_stop), (b_start, b_stop) in zip(a, b, strict=True):
        start = max(a_start, b_start)
        result.append((start, max(start, min(a_stop, b_stop))))
    return tuple(result)


def hull(first: Box, *others: Box) -> Box:
    """Return the smallest box that holds all of these; empty ones do not count."""
    filled = [box for box in others if all(start < stop for start, stop in box)]
    return tuple(
        (min(start for start, _ in sides), max(stop for _, stop in sides))
        for sides in zip(first, *filled, strict=True)
    )


def is_inside(inner: Box, outer: Box) -> bool:
    """Whether every element of `inner` is in `outer`; an empty box is in any."""
    if any(start >= stop for start, stop in inner):
        return True
    return all(
        o_start <= i_start and i_stop <= o_stop
        for (i_start, i_stop), (o_start, o_stop) in zip(inner, outer, strict=True)
    )
