"""Resize and Upsample: PyTorch's interpolation where it is the same, else matrices.

An axis is resized by a matrix, (new size, old size), as the ONNX standard says.
PyTorch's own interpolation has one, too: where the two are equal, it is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from gemsc.importers.onnx.operators.node import (
    Node,
    Numbers,
    at,
    number,
    operator,
    shortest,
)
from gemsc.importers.sheet import Symbol
from gemsc.importers.weight import Array

# PyTorch's modes by those of ONNX: a name for pictures, and if corners are aligned
CHOICES: Mapping[str, Sequence[tuple[str, bool | None]]] = {
    "nearest": [("nearest", None), ("nearest-exact", None)],
    "linear": [("bilinear", False), ("bilinear", True)],
    "cubic": [("bicubic", False), ("bicubic", True)],
}
# and what they are called for one, two and three axes
NAMES: Mapping[str, Mapping[int, str]] = {
    "nearest": dict.fromkeys((1, 2, 3), "nearest"),
    "nearest-exact": dict.fromkeys((1, 2, 3), "nearest-exact"),
    "bilinear": {1: "linear", 2: "bilinear", 3: "trilinear"},
    "bicubic": {2: "bicubic"},
}
CLOSE = 1e-9  # coordinates that are a number but for rounding


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
        place: Array = _COORDINATES[self.coordinates](
            self, np.arange(self.new, dtype=np.float64)
        )
        near = np.round(place * 2) / 2  # halves, too, are rounded to a side
        return np.where(np.abs(place - near) < CLOSE * (1 + np.abs(place)), near, place)

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

    def changes(self) -> bool:
        """Return whether the axis is another one."""
        matrix = self.matrix()
        return matrix.shape != (self.old, self.old) or not np.allclose(
            matrix, np.eye(self.old), atol=1e-12
        )

    def is_torchs(self, mode: str, corners: bool | None) -> bool:
        """Return whether PyTorch's interpolation has the same matrix."""
        # PyTorch finds the nearest elements with float32, whatever it is given
        kind = torch.float32 if "nearest" in mode else torch.float64
        rows = torch.eye(self.old, dtype=kind, device="cpu")[None, :, :, None]
        columns = F.interpolate(
            rows, size=(self.new, 1), mode=mode, align_corners=corners
        )
        theirs = columns[0, :, :, 0].T.numpy()
        is_inside = bool(self.inside().all())
        return is_inside and np.allclose(theirs, self.matrix(), rtol=0, atol=1e-10)

    def _cubic(self, distance: Array) -> Array:
        a, x = self.cubic, np.abs(distance)
        near = ((a + 2) * x - (a + 3)) * x * x + 1
        far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
        shares: Array = np.where(x <= 1, near, np.where(x < 2, far, 0.0))
        return shares


def _linear(distance: Array) -> Array:
    shares: Array = np.clip(1 - np.abs(distance), 0, 1)
    return shares


def _stretched(axis: Resized, x: Array, start: float, end: float) -> Array:
    """Return places from one of the old axis to another; a single one is between."""
    last = axis.scale * axis.old - 1
    return start + (x * (end - start) / last if last else x * 0 + (end - start) / 2)


def _half_pixel(axis: Resized, x: Array) -> Array:
    return (x + 0.5) / axis.scale - 0.5


def _symmetric(axis: Resized, x: Array) -> Array:
    share = axis.new / (axis.scale * axis.old)
    return axis.old / 2 * (1 - share) + _half_pixel(axis, x)


