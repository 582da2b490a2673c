"""Resize and Upsample: PyTorch's interpolation where it is the same, else matrices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from gemsc.importers.onnx.node import Node, Operator
from gemsc.importers.onnx.operators.interpolation import Resized, torch_matrix
from gemsc.importers.onnx.operators.text import at, axis_of, buffer, number
from gemsc.importers.sheet import Symbol
from gemsc.importers.weight import Array

# PyTorch's modes, by those of ONNX: with the name for pictures, whether corners are
# aligned, and the names by the number of axes
_CHOICES: dict[str, list[tuple[str, bool | None, dict[int, str]]]] = {
    "nearest": [
        ("nearest", None, dict.fromkeys((1, 2, 3), "nearest")),
        ("nearest-exact", None, dict.fromkeys((1, 2, 3), "nearest-exact")),
    ],
    "linear": [
        ("bilinear", False, {1: "linear", 2: "bilinear", 3: "trilinear"}),
        ("bilinear", True, {1: "linear", 2: "bilinear", 3: "trilinear"}),
    ],
    "cubic": [("bicubic", False, {2: "bicubic"}), ("bicubic", True, {2: "bicubic"})],
}


def _resize(node: Node) -> Symbol:
    x = node.value(0)
    axes = _axes(node, x.shape)
    if not x.tensor.is_floating_point() and node.attribute("mode") != "nearest":
        raise node.refuse(f"interpolates {x.tensor.dtype}")
    try:
        changed = {i: a for i, a in enumerate(axes) if _changes(a)}
    except KeyError as why:
        raise node.refuse(f"has the unknown mode {why}") from None
    if not changed:
        return x
    text = _by_torch(x, axes) if min(changed) >= 2 else None
    if text is None:
        text = x.text
        for axis, how in changed.items():
            text = _by_table(node, x, text, axis, how)
        text = _outside(node, changed, text)
    return node.gives(text)


def _changes(axis: Resized) -> bool:
    matrix = axis.matrix()
    return matrix.shape[0] != matrix.shape[1] or not np.allclose(
        matrix, np.eye(axis.old), atol=1e-12
    )


def _axes(node: Node, shape: Sequence[int]) -> list[Resized]:
    """Return how each axis is resized."""
    is_old = node.kind == "Upsample" or node.opset < 11
    named = node.attribute("axes") or range(len(shape))
    places = [axis_of(node, axis, len(shape)) for axis in named]
    given = node.setting("scales", 1 if is_old else 2) or []
    sizes = None if given or is_old else node.setting("sizes", 3)
    if len(given or sizes or []) != len(places):
        raise node.refuse(f"has neither scales nor sizes for {len(places)} axes")
    old = [shape[place] for place in places]
    scales, new = _scales(node, given, sizes, old)
    crops = [] if is_old else node.setting("roi", 1) or []
    count = len(places)
    axes = [Resized(size, size, 1.0, "nearest") for size in shape]
    for i, place in enumerate(places):
        both = (crops[i], crops[i + count]) if len(crops) == 2 * count else (0.0, 1.0)
        axes[place] = Resized(
            *(old[i], new[i], scales[i], node.attribute("mode", "nearest")),
            coordinates=_coordinates(node, is_old),
            rounding="floor" if is_old else _rounding(node),
            cubic=node.attribute("cubic_coeff_a", -0.75),
            excludes_outside=bool(node.attribute("exclude_outside", 0)),
            antialias=bool(node.attribute("antialias", 0)),
            crop=both,
        )
    return axes


def _coordinates(node: Node, is_old: bool) -> str:
    name: str = node.attribute("coordinate_transformation_mode", "half_pixel")
    return "asymmetric" if is_old else name


def _rounding(node: Node) -> str:
    name: str = node.attribute("nearest_mode", "round_prefer_floor")
    return name


def _scales(
    node: Node, given: list[float], sizes: list[int] | None, old: list[int]
) -> tuple[list[float], list[int]]:
    """Return the scale and the new size of each axis."""
    if sizes is None:
        # 1.2 and not the float32 near it: what is whole must come out whole
        scales = [float(str(np.float32(scale))) for scale in given]
        pairs = zip(scales, old, strict=True)
        return scales, [math.floor(s * n + 1e-6) for s, n in pairs]
    scales = [new / n for new, n in zip(sizes, old, strict=True)]
    policy = node.attribute("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch":
        return scales, [int(size) for size in sizes]
    one = min(scales) if policy == "not_larger" else max(scales)
    return [one] * len(old), [math.floor(one * n + 0.5) for n in old]


def _by_torch(x: Symbol, axes: Sequence[Resized]) -> str | None:
    """Return the call of PyTorch's interpolation if it does the same."""
    spatial = axes[2:]
    mode = next((a.mode for a in spatial if _changes(a)), "")
    if not x.tensor.is_floating_point() or any(a.antialias for a in spatial):
        return None
    for picture, corners, names in _CHOICES.get(mode, []):
        name = names.get(len(spatial))
        if name and all(_is_torchs(axis, picture, corners) for axis in spatial):
            factors = {axis.new / axis.old for axis in spatial}
            settings = f"size={tuple(axis.new for axis in spatial)}"
            if len(factors) == 1 and all(f.is_integer() for f in factors):
                settings = f"scale_factor={int(factors.pop())}"
            if name != "nearest":
                settings += f', mode="{name}"'
            if corners:
                settings += ", align_corners=True"
            return f"F.interpolate({x}, {settings})"
    return None


def _is_torchs(axis: Resized, mode: str, corners: bool | None) -> bool:
    theirs = torch_matrix(axis.old, axis.new, mode, corners)
    inside = bool(axis.inside().all())
    return inside and np.allclose(theirs, axis.matrix(), rtol=0, atol=1e-10)


def _by_table(node: Node, x: Symbol, text: str, axis: int, how: Resized) -> str:
    """Return an axis made of its elements, by their places or by a matrix."""
    if how.mode == "nearest":
        places = how.index()
        index = str(places.tolist()) if places.size <= 8 else ""
        return text + at(axis, index or buffer(node, "index", places).text)
    matrix: Array = how.matrix()
    rank, kind = len(x.shape), x.tensor.dtype
    if axis == rank - 1:
        return f"({text} @ {buffer(node, 'matrix', matrix.T, kind)})"
    table = buffer(node, "matrix", matrix, kind)
    if axis == rank - 2:
        return f"({table} @ {text})"
    return f"({table} @ {text}.movedim({axis}, -2)).movedim(-2, {axis})"


def _outside(node: Node, changed: Mapping[int, Resized], text: str) -> str:
    """Return the result with a fixed number where a crop reaches over the edges."""
    if all(how.inside().all() for how in changed.values()):
        return text
    first = min(changed)
    inside = np.ones((), bool)
    for axis in range(first, max(changed) + 1):
        row = changed[axis].inside() if axis in changed else np.ones(1, bool)
        inside = inside[..., None] & row
    shape = node.sheet.empty(text).dim() - max(changed) - 1
    inside = inside.reshape(*inside.shape, *[1] * shape)
    value = number(node.attribute("extrapolation_value", 0.0))
    mask = buffer(node, "inside", inside, node.sheet.empty("torch.bool"))
    return f"torch.where({mask}, {text}, {value})"


RESIZES: Mapping[str, Operator] = {"Resize": _resize, "Upsample": _resize}
