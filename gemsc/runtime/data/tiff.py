"""Parts of images in tiled TIFF files, without ever reading the whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gemsc.base.boxes import Box
from gemsc.errors import GemscError

try:
    import tifffile
except ImportError:
    raise GemscError(
        "TIFF files need the package tifffile, which is not installed",
        help="pip install tifffile",
    ) from None

__all__ = ["TiffPicture"]


class TiffPicture:
    """An image in a tiled TIFF file: what lies in a box is read, tile by tile.

    `shape` is (height, width). The file holds [height, width] or [height, width,
    channels], in tiles that tifffile can decode:
    `tifffile.imwrite(path, data, tile=(256, 256))` writes one.
    """

    def __init__(self, path: str | Path) -> None:
        """Look at the file.

        Raises:
            GemscError: the file is none that can be read in parts.
        """
        self.path = Path(path)
        with self._open() as file:
            page = file.pages[0]
            if not page.is_tiled or page.ndim not in (2, 3) or page.planarconfig != 1:
                raise GemscError(
                    f"{path} cannot be read in parts: it holds no tiled image, "
                    "[height, width] or [height, width, channels]",
                    help="write it with tifffile.imwrite(path, data, tile=(256, 256))",
                )
            self.shape: tuple[int, int] = tuple(page.shape[:2])
            self.channels: int = page.shape[2] if page.ndim == 3 else 1

    def _open(self) -> Any:
        try:
            return tifffile.TiffFile(self.path)
        except (OSError, tifffile.TiffFileError) as error:
            raise GemscError(
                f"{self.path} is not a TIFF file that can be read: {error}",
                help="give the path of a tiled TIFF file",
            ) from None

    def read(self, box: Box) -> Tensor:
        """Return [channels, rows, columns] of a box of rows and columns."""
        (top, bottom), (left, right) = box
        with self._open() as file:
            page = file.pages[0]
            size = (bottom - top, right - left, self.channels)
            part = np.zeros(size, dtype=page.dtype)
            for number in self._under(page, box):
                file.filehandle.seek(page.dataoffsets[number])
                data = file.filehandle.read(page.databytecounts[number])
                tile, (_, _, y, x, _), _ = page.decode(
                    data, number, jpegtables=page.jpegtables
                )
                if tile is not None:
                    _paste(part, tile[0], y - top, x - left)
        return torch.from_numpy(part).permute(2, 0, 1).contiguous()

    def _under(self, page: Any, box: Box) -> Iterator[int]:
        """Yield the numbers of the file's tiles that a box touches."""
        (top, bottom), (left, right) = box
        if top >= bottom or left >= right:
            return
        height, width = page.tilelength, page.tilewidth
        in_a_row = -(-self.shape[1] // width)
        for row in range(top // height, -(-bottom // height)):
            for column in range(left // width, -(-right // width)):
                yield row * in_a_row + column


def _paste(part: Any, tile: Any, y: int, x: int) -> None:
    """Put a tile whose corner is at (y, x) into the part, as far as it lies inside."""
    rows = slice(max(y, 0), min(y + tile.shape[0], part.shape[0]))
    columns = slice(max(x, 0), min(x + tile.shape[1], part.shape[1]))
    part[rows, columns] = tile[
        rows.start - y : rows.stop - y, columns.start - x : columns.stop - x
    ]
