"""The tiles that decide what a grid takes: for comparing many grids quickly."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from gemsc.ir import meta
from gemsc.ir.program import Placement, Program
from gemsc.options import CompileOptions
from gemsc.passes.pipeline import choose_halos, tile_programs

__all__ = ["Splits", "fullest_tiles"]

# of each cut into blocks and each placement of one replica, what the tiles run
Splits = dict[tuple[tuple[int, ...], Placement, bool, int, bool], tuple[Program, ...]]


def fullest_tiles(
    program: Program, options: CompileOptions, known: Splits
) -> tuple[Program, ...]:
    """Return what the first tile runs, and the one that holds most if it is another.

    The layouts that the first one has say what all of them hold. What was split once
    is in `known`: other schedules and replicas of the same stages need nothing new.
    """
    placement = program.placement
    assert placement is not None
    if placement.num_tiles == 1:
        return (program,)
    cut = tuple(len(stage.blocks) for stage in program.require_stages())
    key = (
        cut,
        replace(placement, name="", ranks=placement.ranks[:1]),
        options.local_batchnorm,
        options.fuse_halos,
        options.overlap_halos,
    )
    if key not in known:
        halos = choose_halos(program, options)
        (first,) = tile_programs(program, options, halos, tiles=(0,))
        tile = _fullest(first, placement.num_tiles)
        known[key] = (first,)
        if tile:
            known[key] += tile_programs(
                program, options, halos, tiles=(tile,), first=first
            )
    return tuple(replace(each, placement=placement) for each in known[key])


def _fullest(first: Program, num_tiles: int) -> int:
    """Return the tile that holds the most elements of all values together."""
    held = [0] * num_tiles
    for stage in first.require_stages():
        for node in stage.nodes:
            layout = meta.layout(node)
            if layout is not None and layout.num_tiles == num_tiles:
                for tile in range(num_tiles):
                    held[tile] += prod(layout.local_shape(tile))
    return max(range(num_tiles), key=lambda tile: held[tile])
