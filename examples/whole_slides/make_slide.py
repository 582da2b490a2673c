"""Make a whole slide of stained tissue: a pyramid of tiles in one TIFF file.

    python examples/whole_slides/make_slide.py --size 16384 -o slide.tiff

The tissue is scikit-image's immunohistochemistry picture, 512 x 512 pixels, mirrored at
its edges for ever. Where a pixel is taken from bends slowly over the slide, and so does
the thickness of the section, so that no two places are the same. It is made in bands:
memory holds one of them, and the coarser levels (1/4 and 1/16 of the size).
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tifffile
from numpy.typing import NDArray
from scipy.ndimage import map_coordinates
from skimage import data
from skimage.transform import downscale_local_mean

TILE = 256  # pixels, of the file's tiles; a band has so many rows
Picture = NDArray[np.uint8]


def band(density: NDArray[np.float32], first: int, size: int) -> Picture:
    """Return the rows of a slide from the `first` one on.

    `density` is the optical density of the tissue, which grows with the thickness.
    """
    y = np.arange(first, first + TILE, dtype=np.float32)[:, None]
    x = np.arange(size, dtype=np.float32)[None]
    rows = y + 70 * np.sin(x / 900) + 40 * np.sin(y / 531 + x / 1700)
    columns = x + 70 * np.sin(y / 1100) + 40 * np.sin(x / 613 - y / 1300)
    thickness = 1 + 0.2 * np.sin(x / 1900 + y / 2300) + 0.1 * np.sin(y / 777 - x / 888)
    place = np.stack([rows, columns])
    light = [
        np.exp(-thickness * map_coordinates(channel, place, order=1, mode="mirror"))
        for channel in np.moveaxis(density, -1, 0)
    ]
    return (255 * np.stack(light, axis=-1)).clip(0, 255).astype(np.uint8)


def tiles_of(rows: Picture) -> Iterator[Picture]:
    """Yield what the file has of some rows, tile by tile; a tile is never cut."""
    for top in range(0, rows.shape[0], TILE):
        for left in range(0, rows.shape[1], TILE):
            part = rows[top : top + TILE, left : left + TILE]
            missing = [(0, TILE - size) for size in part.shape[:2]]
            yield np.pad(part, [*missing, (0, 0)])


def make(path: Path, size: int) -> None:
    """Write a slide of `size` x `size` pixels; `size` is a multiple of 256."""
    rgb = data.immunohistochemistry().astype(np.float32)
    density = -np.log((rgb + 1) / 256)
    coarse = np.zeros((size // 4, size // 4, 3), np.uint8)

    def tiles() -> Iterator[Picture]:
        for first in range(0, size, TILE):
            rows = band(density, first, size)
            mean = downscale_local_mean(rows, (4, 4, 1)).astype(np.uint8)
            coarse[first // 4 : first // 4 + len(mean)] = mean
            yield from tiles_of(rows)

    layout = {
        "dtype": np.uint8,
        "tile": (TILE, TILE),
        "photometric": "rgb",
        "compression": "zlib",
    }
    with tifffile.TiffWriter(path) as file:
        file.write(tiles(), shape=(size, size, 3), subifds=2, **layout)
        for level in (coarse, coarse[2::4, 2::4]):
            file.write(tiles_of(level), shape=level.shape, subfiletype=1, **layout)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=16384, help="pixels, both ways")
    parser.add_argument("-o", "--output", type=Path, default=Path("slide.tiff"))
    options = parser.parse_args()
    if options.size < TILE or options.size % TILE:
        parser.error(f"--size must be a multiple of {TILE}")
    make(options.output, options.size)
    print(f"wrote {options.output}: {options.output.stat().st_size >> 20} MiB")
