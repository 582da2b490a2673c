"""Normalization and dropout: what needs the other tiles, or their random numbers."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from gemsc.base.boxes import everything
from gemsc.ir.operators.calls import Call
from gemsc.passes.spatial.cuts import Axes, are_samples, or_whole
from gemsc.passes.spatial.emit import alike, call_again, masked, on_tiles
from gemsc.passes.spatial.lowering import Lowering
from gemsc.passes.spatial.values import Local, Refused
from gemsc.runtime import tiles


def _channels_whole(low: Lowering, call: Call) -> Axes:
    axes = low.cut_axes(call.input)
    if any(axis is not None for axis in axes[:2]):
        raise Refused("it is cut along batch or channels")
    return axes


def _normalized(low: Lowering, call: Call, function: Any, **settings: Any) -> Local:
    axes = low.cut_axes(call.input)
    rows = low.own_rows(call.node, axes)  # if the tile computes more: these count once
    if rows is not None:
        settings["own"] = rows
    args = (low.here, alike(low, call, call.input, axes))
    settings["among"] = low.among(axes)
    return on_tiles(low, call, function, args, axes, **settings)


def batch_norm(low: Lowering, call: Call) -> Local:
    """Normalize by the statistics of all tiles."""
    axes = low.cut_axes(call.input)
    if len(axes) > 1 and axes[1] is not None:
        raise Refused("it is cut along channels")
    if call.layer is None:
        return _normalized(low, call, tiles.functional_batch_norm)
    return _normalized(low, call, tiles.batch_norm, layer=low.layer(call.node))


def group_norm(low: Lowering, call: Call) -> Local:
    """Normalize each group of channels over all tiles."""
    _channels_whole(low, call)
    return _normalized(low, call, tiles.group_norm)


def instance_norm(low: Lowering, call: Call) -> Local:
    """Normalize each channel over all tiles."""
    if call.get("track_running_stats", False) or call.get("running_mean") is not None:
        raise Refused("it keeps running statistics")
    axes, channels = low.cut_axes(call.input), low.shape(call.input)[1]
    alone: Any = getattr(call.layer, "_get_no_batch_dim", int)
    if are_samples(axes) and len(axes) != alone():
        # as groups: for a single sample PyTorch 2.13 gives wrong gradients
        args = (low.get(call.input).node, channels)
        return on_tiles(low, call, F.group_norm, args, axes)
    _channels_whole(low, call)
    return _normalized(low, call, tiles.instance_norm)


def last_norm(low: Lowering, call: Call) -> Local:
    """Normalize the last dimensions; those of a layer norm over all tiles."""
    axes, shape = low.cut_axes(call.input), call["normalized_shape"]
    first = len(axes) - (1 if isinstance(shape, int) else len(tuple(shape)))
    if or_whole(axes[first:]) is None:
        return call_again(low, call, axes, {call.input: low.get(call.input).node})
    if call.kind == "rms_norm" or or_whole(axes[:first]) is not None:
        raise Refused("some of the dimensions that are cut are normalized")
    box = low.result(call.node, axes)[low.place][first:]
    args = (low.here, alike(low, call, call.input, axes), box)
    return on_tiles(low, call, tiles.layer_norm, args, axes, among=low.among(axes))


def dropout(low: Lowering, call: Call) -> Local:
    """Multiply by the tile's part of the mask of the whole value."""
    axes = low.cut_axes(call.input)
    boxes = low.boxes(call.node, axes)
    source = alike(low, call, call.input, axes)
    return masked(low, call, source, low.shape(call.input), boxes, axes)


def channel_dropout(low: Lowering, call: Call) -> Local:
    """Draw one number per channel: the same on all tiles, which have the same seed.

    Where samples or channels are cut each rank takes its own of the numbers of all.
    """
    axes, shape = low.cut_axes(call.input), low.shape(call.input)
    boxes, source = low.boxes(call.node, axes), alike(low, call, call.input, axes)
    if boxes[low.place][:2] == everything(shape)[:2]:
        return call_again(low, call, axes, {call.input: source})
    if axes[1] is not None or call.detail != str(len(shape) - 2):
        raise Refused("it draws numbers for all channels")
    return masked(low, call, source, shape, boxes, axes)
