"""Tables that fit the terminal: the least important columns go first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

NARROW = 17  # what a column that may shrink is left with


@dataclass(frozen=True, slots=True)
class Column:
    """A column with all its cells, and the values that they show.

    Columns of the largest `drop` are left out first where there is no room; those of 0
    always stay. `shrinks` columns are folded into lines before anything is left out.
    """

    title: str
    values: tuple[Any, ...]
    cells: tuple[str, ...]
    drop: int = 0
    left: bool = False
    shrinks: bool = False

    @property
    def width(self) -> int:
        """The characters of the longest cell."""
        return max(map(len, (self.title, *self.cells)))

    @property
    def least(self) -> int:
        """The characters without which it makes no sense."""
        if not self.shrinks:
            return self.width
        return min(self.width, max(NARROW, len(self.title)))


Listing = tuple[str, Sequence[Column]]  # a title, and columns of equal length


def column(
    title: str,
    values: Iterable[Any],
    show: Callable[[Any], str] = str,
    *,
    drop: int = 0,
    left: bool = False,
    shrinks: bool = False,
) -> Column:
    """Return a column of anything that can be shown; None is a dash."""
    values = tuple(values)
    cells = tuple("-" if value is None else show(value) for value in values)
    return Column(title, values, cells, drop, left, shrinks)


def fitted(title: str, columns: Sequence[Column], width: int) -> Table:
    """Return a table of at most `width` characters, if need be of fewer columns."""
    kept = list(columns)
    while _width(c.least for c in kept) > width and any(c.drop for c in kept):
        kept.remove(max(kept, key=lambda c: c.drop))
    widths = _shrunk(kept, width)
    table = Table(title=title, title_justify="left", title_style="bold")
    for each, most in zip(kept, widths, strict=True):
        table.add_column(
            each.title,
            justify="left" if each.left else "right",
            no_wrap=not each.shrinks,
            overflow="fold",
            max_width=most,
        )
    for row in zip(*(c.cells for c in kept), strict=True):
        table.add_row(*row)
    return table


def _shrunk(columns: Sequence[Column], width: int) -> list[int]:
    """Return the widths of columns: the widest that may shrink does so first."""
    widths = [column.width for column in columns]
    while _width(widths) > width:
        room = [w if w > c.least else 0 for w, c in zip(widths, columns, strict=True)]
        if not any(room):
            break
        widths[room.index(max(room))] -= 1
    return widths


def _width(widths: Iterable[int]) -> int:
    """Return the characters of a table: each column has a border and two blanks."""
    sizes = list(widths)
    return sum(sizes) + 3 * len(sizes) + 1


def sample(total: int, most: int, always: Iterable[int] = ()) -> list[int]:
    """Return at most `most` of the numbers below `total`, evenly spread.

    The first, the last and those of `always` are among them, in order.
    """
    if total <= most:
        return list(range(total))
    chosen = {0, total - 1, *always}
    room = max(2, most - len(chosen))
    for index in range(room):
        if len(chosen) < most:
            chosen.add(round(index * (total - 1) / (room - 1)))
    return sorted(chosen)
