"""Exchange: which boxes of a value tiles hold and want, and what must travel for it.

Example, rows of a 8 x 4 value on two tiles, one row wanted beyond each cut:

    tile 0 holds 0..4, wants -1..5        tile 1 holds 4..8, wants 3..9
    row -1 is filled                      row 3 comes from tile 0
    row 4 comes from tile 1               row 8 is filled

If the value wraps around, row -1 is row 7 of tile 1 and row 8 is row 0 of tile 0: two
pieces go from tile to tile.

Where the exchange adds, tiles hold addends, here of all rows. Each tile wants half of
the sum (a reduce-scatter):

    tile 0 wants 0..4: its own rows + those of tile 1
    tile 1 wants 4..8: those of tile 0 + its own
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from gemsc.base.boxes import (
    Box,
    Interval,
    everything,
    intersection,
    is_inside,
    shape_of,
    volume,
)
from gemsc.errors import InternalError

Slices = tuple[slice, ...]
Shift = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box that the source tile holds and the destination tile wants.

    There it lies further on by `shift`; () is no shift, as where nothing wraps around.
    """

    source: int
    dest: int
    box: Box
    shift: Shift = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths of the box."""
        return shape_of(self.box)

    def within(self, outer: Box) -> Slices:
        """Return where the piece is in a tensor that holds `outer`."""
        return index_of(self.box, outer)

    @property
    def wish(self) -> Box:
        """What the destination tile wants it for: the box, further on by the shift."""
        return _shifted(self.box, self.shift)

    def placed(self, outer: Box) -> Slices:
        """Return where the piece goes in a tensor that wants `outer`."""
        return index_of(self.wish, outer)


@dataclass(frozen=True, slots=True)
class View:
    """An exchange as one tile sees it.

    `local` are the pieces that it wants and holds itself, one at most unless the
    exchange wraps; `sent` go to other tiles, `received` come from them, both by
    ascending tile. `held` and `wanted` are the tile's boxes, `outside` the parts of the
    wanted box outside the value.
    """

    held: Box
    wanted: Box
    local: tuple[Piece, ...]
    sent: dict[int, tuple[Piece, ...]]
    received: dict[int, tuple[Piece, ...]]
    outside: tuple[Slices, ...]

    @property
    def is_handed_over(self) -> bool:
        """Whether all that it wants comes in one piece from another tile."""
        pieces = [piece for group in self.received.values() for piece in group]
        return not self.local and [piece.wish for piece in pieces] == [self.wanted]


@dataclass(frozen=True)
class Exchange:
    """Boxes of one value that tiles hold, and the boxes that they want of it.

    `shape` is that of the whole value. A wanted box may reach outside it: what lies
    there is `fill` and gets no gradient, or, if it `wraps`, comes from the opposite
    side. Several tiles may hold the same box; where held boxes overlap otherwise,
    `owned` are the parts that tiles give. Tags of its messages follow from `index`.
    With `arrives` the tiles are those of two grids: a message between stages.

    If it `adds`, held boxes are addends: what a tile wants is the sum over all tiles
    that hold some of it, and 0 where none does.
    """

    index: int
    shape: tuple[int, ...]
    held: tuple[Box, ...]
    wanted: tuple[Box, ...]
    fill: float = 0.0
    owned: tuple[Box, ...] = ()
    wraps: bool = False
    arrives: bool = False
    adds: bool = False

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """What goes from where to where, by destination and then by source.

        Nothing travels if every tile holds already what it wants. Of what several tiles
        hold, each takes its own copy; the tiles of another grid are shared out. Of
        addends it takes all.
        """
        wishes = [self._inside(box) for box in self.wanted]
        same_grid = len(self.held) == len(self.wanted)
        if self.adds:
            sources = [list(enumerate(self.held))] * len(wishes)
        elif same_grid and all(
            is_inside(box, self.held[b])
            for b, parts in enumerate(wishes)
            for box, _ in parts
        ):
            sources = [[(b, self.held[b])] for b in range(len(wishes))]
        else:
            sources = [self._sources(b, same_grid) for b in range(len(wishes))]
        pieces = [
            Piece(a, b, intersection(mine, box), shift)
            for b, parts in enumerate(wishes)
            for a, mine in sources[b]
            for box, shift in parts
        ]
        pieces = [piece for piece in pieces if volume(piece.box)]
        if not self.adds:
            self._check(wishes, pieces)
        return tuple(pieces)

    def _check(self, wishes: list[list[tuple[Box, Shift]]], moves: list[Piece]) -> None:
        """See that each element that a tile wants comes from somewhere."""
        for b, parts in enumerate(wishes):
            wanted = sum(volume(box) for box, _ in parts)
            if sum(volume(p.box) for p in moves if p.dest == b) != wanted:
                raise InternalError(f"no tile holds all of {self.wanted[b]}: {self}")

    def _sources(self, dest: int, same_grid: bool) -> list[tuple[int, Box]]:
        """Return from which tiles one takes which boxes, each box from one only."""
        holders: dict[Box, list[int]] = {}
        for tile, box in enumerate(self.owned or self.held):
            holders.setdefault(box, []).append(tile)
        return sorted(
            (dest if same_grid and dest in tiles else tiles[dest % len(tiles)], box)
            for box, tiles in holders.items()
        )

    def _inside(self, wanted: Box) -> list[tuple[Box, Shift]]:
        """Return the boxes of the value that are wanted, and their shifts."""
        if not self.wraps:
            return [(intersection(wanted, everything(self.shape)), ())]
        axes = [_turns(*pair) for pair in zip(wanted, self.shape, strict=True)]
        return [
            (tuple(part for part, _ in parts), tuple(shift for _, shift in parts))
            for parts in product(*axes)
        ]

    @cached_property
    def present(self) -> tuple[int, ...]:
        """The tiles of one grid that hold or want something."""
        boxes = enumerate(zip(self.held, self.wanted, strict=True))
        return tuple(t for t, both in boxes if any(map(volume, both)))

    @cached_property
    def is_local(self) -> bool:
        """Whether no tile needs anything from another one."""
        return all(piece.source == piece.dest for piece in self.pieces)

    @cached_property
    def rounds(self) -> tuple[Exchange, ...]:
        """The same in parts: in round r each tile takes what the r-th before it has.

        So a tile sends to one tile and receives from one, at most. Rounds in which
        nothing travels are left out.
        """
        count, empty = len(self.held), ((0, 0),) * len(self.shape)
        rounds = []
        for distance in range(1, count):
            held, wanted = [empty] * count, [empty] * count
            for piece in self.pieces:
                if (piece.dest - piece.source) % count == distance:
                    held[piece.source] = wanted[piece.dest] = piece.box
            if any(map(volume, wanted)):
                boxes = tuple(held), tuple(wanted)
                rounds.append(Exchange(self.index, self.shape, *boxes))
        return tuple(rounds)

    @cached_property
    def _views(self) -> dict[int, View]:
        return {}

    def seen_from(self, tile: int) -> View:
        """Return what a tile has to do with an exchange inside its grid."""
        if tile not in self._views:
            mine = [p for p in self.pieces if tile in (p.source, p.dest)]
            self._views[tile] = View(
                self.held[tile],
                self.wanted[tile],
                tuple(p for p in mine if p.source == p.dest),
                _grouped((p.dest, p) for p in mine if p.dest != tile),
                _grouped((p.source, p) for p in mine if p.source != tile),
                tuple(self._outside(tile)),
            )
        return self._views[tile]

    def _outside(self, tile: int) -> list[Slices]:
        if self.wraps:
            return []
        box = self.wanted[tile]
        shape = shape_of(box)
        result = []
        for dim, ((start, stop), size) in enumerate(zip(box, self.shape, strict=True)):
            before = min(max(-start, 0), shape[dim])
            after = min(max(stop - size, 0), shape[dim])
            for part in (slice(0, before), slice(shape[dim] - after, shape[dim])):
                if part.stop > part.start:
                    result.append((*(slice(None),) * dim, part))
        return result


def _grouped(pairs: Iterable[tuple[int, Piece]]) -> dict[int, tuple[Piece, ...]]:
    """Return the pieces of each tile, by ascending tile."""
    by_tile: dict[int, tuple[Piece, ...]] = {}
    for tile, piece in sorted(pairs, key=lambda pair: pair[0]):
        by_tile[tile] = (*by_tile.get(tile, ()), piece)
    return by_tile


def _turns(wanted: Interval, size: int) -> list[tuple[Interval, int]]:
    """Return the parts of a circle of `size` rows, and where each begins less that."""
    start, stop = wanted
    shifts = range(start // size * size, stop, size)
    return [
        ((max(start - shift, 0), min(stop - shift, size)), shift) for shift in shifts
    ]


def _shifted(box: Box, shift: Shift) -> Box:
    if not shift:
        return box
    return tuple(
        (start + by, stop + by) for (start, stop), by in zip(box, shift, strict=True)
    )


def index_of(box: Box, outer: Box) -> Slices:
    """Return where a box is in a tensor that has `outer`."""
    return tuple(
        slice(start - begin, stop - begin)
        for (start, stop), (begin, _) in zip(box, outer, strict=True)
    )
