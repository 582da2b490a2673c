"""The ranks of one stage that hold tiles of its values, and how they talk."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gemsc.runtime.link import Link

__all__ = ["Exchange", "Grid"]

Box = tuple[tuple[int, int], ...]  # half-open global indices, one per dimension


@dataclass(frozen=True)
class Exchange:
    """Boxes of one value that tiles hold, and the boxes that they want of it.

    `shape` is that of the whole value. A wanted box may reach outside it: what lies
    there is `fill` and gets no gradient. `owned` are the parts that tiles give where
    held boxes overlap, () where they do not or where every tile holds everything.
    Tags of its messages follow from `index`.
    """

    index: int
    shape: tuple[int, ...]
    held: tuple[Box, ...]
    wanted: tuple[Box, ...]
    fill: float = 0.0
    owned: tuple[Box, ...] = ()


class Grid:
    """One tile among those of its stage: what `self.grid` is in a generated stage.

    `ranks` are the transport's ranks of all tiles, in their order; `tile` is this one.
    """

    def __init__(self, link: Link, ranks: tuple[int, ...], tile: int) -> None:
        self.link = link
        self.ranks = ranks
        self.tile = tile

    def redistribute(self, value: Tensor, exchange: Exchange) -> Tensor:
        """Return this tile's wanted box; the backward adds up what others return."""
        raise NotImplementedError

    def all_reduce(self, value: Tensor) -> Tensor:
        """Return the sum over the tiles; so is the gradient."""
        raise NotImplementedError
