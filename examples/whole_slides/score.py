"""Score a mask of the slide: its overlap (Dice) with the stain, band by band.

    python examples/whole_slides/score.py slide.tiff mask.tiff --draw slide.jpg

Only the right quarter counts, which `model.py` holds out. A guess that all of it is
stained is scored beside the mask. The picture of `--draw` has the whole slide, a part
of that quarter, and the outline of the mask on the same part.
"""

import argparse
from pathlib import Path

import numpy as np
from model import stain
from scipy.ndimage import binary_erosion
from skimage.io import imsave

from gemsc import Slide

BAND = 512  # rows that are in memory
SIDE = 384  # pixels of each of three pictures
LINE = (0, 110, 60)  # red, green, blue


def draw(slide: Slide, coarse: Slide, mask: Slide, path: Path) -> None:
    """Write the slide, a part that no training piece touched, and its mask."""
    height, width, _ = slide.shape
    top, left = height // 3, width * 7 // 8
    part = (top, top + SIDE), (left, left + SIDE)
    pixels = slide.read(*part)
    marked = mask.read(*part)[..., 0] > 0
    inside = binary_erosion(marked, iterations=2, border_value=1)
    over = np.where((marked & ~inside)[..., None], np.uint8(LINE), pixels)
    rows, columns = (np.linspace(0, n - 1, SIDE).astype(int) for n in coarse.shape[:2])
    whole = coarse.read((0, coarse.shape[0]), (0, coarse.shape[1]))
    imsave(path, np.hstack([whole[np.ix_(rows, columns)], pixels, over]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("slide", type=Path)
    parser.add_argument("mask", type=Path)
    parser.add_argument("--draw", type=Path, help="a picture of both")
    options = parser.parse_args()
    slide, mask = Slide(options.slide), Slide(options.mask)
    height, width, _ = slide.shape
    both = stained = guessed = 0.0
    for top in range(0, height, BAND):
        part = (top, min(top + BAND, height)), (width * 3 // 4, width)
        truth, guess = stain(slide.read(*part)).numpy(), mask.read(*part)[..., 0]
        both += float((truth * guess).sum())
        stained += float(truth.sum())
        guessed += float(guess.sum(dtype=float))
    pixels = height * (width - width * 3 // 4)
    print(f"dice {2 * both / (stained + guessed):.3f}", end=", ")
    print(f"of a guess that all is stained {2 * stained / (stained + pixels):.3f}")
    if options.draw is not None:
        draw(slide, Slide(options.slide, level=2), mask, options.draw)
