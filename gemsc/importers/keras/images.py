"""Images: their borders, windows and sizes; the padding that Keras calls 'same'."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from gemsc.importers.keras.layer import Laid, LayerCall, translates
from gemsc.importers.sheet import Symbol, flat_pads, layer_class, one_number, slices
from gemsc.importers.weight import Array, constant

# zeros before and after, for each axis of an image
Pads = Sequence[tuple[int, int]]


def image(call: LayerCall) -> tuple[Symbol, bool]:
    """Return a layer's input with its channels first, and whether Keras has them last.

    A layer of data_format "channels_first" has its values as PyTorch has them.
    """
    if call.config.get("data_format") == "channels_first":
        return call.last(), False
    return call.first(), True


def per_axis(value: Any, count: int) -> tuple[int, ...]:
    """Return a setting for each axis: of one number, or of a list of them."""
    values = [value] * count if isinstance(value, int) else list(value)
    if len(values) != count or not all(type(v) is int and v >= 0 for v in values):
        raise ValueError(f"{value!r:.40} for {count} axes")
    return tuple(values)


def pads_of(
    call: LayerCall,
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilation: Sequence[int],
) -> Pads:
    """Return the padding of a layer in numbers.

    That of 'same' is for ceil(n / s) windows, with an odd zero at the end.

    Raises:
        GemscError: Keras has no such padding.
    """
    match call.config["padding"]:
        case "valid":
            return [(0, 0)] * len(sizes)
        case "same":
            axes = zip(sizes, kernel, strides, dilation, strict=True)
            totals = [(-(-n // s) - 1) * s + d * (k - 1) + 1 - n for n, k, s, d in axes]
            return [(max(t, 0) // 2, max(t + 1, 0) // 2) for t in totals]
        case "causal" if len(sizes) == 1 and "Conv" in call.layer.kind:
            return [(dilation[0] * (kernel[0] - 1), 0)]
    raise call.refuse(f"has padding={call.config['padding']!r:.40}")


def padded(call: LayerCall, x: Symbol, pads: Pads, value: str = "") -> Symbol:
    """Return an image with zeros, or another value, around it; of none, as it is."""
    if not any(before or after for before, after in pads):
        return x
    filled = f', "constant", {value}' if value else ""
    text = f"F.pad({x}, {flat_pads(pads)}{filled})"
    return call.sheet.line(f"{call.layer.name}_pad", text)


# ----------------------------------------------------------------------------- borders


@translates("ZeroPadding1D", "ZeroPadding2D", "ZeroPadding3D")
def _zeros(call: LayerCall) -> Laid:
    x, first = image(call)
    pads = _borders(call.config["padding"], len(x.shape) - 2)
    sizes = one_number(flat_pads(pads))
    name = call.add(lambda: layer_class("ZeroPad", len(pads))(sizes))
    return call.gives(f"{name}({x})", first=first)


@translates("Cropping1D", "Cropping2D", "Cropping3D")
def _cropping(call: LayerCall) -> Laid:
    x, first = image(call)
    crops = _borders(call.config["cropping"], len(x.shape) - 2)
    return call.gives(f"{x}{slices(crops)}", first=first)


def _borders(value: Any, axes: int) -> Pads:
    """Return what is before and after each axis: of 1, of [1, 2], of [[1, 2], 3]."""
    if isinstance(value, int):
        value = [value] * axes
    if axes == 1 and len(value) == 2:
        value = [value]
    if len(value) != axes:
        raise ValueError(f"{value!r:.40} for {axes} axes")
    return [(before, after) for before, after in (per_axis(v, 2) for v in value)]


@translates("SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D")
def _spatial_dropout(call: LayerCall) -> Laid:
    rate = float(call.config["rate"])
    if rate == 0:
        return call.inputs[0]
    x, first = image(call)
    name = call.add(lambda: layer_class("Dropout", len(x.shape) - 2)(rate))
    return call.gives(f"{name}({x})", first=first)


# ------------------------------------------------------------------------------- pools


_POOLS = [f"{kind}Pooling{n}D" for kind in ("Average", "Max") for n in (1, 2, 3)]


@translates(*_POOLS)
def _pool(call: LayerCall) -> Laid:
    """Zeros that pad count for nothing: a mean is of what is in the image."""
    x, first = image(call)
    axes, is_mean = len(x.shape) - 2, call.layer.kind.startswith("Average")
    kernel = per_axis(call.config["pool_size"], axes)
    strides = per_axis(call.config["strides"] or kernel, axes)
    pads = pads_of(call, x.shape[2:], kernel, strides, [1] * axes)
    settings, end = _own_padding(x.shape[2:], kernel, strides, pads), ""
    if settings is None:
        settings = {}
        if is_mean:
            share = _share(x.shape[2:], kernel, strides, pads)
            name = f"{call.layer.name}_share"
            weight = constant(share)
            end = f" / {call.sheet.tensor(name, share.shape, weight, trained=False)}"
        x = padded(call, x, pads, "" if is_mean else "-torch.inf")
    elif is_mean and settings:
        settings["count_include_pad"] = False
    settings["padding"] = one_number(settings.get("padding", (0,)))
    make = layer_class("AvgPool" if is_mean else "MaxPool", axes)
    module = make(one_number(kernel), one_number(strides), **settings)
    # a call with images of another size may need another one
    known = call.layer.added.values()
    same = (t for t in known if repr(call.sheet.empty(t)) == repr(module))
    text = next(same, "") or call.sheet.layer(call.layer.name, module)
    call.layer.added[text] = text
    return call.gives(f"{text}({x}){end}", first=first)


def _own_padding(
    sizes: Sequence[int], kernel: Sequence[int], strides: Sequence[int], pads: Pads
) -> dict[str, Any] | None:
    """Return the settings of a pool that pads so by itself, None if there are none.

    It pads as much after the image as before; with ceil_mode there are further windows
    at the end, as long as they begin in what it pads.
    """
    before = tuple(pair[0] for pair in pads)
    settings = {"padding": before} if any(before) else {}
    wanted = [
        (n + b + a - k) // s + 1
        for n, k, s, (b, a) in zip(sizes, kernel, strides, pads, strict=True)
    ]
    for ceil in (False, True):
        counts = [
            _count(n, k, s, b, ceil)
            for n, k, s, b in zip(sizes, kernel, strides, before, strict=True)
        ]
        if counts == wanted:
            return {**settings, "ceil_mode": True} if ceil else settings
    return None


def _count(n: int, k: int, s: int, pad: int, ceil: bool) -> int:
    count = (n + 2 * pad - k + (s - 1 if ceil else 0)) // s + 1
    return count - (ceil and (count - 1) * s >= n + pad)


def _share(
    sizes: Sequence[int], kernel: Sequence[int], strides: Sequence[int], pads: Pads
) -> Array:
    """Return which share of each window is in the image."""
    share: Array = np.ones((1, 1), np.float32)
    for n, k, s, (before, after) in zip(sizes, kernel, strides, pads, strict=True):
        starts = np.arange((n + before + after - k) // s + 1) * s - before
        inside = np.minimum(starts + k, n) - np.maximum(starts, 0)
        share = share[..., None] * (inside / k).astype(np.float32)
    return share


# -------------------------------------------------------------------- whole images


def _global(method: str, call: LayerCall) -> Laid:
    x, first = image(call)
    axes = tuple(range(2, len(x.shape)))
    keep = ", keepdim=True" if call.config.get("keepdims") else ""
    return call.gives(f"{x}.{method}({axes}{keep})", first=first)


def _adaptive(kind: str, call: LayerCall) -> Laid:
    x, first = image(call)
    axes = len(x.shape) - 2
    sizes = one_number(per_axis(call.config["output_size"], axes))
    name = call.add(lambda: layer_class(kind, axes)(sizes))
    return call.gives(f"{name}({x})", first=first)


for _axes in ("1D", "2D", "3D"):
    translates(f"GlobalMaxPooling{_axes}")(partial(_global, "amax"))
    translates(f"GlobalAveragePooling{_axes}")(partial(_global, "mean"))
    translates(f"AdaptiveMaxPooling{_axes}")(partial(_adaptive, "AdaptiveMaxPool"))
    translates(f"AdaptiveAveragePooling{_axes}")(partial(_adaptive, "AdaptiveAvgPool"))


# --------------------------- images of another size: by layers of PyTorch, or matrices


@translates("UpSampling1D", "UpSampling2D", "UpSampling3D")
def _up(call: LayerCall) -> Laid:
    x, first = image(call)
    factors = per_axis(call.config["size"], len(x.shape) - 2)
    kind = call.config.get("interpolation", "nearest")
    if kind == "nearest" or (kind == "bilinear" and len(factors) == 2):
        scale = one_number(tuple(map(float, factors)))
        return call.gives(_upsampled(call, x, kind, scale_factor=scale), first=first)
    sizes = [n * factor for n, factor in zip(x.shape[2:], factors, strict=True)]
    return call.gives(_by_matrices(call, x, sizes, kind, antialias=False), first=first)


@translates("Resizing")
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
    return call.gives(_upsampled(call, x, mode, size=sizes), first=first)


def _upsampled(call: LayerCall, x: Symbol, mode: str, **settings: Any) -> str:
    if mode == "bilinear":
        settings["align_corners"] = False
    return f"{call.add(lambda: nn.Upsample(mode=mode, **settings))}({x})"


def _of_ratio(call: LayerCall, x: Symbol, sizes: Sequence[int]) -> Symbol:
    """Crop an image, or pad it, to the ratio of another size."""
    height, width = x.shape[2:]
    as_high, as_wide = width * sizes[0] / sizes[1], height * sizes[1] / sizes[0]
    if call.config.get("crop_to_aspect_ratio"):
        wanted = max(min(height, int(as_high)), 1), max(min(width, int(as_wide)), 1)
        over = [n - w for n, w in zip((height, width), wanted, strict=True)]
        crops = [(size // 2, size - size // 2) for size in over]
        if any(size for pair in crops for size in pair):
            return call.sheet.line(f"{call.layer.name}_crop", f"{x}{slices(crops)}")
    elif call.config.get("pad_to_aspect_ratio"):
        further = max(height, int(as_high)) - height, max(width, int(as_wide)) - width
        fill = float(call.config.get("fill_value", 0.0))
        return padded(call, x, [(size // 2, size // 2) for size in further], repr(fill))
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
