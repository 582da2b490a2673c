"""The shape of a grid: how many ranks share a stage, and by what."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

BESIDE = ("shards", "branches")  # what ranks of a stage share besides pictures
SPLITS = ("tiles", *BESIDE)
GRID = re.compile(r"[1-9]\d*(x[1-9]\d*)*")


@dataclass(frozen=True, order=True, slots=True)
class GridShape:
    """How many tiles along each spatial axis, shards, or branches, share a stage.

    Shards are parts of channels, heads, features or words; parallel branches run on
    different ranks. A stage with both has as many ranks as of either: some of its parts
    are cut, of others the branches are shared out. With tiles and shards, each tile is
    on as many ranks as there are shards. A stage on one rank is false.
    """

    tiles: tuple[int, ...] = ()
    shards: int = 1
    branches: int = 1

    @classmethod
    def of(cls, text: str) -> GridShape:
        """Return the grid that `2x2` means; `1x1` splits nothing."""
        tiles = tuple(map(int, text.split("x")))
        return cls(tiles) if prod(tiles) > 1 else cls()

    @property
    def size(self) -> int:
        """The number of ranks."""
        return prod(self.tiles) * self.beside

    @property
    def beside(self) -> int:
        """The ranks that share what is no picture: shards, branches."""
        return max(self.shards, self.branches)

    def __bool__(self) -> bool:
        return self.size > 1

    @property
    def axes(self) -> tuple[int, ...]:
        """The parts along each axis: of pictures, then of others; () for one rank."""
        if not self:
            return ()
        return (*self.tiles, self.beside) if self.beside > 1 else self.tiles

    @property
    def noun(self) -> str:
        """What each rank computes: a tile, a shard, or a part of another kind."""
        if self.branches > 1 or (self.tiles and self.beside > 1):
            return "rank"
        return "shard" if self.shards > 1 else "tile"

    def __str__(self) -> str:
        """Return `2x2 tiles`, `4 shards`, `branches on 2 ranks` or `1 rank`."""
        grid = "x".join(map(str, self.tiles))
        tiles = [f"{grid} tiles"] if prod(self.tiles) > 1 else []
        shards = [f"{self.shards} shards"] if self.shards > 1 else []
        branches = [f"branches on {self.branches} ranks"] if self.branches > 1 else []
        return " and ".join(tiles + shards + branches) or "1 rank"


ALONE = GridShape()
