"""Who writes what: ranks that hold the same pieces write equal shares of their bytes.

Two ranks hold all of a (96 rows of 4 bytes), b (32 rows) and c (a number):

    rank 0    a: rows 0 to 65
    rank 1    a: rows 65 to 96, b, c

What some ranks hold is one line of bytes, in order of the keys, and is cut into equal
lengths: a row is written by the rank in whose length it begins. Who holds what is what
the ranks say of themselves: it does not depend on how a model is split.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from gemsc.runtime.checkpoint.holdings import HeldTensor
from gemsc.runtime.checkpoint.pieces import TensorPiece

Table = TypeVar("Table")  # what a rank says of all that it holds


@dataclass(frozen=True, slots=True)
class Item:
    """What a rank says of a tensor that it holds."""

    key: str
    piece: TensorPiece
    row_bytes: int

    @staticmethod
    def of(held: HeldTensor) -> Item:
        """Return what is said of a tensor."""
        width = held.piece.count // max(1, held.piece.sizes[0])
        return Item(held.key, held.piece, width * held.tensor.dtype.itemsize)

    @property
    def rows(self) -> int:
        """The size of the first dimension."""
        return self.piece.sizes[0]


def digest_of(items: Sequence[Item]) -> str:
    """Return what ranks have in common that hold the same."""
    return hashlib.sha256(repr(items).encode()).hexdigest()


def tables_of(transport: Any, items: Table, digests: Sequence[str]) -> dict[str, Table]:
    """Return what ranks hold, by the digest of that; each of them is said once."""
    is_first = digests.index(digests[transport.rank]) == transport.rank
    told = transport.all_gather_object(items if is_first else None)
    pairs = zip(digests, told, strict=True)
    return {digest: table for digest, table in pairs if table is not None}


def own_rows_of(
    rank: int, digests: Sequence[str], tables: Mapping[str, Sequence[Item]]
) -> dict[str, tuple[int, int]]:
    """Return which rows a rank writes of the pieces that it holds, by their keys.

    `digests` are those of all ranks, and `tables` what each of them stands for.
    """
    ranks: dict[str, list[int]] = defaultdict(list)
    for holder, digest in enumerate(digests):
        ranks[digest].append(holder)
    holding: dict[Item, list[str]] = {item: [] for item in tables[digests[rank]]}
    for digest, items in tables.items():
        for item in items:
            if item in holding:
                holding[item].append(digest)
    lines: dict[tuple[str, ...], list[Item]] = defaultdict(list)
    for item, layouts in holding.items():
        lines[tuple(layouts)].append(item)
    rows: dict[str, tuple[int, int]] = {}
    for held_by, line in lines.items():
        holders = sorted(holder for digest in held_by for holder in ranks[digest])
        rows |= _share(line, holders.index(rank), len(holders))
    return rows


def _share(
    line: Iterable[Item], number: int, count: int
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the rows that begin in one of `count` equal lengths of a line.

    Of a tensor without elements the first one has what there is.
    """
    line = sorted(line, key=lambda item: item.key)
    total = sum(item.rows * item.row_bytes for item in line)
    cuts = total * number // count, total * (number + 1) // count
    start = 0
    for item in line:
        if item.row_bytes:
            ends = (-((start - cut) // item.row_bytes) for cut in cuts)  # rounded up
            first, last = (min(max(end, 0), item.rows) for end in ends)
            if first < last:
                yield item.key, (first, last)
            start += item.rows * item.row_bytes
        elif number == 0 and item.piece.is_whole:
            yield item.key, (0, item.rows)


def cut_rows(held: HeldTensor, rows: tuple[int, int]) -> HeldTensor:
    """Return some rows of a tensor, on its memory."""
    tensor = held.tensor.detach().reshape(held.piece.sizes)[slice(*rows)]
    return replace(held, tensor=tensor, piece=held.piece.rows(*rows))
