"""Losses over values that are cut: tile sums, divided by the count of all tiles."""

from __future__ import annotations

import operator
from math import prod

from torch import Tensor, fx

from gemsc.ir import meta
from gemsc.passes.spatial.calls import Call
from gemsc.passes.spatial.cuts import Axes
from gemsc.passes.spatial.emit import call_again, on_tiles
from gemsc.passes.spatial.lowering import Local, Lowering, Refused
from gemsc.runtime import tiles

__all__ = ["cross_entropy", "elementwise_loss"]


def elementwise_loss(low: Lowering, call: Call) -> Local:
    """Add up the tiles' sums of a loss that has one term per element."""
    reduction = _reduction(call)
    axes, inputs = _alike(low, call)
    weights = [call.get(name) for name in ("weight", "pos_weight")]
    if any(isinstance(w, Tensor) and w.dim() > 0 for w in weights):
        raise Refused("it has weights")
    for weight in weights:
        if isinstance(weight, fx.Node):
            raise Refused("it has weights")
    if reduction == "none":
        return call_again(low, call, axes, inputs)
    changes = {} if reduction == "sum" else {"reduction": "sum"}
    partial = call_again(low, call, None, inputs, changes, partial=True)
    among = low.among(axis for axis in axes if axis is not None)
    total = low.all_reduce(call.node, partial.node, None, among)
    if reduction == "sum":
        return total
    count = prod(low.shape(call.input))
    args = (total.node, count)
    return low.create(call.node, "call_function", operator.truediv, args, {}, None)


def _reduction(call: Call) -> str:
    if call.get("size_average") is not None or call.get("reduce") is not None:
        raise Refused("it uses size_average or reduce")
    return str(call.get("reduction", "mean"))


def _alike(low: Lowering, call: Call) -> tuple[Axes, dict[fx.Node, fx.Node]]:
    """Return output and target, cut alike."""
    output, target = call["input"], call["target"]
    if low.shape(output) != low.shape(target):
        raise Refused("output and target have different shapes")
    axes = low.axes(output) or low.axes(target)
    assert axes is not None
    return axes, {node: low.spread(node, axes) for node in (output, target)}


def cross_entropy(low: Lowering, call: Call) -> Local:
    """Add up the tiles' pixels and their weights in one message."""
    reduction = _reduction(call)
    output, target = call["input"], call["target"]
    axes = low.axes(output)
    if axes is None or any(axis is not None for axis in axes[:2]):
        raise Refused("it is cut along batch or classes")
    low.require_all_axes(axes)
    pixels = axes
    if not meta.spec(target).dtype.is_floating_point:
        pixels = (axes[0], *axes[2:])
    inputs = {
        output: low.get(output).node,
        target: low.spread(target, pixels),
    }
    if reduction == "none":
        return call_again(low, call, (axes[0], *axes[2:]), inputs)
    args = (low.here, *inputs.values())
    return on_tiles(low, call, tiles.cross_entropy, args, None)
