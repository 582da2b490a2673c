"""Layout: which part of a value each tile of a grid holds."""

from __future__ import annotations

from dataclasses import dataclass

from gemsc.base.boxes import Box, everything, shape_of


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

    @property
    def num_tiles(self) -> int:
        """How many tiles the grid has."""
        return len(self.boxes)

    @property
    def is_whole(self) -> bool:
        """Whether every tile holds everything."""
        return all(box == everything(self.shape) for box in self.boxes)

    def local_shape(self, tile: int) -> tuple[int, ...]:
        """Return the shape of what one tile holds."""
        return shape_of(self.boxes[tile])
