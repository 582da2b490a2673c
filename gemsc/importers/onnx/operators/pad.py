"""Pad: by PyTorch's own padding where it does the same, else by a table of places."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gemsc.importers.onnx.node import Node, Operator
from gemsc.importers.onnx.operators.text import at, axis_of, buffer, number
from gemsc.importers.sheet import Symbol
from gemsc.importers.weight import Array

_MODES = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}


def _pad(node: Node) -> Symbol:
    x = node.value(0)
    before, after = _sizes(node, len(x.shape))
    mode = node.attribute("mode", "constant")
    if not any((*before, *after)):
        return x
    pairs = list(zip(before, after, strict=True))
    while pairs and pairs[0] == (0, 0):
        pairs.pop(0)
    sizes = tuple(size for pair in reversed(pairs) for size in pair)
    if mode == "constant":
        value = _value(node)
        fill = "" if value in ("0", "0.0", "False") else f", value={value}"
        return node.gives(f"F.pad({x}, {sizes}{fill})")
    if mode not in _MODES:
        raise node.refuse(f"pads by {mode!r}")
    if _is_torchs(x, before, after, mode):
        spatial = list(zip(before[2:], after[2:], strict=True))
        sizes = tuple(size for pair in reversed(spatial) for size in pair)
        return node.gives(f'F.pad({x}, {sizes}, mode="{_MODES[mode]}")')
    text = x.text
    for axis, (low, high) in enumerate(zip(before, after, strict=True)):
        if low or high:
            places = _places(node, x.shape[axis], low, high, mode)
            text += at(axis, buffer(node, "index", places).text)
    return node.gives(text)


def _sizes(node: Node, rank: int) -> tuple[list[int], list[int]]:
    """Return the padding before and after each axis; negative ones cut."""
    pads = [int(size) for size in node.settings("pads", 1)]
    named = node.setting("axes", 3)
    named = list(range(rank)) if named is None else named
    places = [axis_of(node, axis, rank) for axis in named]
    if len(pads) != 2 * len(places):
        raise node.refuse(f"has {len(pads)} sizes for {len(places)} axes")
    before, after = [0] * rank, [0] * rank
    for place, axis in enumerate(places):
        before[axis] = pads[place]
        after[axis] = pads[place + len(places)]
    return before, after


def _value(node: Node) -> str:
    if node.opset < 11:
        return number(node.attribute("value", 0.0))
    found = node.array(2)
    return "0" if found is None else number(found.reshape(-1)[0].item())


def _is_torchs(x: Symbol, before: list[int], after: list[int], mode: str) -> bool:
    """Return whether PyTorch has this padding: of a picture's last axes."""
    if not 3 <= len(x.shape) <= 5 or any((*before[:2], *after[:2])):
        return False
    most = [n - (mode == "reflect") for n in x.shape[2:]]
    if mode == "edge":
        most = [max(before + after)] * len(most)
    fits = all(
        min(b, a) >= 0 and max(b, a) <= n
        for b, a, n in zip(before[2:], after[2:], most, strict=True)
    )
    return fits and x.tensor.is_floating_point()


def _places(node: Node, size: int, low: int, high: int, mode: str) -> Array:
    """Return which element of an axis stands in each place of the padded one."""
    try:
        cut = np.arange(size)[max(-low, 0) : size - max(-high, 0)]
        sides = (max(low, 0), max(high, 0))
        places: Array = np.pad(cut, sides, mode=mode)  # type: ignore[call-overload]
        return places
    except ValueError as why:
        raise node.refuse(f"pads an axis of {size} by {low} and {high}") from why


PADS: Mapping[str, Operator] = {"Pad": _pad}
