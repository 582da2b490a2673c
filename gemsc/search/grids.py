"""Which grids of tiles are worth a try on so many ranks."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from gemsc.ir.program import Program

MOST_SHAPES = 3  # of as many tiles


def grids(ranks: int, sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return grids that split an image of these sizes, few tiles first.

    All ranks are one grid, or half of them, a quarter, ...; ranks that are left have a
    stage each. Of all shapes with as many tiles those with the shortest inner edges
    are taken: over edges halos travel.

    Example: 4 ranks, 512 x 512 pixels: 1x2, 2x1, 2x2, 1x4, 4x1.
    """
    counts = {ranks}
    counts.update(2**power for power in range(1, ranks.bit_length()))
    found = []
    for count in sorted(counts - {1}):
        if count > ranks or not sizes:
            continue
        shapes = (
            grid
            for grid in _shapes(count, len(sizes))
            if all(tiles <= size for tiles, size in zip(grid, sizes, strict=True))
        )
        found += sorted(shapes, key=lambda grid: _edges(grid, sizes))[:MOST_SHAPES]
    return found


def image_sizes(program: Program) -> tuple[int, ...]:
    """Return the sizes of the first image among the inputs: () if there is none."""
    for item in program.inputs:
        if item.path[0] == "input" and len(item.spec.shape) > 2:
            return tuple(item.spec.shape[2:])
    return ()


def _shapes(count: int, num_axes: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write a number as a product of so many factors."""
    if num_axes == 1:
        yield (count,)
        return
    for factor in range(1, count + 1):
        if count % factor == 0:
            for rest in _shapes(count // factor, num_axes - 1):
                yield (factor, *rest)


def _edges(grid: tuple[int, ...], sizes: tuple[int, ...]) -> float:
    """Return the elements along all edges between tiles."""
    pairs = zip(grid, sizes, strict=True)
    return sum((tiles - 1) * prod(sizes) / size for tiles, size in pairs)
