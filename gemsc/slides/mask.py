"""Write a picture row by row into a tiled TIFF file, of which memory holds few rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemsc.slides.slide import tifffile_module

__all__ = ["write_rows"]

TILE = 512  # pixels, both ways
CLASSIC_BYTES = 2**31  # what is larger, before it is compressed, becomes a BigTIFF


def write_rows(
    path: Path, bands: Iterable[NDArray[Any]], shape: tuple[int, ...], dtype: Any
) -> None:
    """Write bands of rows, one below the other, as tiles compressed by deflate.

    `shape` is height x width, or height x width x channels; a band has any number of
    rows. All bands together are the picture.
    """
    tifffile = tifffile_module()
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    with tifffile.TiffWriter(path, bigtiff=num_bytes > CLASSIC_BYTES) as file:
        file.write(
            _tiles(bands, shape[1:]),
            shape=shape,
            dtype=dtype,
            tile=(TILE, TILE),
            photometric="minisblack",
            planarconfig="contig" if len(shape) == 3 else None,
            compression="zlib",
            maxworkers=1,  # more of them would draw many tiles ahead
            software="gemsc",
        )


def _tiles(
    bands: Iterable[NDArray[Any]], width: tuple[int, ...]
) -> Iterator[NDArray[Any]]:
    """Yield tiles in row order; those at the edges are filled up."""
    waiting: list[NDArray[Any]] = []
    num_rows = 0
    for band in bands:
        waiting.append(band)
        num_rows += len(band)
        if num_rows >= TILE:
            rows = np.concatenate(waiting)
            whole = num_rows - num_rows % TILE
            yield from _cut(rows[:whole], width[0])
            waiting, num_rows = [rows[whole:].copy()], num_rows - whole
    if num_rows:
        yield from _cut(np.concatenate(waiting), width[0])


def _cut(rows: NDArray[Any], width: int) -> Iterator[NDArray[Any]]:
    for top in range(0, len(rows), TILE):
        for left in range(0, width, TILE):
            part = rows[top : top + TILE, left : left + TILE]
            missing = [(0, TILE - size) for size in part.shape[:2]]
            yield np.pad(part, [*missing, *[(0, 0)] * (part.ndim - 2)])
