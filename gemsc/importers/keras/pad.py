"""Layers that add or take borders, and dropout of whole channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from gemsc.importers.keras.layer import Laid, LayerCall, Translator
from gemsc.importers.keras.windows import (
    Pads,
    flat_pads,
    image,
    one_number,
    per_axis,
    slices,
)

_PAD: Sequence[Any] = (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d)
_DROPOUT: Sequence[Any] = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def _zeros(call: LayerCall) -> Laid:
    x, first = image(call)
    pads = _borders(call.config["padding"], len(x.shape) - 2)
    make = _PAD[len(pads) - 1]
    name = call.add(lambda: make(one_number(flat_pads(pads))))
    return call.gives(f"{name}({x})", first=first)


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
    found = []
    for item in value:
        before, after = per_axis(item, 2)
        found.append((before, after))
    return found


def _spatial_dropout(call: LayerCall) -> Laid:
    rate = float(call.config["rate"])
    if rate == 0:
        return call.inputs[0]
    x, first = image(call)
    make = _DROPOUT[len(x.shape) - 3]
    name = call.add(lambda: make(rate))
    return call.gives(f"{name}({x})", first=first)


PAD_LAYERS: Mapping[str, Translator] = {
    **{f"ZeroPadding{d}D": _zeros for d in (1, 2, 3)},
    **{f"Cropping{d}D": _cropping for d in (1, 2, 3)},
    **{f"SpatialDropout{d}D": _spatial_dropout for d in (1, 2, 3)},
}
