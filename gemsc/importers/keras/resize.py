"""Images of another size: by layers of PyTorch that compute the same, or matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from torch import nn

from gemsc.importers.keras.layer import Laid, LayerCall, Translator
from gemsc.importers.keras.windows import (
    flat_pads,
    image,
    one_number,
    per_axis,
    slices,
)
from gemsc.importers.sheet import Symbol
from gemsc.importers.weight import Array, constant


def _up(call: LayerCall) -> Laid:
    x, first = image(call)
    factors = per_axis(call.config["size"], len(x.shape) - 2)
    kind = call.config.get("interpolation", "nearest")
    if kind == "nearest" or (kind == "bilinear" and len(factors) == 2):
        settings = {} if kind == "nearest" else {"align_corners": False}
        scale = one_number(tuple(map(float, factors)))
        name = call.add(lambda: nn.Upsample(scale_factor=scale, mode=kind, **settings))
        return call.gives(f"{name}({x})", first=first)
    sizes = [n * factor for n, factor in zip(x.shape[2:], factors, strict=True)]
    return call.gives(_by_matrices(call, x, sizes, kind, antialias=False), first=first)


def _resizing(call: LayerCall) -> Laid:
    """Resize to a size; the ratio of height and width is kept by crops or borders."""
    config = call.config
    x, first = image(call)
    if not x.tensor.is_floating_point():
        raise call.refuse(
            "resizes integers, which Keras rounds", help="resize in the dataset"
        )
    sizes = per_axis([config["height"], config["width"]], 2)
    x = _of_ratio(call, x, sizes)
    kind, antialias = config["interpolation"], bool(config.get("antialias"))
    if kind != "nearest" and (antialias or kind != "bilinear"):
        return call.gives(_by_matrices(call, x, sizes, kind, antialias), first=first)
    mode = "nearest-exact" if kind == "nearest" else kind
    settings = {} if kind == "nearest" else {"align_corners": False}
    name = call.add(lambda: nn.Upsample(size=sizes, mode=mode, **settings))
    return call.gives(f"{name}({x})", first=first)


def _of_ratio(call: LayerCall, x: Symbol, sizes: Sequence[int]) -> Symbol:
    """Crop an image, or pad it, to the ratio of another size."""
    height, width = x.shape[2:]
    as_high, as_wide = width * sizes[0] / sizes[1], height * sizes[1] / sizes[0]
    name = call.layer.name
    if call.config.get("crop_to_aspect_ratio"):
        wanted = max(min(height, int(as_high)), 1), max(min(width, int(as_wide)), 1)
        starts = [
            int((n - w) / 2) for n, w in zip((height, width), wanted, strict=True)
        ]
        crops = [
            (start, n - start - w)
            for start, n, w in zip(starts, (height, width), wanted, strict=True)
        ]
        if any(size for pair in crops for size in pair):
            return call.sheet.line(f"{name}_crop", f"{x}{slices(crops)}")
    elif call.config.get("pad_to_aspect_ratio"):
        further = max(height, int(as_high)) - height, max(width, int(as_wide)) - width
        pads = [(int(size / 2), int(size / 2)) for size in further]
        if any(further):
            fill = float(call.config.get("fill_value", 0.0))
            text = f'F.pad({x}, {flat_pads(pads)}, "constant", {fill!r})'
            return call.sheet.line(f"{name}_pad", text)
    return x


# ----------------------------------------------------------------------- matrices


def _by_matrices(
    call: LayerCall, x: Symbol, sizes: Sequence[int], kind: str, antialias: bool
) -> str:
    """Return the expression of an image between a matrix of rows and one of columns."""
    if kind not in _KERNELS or len(sizes) != 2:
        raise call.refuse(f"has interpolation={kind!r:.40}")
    rows = _matrix(x.shape[2], sizes[0], kind, antialias)
    columns = _matrix(x.shape[3], sizes[1], kind, antialias).T
    left = call.tensor("rows", rows.shape, constant(rows), trained=False)
    right = call.tensor("columns", columns.shape, constant(columns), trained=False)
    return f"{left} @ {x} @ {right}"


def _matrix(size: int, target: int, kind: str, antialias: bool) -> Array:
    """Return (target, size): how much of each pixel is in each new one.

    As jax.image.resize: centers of pixels at halves; what a kernel has outside of the
    image goes to the pixels inside.
    """
    radius, kernel = _KERNELS[kind]
    stretch = max(size / target, 1.0) if antialias else 1.0
    centers = (np.arange(target) + 0.5) * size / target - 0.5
    distance = np.abs(centers[:, None] - np.arange(size)) / stretch
    weights = np.where(distance < radius, kernel(distance), 0.0)
    weights /= weights.sum(1, keepdims=True)
    weights[(centers < -0.5) | (centers > size - 0.5)] = 0
    return weights.astype(np.float32)


def _linear(x: Array) -> Array:
    return np.maximum(0.0, 1.0 - x)


def _cubic(x: Array) -> Array:
    """Return the kernel of Keys with a = -0.5, where PyTorch has -0.75."""
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
    return np.where(x < 1.0, near, far)


def _lanczos(radius: float) -> Callable[[Array], Array]:
    return lambda x: np.asarray(np.sinc(x) * np.sinc(x / radius))


_KERNELS: Mapping[str, tuple[float, Callable[[Array], Array]]] = {
    "bilinear": (1.0, _linear),
    "bicubic": (2.0, _cubic),
    "lanczos3": (3.0, _lanczos(3.0)),
    "lanczos5": (5.0, _lanczos(5.0)),
}

RESIZE_LAYERS: Mapping[str, Translator] = {
    **{f"UpSampling{d}D": _up for d in (1, 2, 3)},
    "Resizing": _resizing,
}
