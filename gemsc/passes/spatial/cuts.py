"""Cuts: which part of an axis each tile owns, from the size of the axis alone.

Equal sizes are cut alike, so that the two inputs of a residual addition or of a U-Net's
concatenation always fit; a size that the number of tiles divides is cut evenly, and so
are its halves as long as they are even.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import TypeGuard

from gemsc.base.boxes import Box, Interval

# for each dimension of a value: the grid axis that cuts it
Axes = tuple[int | None, ...]


def cut(size: int, parts: int) -> tuple[Interval, ...]:
    """Return the intervals of an axis, in order; they differ by one at most."""
    edges = [-(-size * part // parts) for part in range(parts + 1)]
    return tuple(itertools.pairwise(edges))


def are_samples(axes: Axes | None) -> TypeGuard[Axes]:
    """Whether a value is cut along its first dimension alone."""
    if not axes or axes[0] is None:
        return False
    return all(axis is None for axis in axes[1:])


def or_whole(axes: Axes) -> Axes | None:
    """Return the axes of a value, None if they cut none of its dimensions."""
    return axes if any(axis is not None for axis in axes) else None


def coordinates(grid: tuple[int, ...], tile: int) -> tuple[int, ...]:
    """Return where a tile is along each axis (row-major)."""
    result = []
    for parts in reversed(grid):
        tile, place = divmod(tile, parts)
        result.append(place)
    return tuple(reversed(result))


@lru_cache(maxsize=1024)
def boxes(shape: tuple[int, ...], axes: Axes, grid: tuple[int, ...]) -> tuple[Box, ...]:
    """Return what each tile owns of a value, by tile."""
    result = []
    for tile in range(math.prod(grid)):
        place = coordinates(grid, tile)
        result.append(
            tuple(
                (0, size) if axis is None else cut(size, grid[axis])[place[axis]]
                for size, axis in zip(shape, axes, strict=True)
            )
        )
    return tuple(result)


def fits(shape: tuple[int, ...], axes: Axes, grid: tuple[int, ...]) -> bool:
    """Whether every tile owns something of every axis."""
    return all(
        axis is None or size >= grid[axis]
        for size, axis in zip(shape, axes, strict=True)
    )
