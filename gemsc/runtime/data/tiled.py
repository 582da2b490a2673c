"""Images that never exist whole: each rank reads the part that its tile needs.

class Slides(Dataset):                       # a TiledDataset
shape = (16384, 16384)
def __len__(self): ...
def read(self, index, box):              # ((0, 8195), (0, 8195)) on tile 0
return image_part, mask_part
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from gemsc.base.boxes import Box
from gemsc.messages.message import Input
from gemsc.slides.windows import image_axes


@runtime_checkable
class TiledDataset(Protocol):
    """A dataset whose samples can be read in part.

    `shape` is that of the images: (height, width), or three numbers for volumes.
    """

    shape: tuple[int, ...]

    def __len__(self) -> int:
        """The number of samples."""

    def read(self, index: int, box: Box) -> tuple[Any, Any]:
        """Return (input, target) of one sample.

        Tensors whose last dimensions, or last but the channels, are those of the image
        hold only its `box`, a half-open interval of rows, of columns, ...; others, such
        as labels, are whole.
        The box is empty for a rank that needs no part of the image.
        """


@dataclass(frozen=True, slots=True)
class Window:
    """The part of each image that a rank has read; `shape` is that of the whole one."""

    shape: tuple[int, ...]
    box: Box

    def place(self, shape: tuple[int, ...]) -> slice | None:
        """Return where the image's axes stand in a tensor that is cut, else None."""
        return image_axes(shape, self.shape)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left out."""
        return self == whole_window(self.shape)

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return what is left of a tensor of this shape."""
        sizes = list(shape)
        if (place := self.place(shape)) is not None:
            sizes[place] = [stop - start for start, stop in self.box]
        return tuple(sizes)

    def inside(self, box: Box, shape: tuple[int, ...]) -> Box:
        """Return where a box of a tensor of this shape is in what is left of it."""
        moved = list(box)
        if (place := self.place(shape)) is not None:
            moved[place] = [
                (start - origin, stop - origin)
                for (start, stop), (origin, _) in zip(box[place], self.box, strict=True)
            ]
        return tuple(moved)


def whole_window(shape: tuple[int, ...]) -> Window:
    """Return the window with all of an image."""
    return Window(shape, tuple((0, size) for size in shape))


def window_of(inputs: Iterable[Input], shape: tuple[int, ...]) -> Window:
    """Return the smallest window with all that a rank reads of an image."""
    image = whole_window(shape)
    boxes = [
        item.box[place] if item.box else image.box
        for item in inputs
        if (place := image.place(item.shape)) is not None
    ]
    if not boxes:
        return Window(shape, ((0, 0),) * len(shape))
    hull = tuple(
        (min(start for start, _ in axis), max(stop for _, stop in axis))
        for axis in zip(*boxes, strict=True)
    )
    return Window(shape, hull)
