"""Position: where the rank at hand is in the grid of the stage that is lowered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

from torch import fx

from gemsc.base.boxes import Box
from gemsc.base.grid_shape import ALONE, GridShape
from gemsc.base.parts import Part
from gemsc.ir.opaque import has_own_backward
from gemsc.ir.program import Program, Stage
from gemsc.ir.shape_grid import ShapeGrid
from gemsc.ir.shards import StageShards
from gemsc.passes.spatial.cuts import Axes, coordinates, cut
from gemsc.passes.spatial.values import (
    Refused,
    held_boxes,
    whole_shape,
)


@dataclass(eq=False)
class StagePosition:
    """The stage at hand, its grid, and the rank of it whose graph is built."""

    program: Program
    grids: tuple[GridShape, ...]  # of all stages
    tile: int  # beyond the grid it begins anew
    training: bool = field(default=True, kw_only=True)
    grid: tuple[int, ...] = field(default=(), init=False)  # parts along its axes
    _form: GridShape = field(default=ALONE, init=False)
    _stage: int = field(default=0, init=False)

    @property
    def stage(self) -> Stage:
        """The stage at hand."""
        return self.program.require_stages()[self._stage]

    @property
    def shards(self) -> StageShards | None:
        """How the stage at hand is shared, None if its ranks share no channels."""
        return self.program.shards.get(self._stage)

    def is_in_branch(self, node: fx.Node) -> bool:
        """Whether one rank of the stage at hand computes a node, for its branch."""
        return self.shards is not None and node.name in self.shards.rank_of

    def is_in_fork(self, node: fx.Node) -> bool:
        """Whether a node is in a branch, or one of those that join them."""
        return self.shards is not None and node.name in self.shards.fork_of

    def split_axes(self, node: fx.Node) -> Axes | None:
        """Return how a trunk that is split cuts a value; None if all hold all of it."""
        assert self.shards is not None
        dim = self.shards.split_dims.get(node.name)
        if dim is None or dim < 0:
            return None
        rank, axis = len(whole_shape(node)), len(self.pictures)
        return tuple(axis if d == dim else None for d in range(rank))

    def enter(self, stage: Stage) -> None:
        """Let a stage be the one at hand."""
        self._stage, self._form = stage.index, self.grids[stage.index]
        self.grid = self._form.axes

    @property
    def place(self) -> int:
        """The number of the tile at hand in the stage's grid."""
        return self.tile % self.tiles

    @property
    def here(self) -> ShapeGrid:
        """The stage's grid, as an argument of operations on tiles."""
        return ShapeGrid(self.tile, self.tiles)

    @property
    def tiles(self) -> int:
        """How many tiles the stage's grid has, each counted for all of its shards."""
        return prod(self.grid)

    @property
    def pictures(self) -> tuple[int, ...]:
        """The parts along the axes of pictures; () where the ranks share none."""
        return self._form.tiles

    @property
    def beside(self) -> tuple[int, ...]:
        """The ranks that share the same part of pictures; () for all."""
        return self.among([len(self.pictures)])

    @property
    def member(self) -> int:
        """The number of the rank among those that share its part of pictures."""
        return self.place % self._form.beside

    def by_rank(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        """Return what each rank has, of what each shard has."""
        return tuple(parts) * (self.tiles // len(parts)) if parts else ()

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

    def draw(self, node: fx.Node) -> int:
        """Return the number of a node that draws, of its own in the stage."""
        return self.stage.nodes.index(node)

    def trains(self, call: fx.Node) -> bool:
        """Whether the layer called is in training mode."""
        return self.training and str(call.target) not in self.program.frozen

    def has_own_backward(self, node: fx.Node) -> bool:
        """Whether code of the user's computes a node's gradients."""
        return has_own_backward(node, self.program.module)
