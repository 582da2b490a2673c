"""Windows over a picture: of each the middle is kept, and these cover the picture.

Along an axis of 10 pixels, windows of 6 that overlap by 1 on each side, what is kept
of them in brackets:

    [. . . . .].
             .[. . . . .]      the last one is shifted inwards, to the edge

A kept pixel has `overlap` pixels of its window around it, or the real edge of the
picture. So a network that looks no further gives what it gives for the whole picture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemsc.base.boxes import Box
from gemsc.slides.slide import Slide

__all__ = ["WindowSpan", "Windows"]


@dataclass(frozen=True)
class WindowSpan:
    """A window along one axis: its first pixel, and the interval that it gives."""

    start: int
    kept: tuple[int, int]

    @property
    def inside(self) -> slice:
        """Where in the window the interval is."""
        return slice(self.kept[0] - self.start, self.kept[1] - self.start)


@dataclass(frozen=True)
class Windows:
    """The windows over a picture of `shape`, in row order.

    All have the same `size`. A picture that is smaller is one window, filled up.
    `overlap` is less than half of the size.
    """

    shape: tuple[int, int]
    size: tuple[int, int]
    overlap: int

    def __len__(self) -> int:
        """How many there are."""
        return len(self.rows) * len(self.columns)

    def __iter__(self) -> Iterator[tuple[WindowSpan, WindowSpan]]:
        """Yield rows and columns of each."""
        return ((row, column) for row in self.rows for column in self.columns)

    @property
    def rows(self) -> list[WindowSpan]:
        """The windows along the height."""
        return _spans(self.shape[0], self.size[0], self.overlap)

    @property
    def columns(self) -> list[WindowSpan]:
        """The windows along the width."""
        return _spans(self.shape[1], self.size[1], self.overlap)

    def read(
        self, slide: Slide, row: WindowSpan, column: WindowSpan, box: Box
    ) -> NDArray[Any]:
        """Return the pixels of a window in a box of it: height, width, channels.

        What a small picture lacks is mirrored at its lower and right edge.
        """
        corner = row.start, column.start
        if all(a >= b for a, b in zip(self.shape, self.size, strict=True)):
            rows, columns = (
                (first + start, first + stop)
                for first, (start, stop) in zip(corner, box, strict=True)
            )
            return slide.read(rows, columns)
        rows, columns = (
            (first, min(first + size, length))
            for first, size, length in zip(corner, self.size, self.shape, strict=True)
        )
        part = slide.read(rows, columns)
        missing = [
            (0, size - n) for size, n in zip(self.size, part.shape, strict=False)
        ]
        return np.pad(part, [*missing, (0, 0)], "symmetric")[
            tuple(slice(*interval) for interval in box)
        ]


def _spans(length: int, size: int, overlap: int) -> list[WindowSpan]:
    if length <= size:
        return [WindowSpan(0, (0, length))]
    starts = [*range(0, length - size, size - 2 * overlap), length - size]
    edges = [0, *(start + size - overlap for start in starts[:-1]), length]
    parts = zip(starts, edges[:-1], edges[1:], strict=True)
    return [WindowSpan(start, (first, last)) for start, first, last in parts]
