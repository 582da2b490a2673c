"""Score a mask of the slide: its overlap (Dice) with the stain, band by band.

    python examples/whole_slides/score.py slide.tiff mask.tiff

Only the right quarter counts, which `model.py` holds out. A guess that all of it is
stained is scored beside the mask.
"""

import argparse
from pathlib import Path

from model import stain

from gemsc import Slide

BAND = 512  # rows that are in memory

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("slide", type=Path)
    parser.add_argument("mask", type=Path)
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
