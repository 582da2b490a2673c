"""Exchange: which boxes of a value tiles hold and want, and what must travel for it.

Example, rows of a 8 x 4 value on two tiles, one row wanted beyond each cut:

    tile 0 holds 0..4, wants -1..5        tile 1 holds 4..8, wants 3..9
    row -1 is filled                      row 3 comes from tile 0
    row 4 comes from tile 1               row 8 is filled
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from gemsc.boxes import Box, everything, intersection, is_inside, shape_of
from gemsc.errors import InternalError

__all__ = ["Exchange", "Piece", "View"]

Slices = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box that the source tile holds and the destination tile wants."""

    source: int
    dest: int
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths of the box."""
        return shape_of(self.box)

    def within(self, outer: Box) -> Slices:
        """Return where the piece is in a tensor that holds `outer`."""
        return tuple(
            slice(start - begin, stop - begin)
            for (start, stop), (begin, _) in zip(self.box, outer, strict=True)
        )


@dataclass(frozen=True, slots=True)
class View:
    """An exchange as one tile sees it.

    `own` is the piece that it wants and holds itself, None without one; `sent` go to
    other tiles, `received` come from them, both by ascending tile. `held` and `wanted`
    are the tile's boxes, `outside` the parts of the wanted box outside the value.
    """

    held: Box
    wanted: Box
    own: Piece | None
    sent: tuple[Piece, ...]
    received: tuple[Piece, ...]
    outside: tuple[Slices, ...]


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

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """What goes from where to where, by destination and then by source.

        Nothing travels if every tile holds already what it wants. Of a whole value,
        each tile takes its own copy; the tiles of another grid are shared out.
        """
        image = everything(self.shape)
        inner = [intersection(wanted, image) for wanted in self.wanted]
        same_grid = len(self.held) == len(self.wanted)
        pairs = list(enumerate(inner))
        if same_grid and all(is_inside(box, self.held[b]) for b, box in pairs):
            found = [Piece(b, b, box) for b, box in pairs]
        elif all(held == image for held in self.held):
            found = [Piece(b % len(self.held), b, box) for b, box in pairs]
        else:
            given = self.owned or self.held
            found = [
                Piece(a, b, intersection(mine, box))
                for b, box in pairs
                for a, mine in enumerate(given)
            ]
        found = [piece for piece in found if _volume(piece.box)]
        for b, box in pairs:
            if sum(_volume(p.box) for p in found if p.dest == b) != _volume(box):
                raise InternalError(f"no tile holds all of {box}: {self}")
        return tuple(found)

    @cached_property
    def is_local(self) -> bool:
        """Whether no tile needs anything from another one."""
        return all(piece.source == piece.dest for piece in self.pieces)

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
                next((p for p in mine if p.source == p.dest), None),
                tuple(p for p in mine if p.dest != tile),
                tuple(p for p in mine if p.source != tile),
                tuple(self._outside(tile)),
            )
        return self._views[tile]

    def _outside(self, tile: int) -> list[Slices]:
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


def _volume(box: Box) -> int:
    count = 1
    for size in shape_of(box):
        count *= size
    return count
