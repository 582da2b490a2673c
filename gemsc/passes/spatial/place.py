"""Place: the tile at hand in the grid of the stage at hand, and what is its own."""

from __future__ import annotations

from collections.abc import Iterable

from gemsc.base.boxes import Box
from gemsc.ir.shape_grid import ShapeGrid
from gemsc.passes.spatial.cuts import Axes, coordinates, cut, num_tiles
from gemsc.passes.spatial.refused import Refused
from gemsc.passes.spatial.values import held_boxes

__all__ = ["Place"]


class Place:
    """One of a stage's tiles; beyond the grid `tile` begins anew."""

    def __init__(self, tile: int) -> None:
        self.grid: tuple[int, ...] = ()
        self._tile = tile

    @property
    def place(self) -> int:
        """The number of the tile at hand in the stage's grid."""
        return self._tile % num_tiles(self.grid)

    @property
    def here(self) -> ShapeGrid:
        """The stage's grid, as an argument of operations on tiles."""
        return ShapeGrid(self._tile, self.tiles)

    @property
    def tiles(self) -> int:
        """How many tiles the stage's grid has."""
        return num_tiles(self.grid)

    def owned(self, shape: tuple[int, ...], axes: Axes | None) -> tuple[Box, ...]:
        """Return what each tile of the stage holds of a value with these axes."""
        return held_boxes(shape, axes, self.grid)

    def share(self, shape: tuple[int, ...], axes: Axes) -> float:
        """Return the part of all elements that the tile at hand holds."""
        part = 1.0
        place = coordinates(self.grid, self.place)
        for size, axis in zip(shape, axes, strict=True):
            if axis is not None:
                start, stop = cut(size, self.grid[axis])[place[axis]]
                part *= (stop - start) / size
        return part

    def among(self, axes: Iterable[int | None]) -> tuple[int, ...]:
        """Return the tiles that differ from ours along these axes only; () for all."""
        free = set(axes)
        ours = coordinates(self.grid, self.place)
        tiles = tuple(
            tile
            for tile in range(self.tiles)
            if all(
                axis in free or place == ours[axis]
                for axis, place in enumerate(coordinates(self.grid, tile))
            )
        )
        return () if len(tiles) == self.tiles else tiles

    def require_all_axes(self, axes: Axes) -> None:
        """See that no two tiles have the same part of a value with these axes.

        Raises:
            Refused: some have, as of a sum over rows that leaves columns cut.
        """
        if {axis for axis in axes if axis is not None} != {
            axis for axis, parts in enumerate(self.grid) if parts > 1
        }:
            raise Refused("it is cut along some axes of the grid only")