_COORDINATES: dict[str, Callable[[Resized, Array], Array]] = {
    "align_corners": lambda axis, x: (
        x * 0 if axis.scale * axis.old == 1 else _stretched(axis, x, 0, axis.old - 1)
    ),
    "asymmetric": lambda axis, x: x / axis.scale,
    "half_pixel": _half_pixel,
    "half_pixel_symmetric": _symmetric,
    "pytorch_half_pixel": lambda axis, x: (
        x * 0 - 0.5 if axis.scale * axis.old == 1 else _half_pixel(axis, x)
    ),
    "tf_crop_and_resize": lambda axis, x: _stretched(
        axis, x, *(side * (axis.old - 1) for side in axis.crop)
    ),
}
_ROUNDING: dict[str, Callable[[Array], Array]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


# ------------------------------------------------------------------------- operators


@operator("Resize", "Upsample")
def _resize(
    node: Node,
    x: Symbol,
    roi: Numbers | None,
    scales: Numbers | None,
    sizes: Numbers | None,
) -> Symbol:
    coordinates = node.attr.coordinate_transformation_mode
    rounding = node.attr.nearest_mode
    if node.kind == "Upsample" or node.opset < 11:  # where input 1 is the scales
        roi, scales, sizes = None, scales or roi, None
        coordinates, rounding = "asymmetric", "floor"
    if not x.tensor.is_floating_point() and node.attr.mode != "nearest":
        raise node.refuse(f"interpolates {x.tensor.dtype}")
    places = [node.axis(axis, x.rank) for axis in node.attr.axes or range(x.rank)]
    count = len(places)
    if len(scales or sizes or []) != count:
        raise node.refuse(f"has neither scales nor sizes for {count} axes")
    old = [x.shape[place] for place in places]
    scales, new = _scaled(scales, sizes, old, node.attr.keep_aspect_ratio_policy)
    roi = roi if roi and len(roi) == 2 * count else [*[0.0] * count, *[1.0] * count]
    resized = [Resized(size, size, 1.0, "nearest") for size in x.shape]
    for i, place in enumerate(places):
        resized[place] = Resized(
            *(old[i], new[i], scales[i], node.attr.mode),
            coordinates=coordinates,
            rounding=rounding,
            cubic=node.attr.cubic_coeff_a,
            excludes_outside=bool(node.attr.exclude_outside),
            antialias=bool(node.attr.antialias),
            crop=(roi[i], roi[i + count]),
        )
    return _resized(node, x, resized, node.attr.extrapolation_value)


def _scaled(
    scales: Numbers | None, sizes: Numbers | None, old: Sequence[int], policy: str
) -> tuple[list[float], list[int]]:
    """Return the scale of each axis and its new size, of which the file gives one."""
    if scales:
        # 1.2 and not the float32 near it: what is whole must come out whole
        exact = [shortest(scale) for scale in scales]
        return exact, [
            math.floor(s * n + 1e-6) for s, n in zip(exact, old, strict=True)
        ]
    ratios = [new / n for new, n in zip(sizes or [], old, strict=True)]
    if policy == "stretch":
        return ratios, [int(size) for size in sizes or []]
    one = min(ratios) if policy == "not_larger" else max(ratios)
    return [one] * len(old), [math.floor(one * n + 0.5) for n in old]


def _resized(node: Node, x: Symbol, axes: Sequence[Resized], outside: float) -> Symbol:
    """Return the result of a call, or of a table for each axis that changes."""
    try:
        changed = {i: axis for i, axis in enumerate(axes) if axis.changes()}
    except KeyError as why:
        raise node.refuse(f"has the unknown mode {why}") from None
    if not changed:
        return x
    text = _by_torch(x, axes[2:]) if min(changed) >= 2 else ""
    if not text:
        text = x.text
        for axis, how in changed.items():
            text = _by_table(node, x, text, axis, how)
        text = _with_outside(node, changed, text, outside)
    return node.gives(text)


def _by_torch(x: Symbol, spatial: Sequence[Resized]) -> str:
    """Return the call of PyTorch's interpolation if it does the same, else ""."""
    mode = next((axis.mode for axis in spatial if axis.changes()), "")
    if not x.tensor.is_floating_point():
        return ""
    for picture, corners in CHOICES.get(mode, []):
        name = NAMES[picture].get(len(spatial))
        if name and all(axis.is_torchs(picture, corners) for axis in spatial):
            factors = {axis.new / axis.old for axis in spatial}
            settings = f"size={tuple(axis.new for axis in spatial)}"
            if len(factors) == 1 and all(f.is_integer() for f in factors):
                settings = f"scale_factor={int(factors.pop())}"
            if name != "nearest":
                settings += f', mode="{name}"'
            if corners:
                settings += ", align_corners=True"
            return f"F.interpolate({x}, {settings})"
    return ""


def _by_table(node: Node, x: Symbol, text: str, axis: int, how: Resized) -> str:
    """Return an axis made of its elements, by their places or by a matrix."""
    if how.mode == "nearest":
        places = how.index()
        index = str(places.tolist()) if places.size <= 8 else ""
        return text + at(axis, index or node.buffer("index", places).text)
    matrix, dtype = how.matrix(), x.tensor.dtype
    if axis == x.rank - 1:
        return f"({text} @ {node.buffer('matrix', matrix.T, dtype)})"
    table = node.buffer("matrix", matrix, dtype)
    if axis == x.rank - 2:
        return f"({table} @ {text})"
    return f"({table} @ {text}.movedim({axis}, -2)).movedim(-2, {axis})"


def _with_outside(
    node: Node, changed: Mapping[int, Resized], text: str, outside: float
) -> str:
    """Return the result with a fixed number where a crop reaches over the edges."""
    if all(how.inside().all() for how in changed.values()):
        return text
    first, last = min(changed), max(changed)
    inside = np.ones((), bool)
    for axis in range(first, last + 1):
        row = changed[axis].inside() if axis in changed else np.ones(1, bool)
        inside = inside[..., None] & row
    behind = node.sheet.empty(text).dim() - last - 1
    inside = inside.reshape(*inside.shape, *[1] * behind)
    mask = node.buffer("inside", inside, torch.bool)
    return f"torch.where({mask}, {text}, {number(outside)})"
