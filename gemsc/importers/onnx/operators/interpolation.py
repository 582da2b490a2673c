"""Which elements of an axis a resized one is made of, as the ONNX standard says.

An axis is resized by a matrix, (new size, old size). PyTorch's own interpolation has
one, too: where the two are equal, it is the same operation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from gemsc.importers.weight import Array

_CLOSE = 1e-9  # coordinates that are a number but for rounding


@dataclass(frozen=True)
class Resized:
    """How an axis is resized; the words are those of the operator Resize."""

    old: int
    new: int
    scale: float
    mode: str
    coordinates: str = "half_pixel"
    rounding: str = "round_prefer_floor"
    cubic: float = -0.75
    excludes_outside: bool = False
    antialias: bool = False
    crop: tuple[float, float] = (0.0, 1.0)

    def places(self) -> Array:
        """Return where the new elements are in the old axis.

        Raises:
            KeyError: the standard has no such coordinates.
        """
        found: Array = _COORDINATES[self.coordinates](
            self, np.arange(self.new, dtype=np.float64)
        )
        near = np.round(found * 2) / 2  # halves, too, are rounded to a side
        return np.where(
            np.abs(found - near) < _CLOSE * (1 + np.abs(found)), near, found
        )

    def inside(self) -> Array:
        """Return which new elements are made of old ones: others are outside a crop."""
        if self.coordinates != "tf_crop_and_resize":
            return np.ones(self.new, bool)
        places = self.places()
        return (places >= 0) & (places <= self.old - 1)

    def matrix(self) -> Array:
        """Return which share of each old element is in each new one.

        Raises:
            KeyError: the standard has no such mode.
        """
        if self.mode == "nearest":
            whole: Array = np.eye(self.old)[self.index()]
            return whole
        reach, kernel = {"linear": (1, _linear), "cubic": (2, self._cubic)}[self.mode]
        # a window of a shrunken axis reaches over more elements
        scale = min(self.scale, 1.0) if self.antialias else 1.0
        places = self.places()
        before = np.ceil(places).astype(np.int64) - 1
        first = int(np.floor(-reach / scale)) + 1
        steps = np.arange(first, 2 - first)
        elements = before[:, None] + steps
        shares = kernel((elements - places[:, None]) * scale)
        if self.excludes_outside:
            shares = shares * ((elements >= 0) & (elements < self.old))
        shares = shares / shares.sum(1, keepdims=True)
        matrix = np.zeros((self.new, self.old))
        rows = np.arange(self.new)[:, None]
        np.add.at(matrix, (rows, elements.clip(0, self.old - 1)), shares)
        return matrix

    def index(self) -> Array:
        """Return the nearest element of each new one.

        Raises:
            KeyError: the standard has no such way of rounding.
        """
        places = _ROUNDING[self.rounding](self.places())
        index: Array = places.astype(np.int64).clip(0, self.old - 1)
        return index

    def _cubic(self, distance: Array) -> Array:
        a, x = self.cubic, np.abs(distance)
        near = ((a + 2) * x - (a + 3)) * x * x + 1
        far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
        shares: Array = np.where(x <= 1, near, np.where(x < 2, far, 0.0))
        return shares


def _linear(distance: Array) -> Array:
    shares: Array = np.clip(1 - np.abs(distance), 0, 1)
    return shares


def _align_corners(axis: Resized, x: Array) -> Array:
    last = axis.scale * axis.old - 1
    return x * 0 if last == 0 else x * (axis.old - 1) / last


def _half_pixel(axis: Resized, x: Array) -> Array:
    return (x + 0.5) / axis.scale - 0.5


def _pytorch_half_pixel(axis: Resized, x: Array) -> Array:
    one = axis.scale * axis.old == 1
    return x * 0 - 0.5 if one else _half_pixel(axis, x)


def _symmetric(axis: Resized, x: Array) -> Array:
    share = axis.new / (axis.scale * axis.old)
    return axis.old / 2 * (1 - share) + _half_pixel(axis, x)


def _crop(axis: Resized, x: Array) -> Array:
    start, end = (side * (axis.old - 1) for side in axis.crop)
    last = axis.scale * axis.old - 1
    return start + (
        x * 0 + (end - start) / 2 if last == 0 else x * (end - start) / last
    )


_COORDINATES: dict[str, Callable[[Resized, Array], Array]] = {
    "align_corners": _align_corners,
    "asymmetric": lambda axis, x: x / axis.scale,
    "half_pixel": _half_pixel,
    "half_pixel_symmetric": _symmetric,
    "pytorch_half_pixel": _pytorch_half_pixel,
    "tf_crop_and_resize": _crop,
}
_ROUNDING: dict[str, Callable[[Array], Array]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


def torch_matrix(old: int, new: int, mode: str, corners: bool | None) -> Array:
    """Return the matrix of PyTorch's interpolation between two sizes.

    `mode` is one of those for pictures.
    """
    # PyTorch finds the nearest elements with float32, whatever it is given
    kind = torch.float32 if "nearest" in mode else torch.float64
    rows = torch.eye(old, dtype=kind, device="cpu").reshape(1, old, old, 1)
    found = F.interpolate(rows, size=(new, 1), mode=mode, align_corners=corners)
    matrix: Array = found.reshape(old, new).T.numpy().astype(np.float64)
    return matrix
