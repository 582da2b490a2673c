"""Windows over images: sizes, and the padding that Keras calls 'same'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gemsc.importers.keras.layer import LayerCall
from gemsc.importers.sheet import Symbol

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


def same_pads(
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilation: Sequence[int],
) -> Pads:
    """Return the padding of 'same': ceil(n / s) windows, the odd zero at the end."""
    pads = []
    for n, k, s, d in zip(sizes, kernel, strides, dilation, strict=True):
        total = max((-(-n // s) - 1) * s + d * (k - 1) + 1 - n, 0)
        pads.append((total // 2, total - total // 2))
    return pads


def padded(call: LayerCall, x: Symbol, pads: Pads, value: str = "") -> Symbol:
    """Return an image with zeros, or another value, around it; of none, as it is."""
    if not any(before or after for before, after in pads):
        return x
    filled = f', "constant", {value}' if value else ""
    text = f"F.pad({x}, {flat_pads(pads)}{filled})"
    return call.sheet.line(f"{call.layer.name}_pad", text)


def one_number(values: Sequence[Any]) -> Any:
    """Return 3 for (3, 3): as people write it."""
    return values[0] if len(set(values)) == 1 else tuple(values)


def slices(crops: Pads) -> str:
    """Return the text that takes something off each axis of an image."""
    texts = [f"{before or ''}:{-after if after else ''}" for before, after in crops]
    return f"[:, :, {', '.join(texts)}]"


def flat_pads(pads: Pads) -> tuple[int, ...]:
    """Return padding as PyTorch has it: the last axis first."""
    return tuple(size for pair in reversed(pads) for size in pair)
