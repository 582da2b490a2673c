"""Pools: windows, and whole images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from gemsc.importers.keras.layer import Laid, LayerCall, Translator
from gemsc.importers.keras.windows import (
    Pads,
    image,
    one_number,
    padded,
    per_axis,
    same_pads,
)
from gemsc.importers.sheet import Symbol
from gemsc.importers.weight import Array, constant

_MAX: Sequence[Any] = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_MEAN: Sequence[Any] = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)


def _max(call: LayerCall) -> Laid:
    x, first = image(call)
    kernel, strides, pads = _windows(call, x)
    settings = _own_padding(x.shape[2:], kernel, strides, pads)
    if settings is None:
        settings, x = {}, padded(call, x, pads, "-torch.inf")
    name = _pool(call, _MAX, kernel, strides, settings)
    return call.gives(f"{name}({x})", first=first)


def _mean(call: LayerCall) -> Laid:
    """Zeros that pad count for nothing: the mean is of what is in the image."""
    x, first = image(call)
    kernel, strides, pads = _windows(call, x)
    settings = _own_padding(x.shape[2:], kernel, strides, pads)
    if settings is not None:
        if any(before for before, _ in pads) or settings.get("ceil_mode"):
            settings["count_include_pad"] = False
        name = _pool(call, _MEAN, kernel, strides, settings)
        return call.gives(f"{name}({x})", first=first)
    share = _share(x.shape[2:], kernel, strides, pads)
    x = padded(call, x, pads)
    name = _pool(call, _MEAN, kernel, strides, {})
    part = call.sheet.tensor(
        f"{call.layer.name}_share", share.shape, constant(share), trained=False
    )
    return call.gives(f"{name}({x}) / {part}", first=first)


def _pool(
    call: LayerCall,
    kinds: Sequence[Any],
    kernel: Sequence[int],
    strides: Sequence[int],
    settings: Mapping[str, Any],
) -> str:
    """Add a pool; a call with images of another size may need another one."""
    sizes = {"padding": one_number(settings.get("padding", (0,)))}
    module = kinds[len(kernel) - 1](
        one_number(kernel), one_number(strides), **{**settings, **sizes}
    )
    for text in call.layer.added.values():
        if repr(call.sheet.empty(text)) == repr(module):
            return text
    text = call.sheet.layer(call.layer.name, module)
    call.layer.added[text] = text
    return text


def _windows(
    call: LayerCall, x: Symbol
) -> tuple[tuple[int, ...], tuple[int, ...], Pads]:
    axes = len(x.shape) - 2
    kernel = per_axis(call.config["pool_size"], axes)
    strides = per_axis(call.config["strides"] or kernel, axes)
    pads: Pads = [(0, 0)] * axes
    if call.config["padding"] == "same":
        pads = same_pads(x.shape[2:], kernel, strides, [1] * axes)
    elif call.config["padding"] != "valid":
        raise call.refuse(f"has padding={call.config['padding']!r:.40}")
    return kernel, strides, pads


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
        found = [
            _count(n, k, s, b, ceil)
            for n, k, s, b in zip(sizes, kernel, strides, before, strict=True)
        ]
        if found == wanted:
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


def _global(kind: str) -> Translator:
    def translate(call: LayerCall) -> Laid:
        x, first = image(call)
        axes = tuple(range(2, len(x.shape)))
        kept = bool(call.config.get("keepdims"))
        keep = ", keepdim=True" if kept else ""
        return call.gives(f"{x}.{kind}({axes}{keep})", first=first)

    return translate


def _adaptive(layers: Sequence[Any]) -> Translator:
    def translate(call: LayerCall) -> Laid:
        x, first = image(call)
        axes = len(x.shape) - 2
        sizes = one_number(per_axis(call.config["output_size"], axes))
        name = call.add(lambda: layers[axes - 1](sizes))
        return call.gives(f"{name}({x})", first=first)

    return translate


_ADAPTIVE_MEAN: Sequence[Any] = (
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
)
_ADAPTIVE_MAX: Sequence[Any] = (
    nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d,
)
POOL_LAYERS: Mapping[str, Translator] = {
    **{f"MaxPooling{d}D": _max for d in (1, 2, 3)},
    **{f"AveragePooling{d}D": _mean for d in (1, 2, 3)},
    **{f"GlobalMaxPooling{d}D": _global("amax") for d in (1, 2, 3)},
    **{f"GlobalAveragePooling{d}D": _global("mean") for d in (1, 2, 3)},
    **{f"AdaptiveMaxPooling{d}D": _adaptive(_ADAPTIVE_MAX) for d in (1, 2, 3)},
    **{f"AdaptiveAveragePooling{d}D": _adaptive(_ADAPTIVE_MEAN) for d in (1, 2, 3)},
}
