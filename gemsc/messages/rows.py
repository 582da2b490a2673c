"""Which rows of a parameter each of the ranks that hold it updates.

Example, a weight of 10 rows on three ranks: rows 0 to 3, 3 to 6 and 6 to 10.

Source: Rajbhandari and others, ZeRO: Memory optimizations toward training trillion
parameter models, 2020 (stage 1: optimizer state in parts).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from math import prod

from gemsc.base.boxes import Interval

Rows = tuple[Interval, ...]  # by holder
ALONE_BYTES = 256 * 1024  # a weight as large is gathered alone, into its own memory


def rows_of_holders(
    shapes: Mapping[str, Sequence[int]], holders: int, whole: Collection[str] = ()
) -> dict[str, Rows]:
    """Return the rows of each parameter, by name, that each of its holders updates.

    Rows are those of dimension 0; they differ by one at most, and no holder has more
    than the last one. A number is one row. A parameter in `whole` is left to one
    holder: the largest first, each to the one that has least.
    """
    rows = {}
    for name, shape in shapes.items():
        size = shape[0] if shape else 1
        edges = [size * holder // holders for holder in range(holders + 1)]
        rows[name] = tuple(pairwise(edges))
    load = [0] * holders
    left = {name: shape for name, shape in shapes.items() if name in whole}
    for name in sorted(left, key=lambda n: (-prod(left[n]), n)):
        owner = min(range(holders), key=load.__getitem__)
        load[owner] += prod(left[name])
        edges = [0] * (owner + 1) + [rows[name][-1][1]] * (holders - owner)
        rows[name] = tuple(pairwise(edges))
    return rows


def in_pairs(rows: Rows) -> Rows:
    """Return the rows of the first and second holder together, and so on."""
    pairs = zip(rows[::2], rows[1::2], strict=True)
    return tuple((start, stop) for (start, _), (_, stop) in pairs)
