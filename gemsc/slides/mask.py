"""Write a picture row by row into a tiled TIFF file, of which memory holds few rows.

Coarser levels follow as pages of their own, each with every fourth row and column of
the one before: so tifffile and OpenSlide see a pyramid.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from gemsc.slides.slide import tifffile_module

TILE = 512  # pixels, both ways
FACTOR = 4  # from level to level
COARSEST = 1024  # pixels of the longer side, at most
CLASSIC_BYTES = 2**31  # what is larger, before it is compressed, becomes a BigTIFF


def write_rows(
    path: Path,
    bands: Iterable[NDArray[Any]],
    shape: tuple[int, ...],
    dtype: Any,
    pixel: tuple[float, float] | None = None,
) -> None:
    """Write bands of rows, one below the other, as tiles compressed by deflate.

    `shape` is height x width, or height x width x channels; a band has any number of
    rows. All bands together are the picture. `pixel` is the height and width of a pixel
    in micrometres, if they are known.
    """
    tifffile = tifffile_module()
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    levels, factor = [], FACTOR
    while max(shape[:2]) * FACTOR > COARSEST * factor:
        levels.append(_Level(factor, shape, np.dtype(dtype), _scratch(path)))
        factor *= FACTOR
    with tifffile.TiffWriter(path, bigtiff=num_bytes > CLASSIC_BYTES) as file:
        for level in (None, *levels):
            factor, size, rows = 1, shape, _noted(bands, levels)
            if level is not None:
                factor, size, rows = level.factor, level.size, level.bands()
            per_cm = None
            if pixel is not None:  # horizontally and vertically
                per_cm = (1e4 / pixel[1] / factor, 1e4 / pixel[0] / factor)
            file.write(
                _tiles(rows, size[1:]),
                shape=size,
                dtype=dtype,
                tile=(TILE, TILE),
                photometric="minisblack",
                planarconfig="contig" if len(shape) == 3 else None,
                compression="zlib",
                subfiletype=int(level is not None),  # 1: of reduced resolution
                resolution=per_cm,
                resolutionunit="CENTIMETER" if per_cm else None,
                metadata=None,  # pages with notes of tifffile's are no levels to it
                maxworkers=1,  # more of them would draw many tiles ahead
                software="gemsc",
            )


def _scratch(path: Path) -> IO[bytes]:
    return tempfile.TemporaryFile(dir=path.parent)


@dataclass(frozen=True)
class _Level:
    """A coarser level, which waits in a file until the finest one is written."""

    factor: int
    whole: tuple[int, ...]
    dtype: np.dtype[Any]
    file: IO[bytes]

    @property
    def size(self) -> tuple[int, ...]:
        """Its height, width and channels."""
        rows, columns, *more = self.whole
        return (-(-rows // self.factor), -(-columns // self.factor), *more)

    def add(self, top: int, band: NDArray[Any]) -> None:
        """Note what it has of a band that begins in row `top` of the finest level."""
        part = band[-top % self.factor :: self.factor, :: self.factor]
        self.file.write(np.ascontiguousarray(part, self.dtype).tobytes())

    def bands(self) -> Iterator[NDArray[Any]]:
        """Yield its rows."""
        self.file.seek(0)
        _, *row = self.size
        num_bytes = TILE * int(np.prod(row)) * self.dtype.itemsize
        while data := self.file.read(num_bytes):
            yield np.frombuffer(data, self.dtype).reshape(-1, *row)
        self.file.close()


def _noted(
    bands: Iterable[NDArray[Any]], levels: Sequence[_Level]
) -> Iterator[NDArray[Any]]:
    """Yield the bands, and let the levels note what they have of each."""
    top = 0
    for band in bands:
        for level in levels:
            level.add(top, band)
        top += len(band)
        yield band


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
