"""Box and Layout: which part of a value each tile of a grid holds."""

from __future__ import annotations

from dataclasses import dataclass

from gemsc.errors import InternalError

__all__ = ["Box", "Layout", "intersection", "is_inside", "shape_of"]

Interval = tuple[int, int]
Box = tuple[Interval, ...]  # half-open global indices, one interval per dimension


@dataclass(frozen=True, slots=True)
class Layout:
    """What each tile holds of one value, by tile (row-major in the grid).

    *Whole*: every tile holds all of it and computes it again. *Tiled*: the boxes
    together are the value; `owned` says which tile gives an element to others where
    boxes overlap, () where they do not. Gradients are partial on every tile, in either
    case: the true gradient is the sum over the tiles.
    """

    shape: tuple[int, ...]  # of the whole value
    boxes: tuple[Box, ...]
    owned: tuple[Box, ...] = ()

    @staticmethod
    def whole(shape: tuple[int, ...], num_tiles: int) -> Layout:
        """Return the layout where every tile holds everything."""
        box = tuple((0, size) for size in shape)
        return Layout(tuple(shape), (box,) * num_tiles)

    @property
    def num_tiles(self) -> int:
        """How many tiles the grid has."""
        return len(self.boxes)

    @property
    def is_whole(self) -> bool:
        """Whether every tile holds everything."""
        everything = tuple((0, size) for size in self.shape)
        return all(box == everything for box in self.boxes)

    @property
    def given(self) -> tuple[Box, ...]:
        """The boxes from which other tiles take: disjoint unless whole."""
        return self.owned or self.boxes

    def local_shape(self, tile: int) -> tuple[int, ...]:
        """Return the shape of what one tile holds."""
        return shape_of(self.boxes[tile])


def shape_of(box: Box) -> tuple[int, ...]:
    """Return the lengths of the intervals."""
    if any(stop < start for start, stop in box):
        raise InternalError(f"box {box} ends before it begins")
    return tuple(stop - start for start, stop in box)


def intersection(a: Box, b: Box) -> Box:
    """Return what two boxes share; where nothing is shared, an empty interval."""
    pairs = zip(a, b, strict=True)
    result = []
    for (a_start, a_stop), (b_start, b_stop) in pairs:
        start = max(a_start, b_start)
        result.append((start, max(start, min(a_stop, b_stop))))
    return tuple(result)


def is_inside(inner: Box, outer: Box) -> bool:
    """Whether every element of `inner` is in `outer`; an empty box is in any."""
    if any(start >= stop for start, stop in inner):
        return True
    return all(
        o_start <= i_start and i_stop <= o_stop
        for (i_start, i_stop), (o_start, o_stop) in zip(inner, outer, strict=True)
    )
