"""Normalization and dropout: what needs the other tiles, or their random numbers."""

from __future__ import annotations

from typing import Any

from torch import fx

from gemsc.ir import tile_ops
from gemsc.passes.spatial.calls import Call
from gemsc.passes.spatial.cuts import Axes
from gemsc.passes.spatial.emit import alike, call_again
from gemsc.passes.spatial.lowering import Local, Lowering, Refused

__all__ = [
    "batch_norm",
    "channel_dropout",
    "dropout",
    "group_norm",
    "instance_norm",
    "layer_norm",
]


def _axes(low: Lowering, call: Call) -> Axes:
    axes = low.axes(call.input)
    assert axes is not None
    return axes


def _channels_whole(low: Lowering, call: Call) -> Axes:
    axes = _axes(low, call)
    if any(axis is not None for axis in axes[:2]):
        raise Refused("it is cut along batch or channels")
    low.require_all_axes(axes)
    return axes


_WITHOUT_STATE = ("group_norm", "instance_norm", "layer_norm")


def _with_all_tiles(
    low: Lowering,
    call: Call,
    function: Any,
    layer_method: str,
    *extra: Any,
    names: tuple[str, ...] = (),
    keywords: dict[str, Any] | None = None,
) -> Local:
    """Add the call as one that works with all tiles.

    A layer becomes a TileLayer; a function, and a layer that is called elsewhere too,
    one of `tile_ops`, with the arguments that were given under `names`.
    """
    axes, node = _axes(low, call), call.node
    part = alike(low, call, call.input, axes)
    is_shared = call.layer is not None and low.layers.is_shared(str(node.target))
    if is_shared and call.kind in _WITHOUT_STATE:
        settings = {name: call[name] for name in names if name in call.arguments}
        for name in ("weight", "bias"):
            if (parameter := low.parameter(node, name)) is not None:
                settings[name] = parameter
        kwargs = {**settings, **(keywords or {})}
        return low.create(node, "call_function", function, (part,), kwargs, axes)
    if call.layer is not None:
        low.layers.with_all_tiles(node, layer_method, *extra)
        return low.create(node, "call_module", node.target, (part,), {}, axes)
    given = {
        name: call.arguments[name]
        for name in names
        if call.arguments.get(name) is not None
    }
    kwargs = {**fx.node.map_arg(given, low.whole), **(keywords or {})}
    return low.create(node, "call_function", function, (part,), kwargs, axes)


def batch_norm(low: Lowering, call: Call) -> Local:
    """Normalize by the statistics of all tiles."""
    _channels_whole(low, call)
    return _with_all_tiles(
        low,
        call,
        tile_ops.functional_batch_norm,
        "batch_norm",
        *_own(low, call),
        names=(
            "running_mean",
            "running_var",
            "weight",
            "bias",
            "training",
            "momentum",
            "eps",
        ),
        keywords=_own_keyword(low, call)
        if call.layer is not None or "running_mean" in _given(call)
        else {"running_mean": None, "running_var": None, **_own_keyword(low, call)},
    )


def _own(low: Lowering, call: Call) -> tuple[Any, ...]:
    """Return where the tile's own rows are, if it computes more: these count once."""
    own = low.own_rows(call.node, _axes(low, call))
    return () if own is None else (own,)


def _own_keyword(low: Lowering, call: Call) -> dict[str, Any]:
    return dict(zip(("own",), _own(low, call), strict=False))


def _given(call: Call) -> set[str]:
    return {name for name, value in call.arguments.items() if value is not None}


def group_norm(low: Lowering, call: Call) -> Local:
    """Normalize each group of channels over all tiles."""
    _channels_whole(low, call)
    return _with_all_tiles(
        low,
        call,
        tile_ops.functional_group_norm,
        "group_norm",
        *_own(low, call),
        names=("num_groups", "weight", "bias", "eps"),
        keywords=_own_keyword(low, call),
    )


def instance_norm(low: Lowering, call: Call) -> Local:
    """Normalize each channel over all tiles."""
    _channels_whole(low, call)
    if call.get("track_running_stats", False) or call.get("running_mean") is not None:
        raise Refused("it keeps running statistics")
    return _with_all_tiles(
        low,
        call,
        tile_ops.functional_instance_norm,
        "instance_norm",
        *_own(low, call),
        names=("weight", "bias", "eps"),
        keywords=_own_keyword(low, call),
    )


def layer_norm(low: Lowering, call: Call) -> Local:
    """Normalize the last dimensions, over all tiles if they are cut."""
    axes = _axes(low, call)
    shape = tuple(call["normalized_shape"])
    last = axes[len(axes) - len(shape) :]
    if all(axis is None for axis in last):
        return call_again(low, call, axes, {call.input: low.get(call.input).node})
    if any(axis is not None for axis in axes[: len(axes) - len(shape)]):
        raise Refused("some of the dimensions that are cut are normalized")
    low.require_all_axes(axes)
    box = low.result(call.node, axes)[low.place][len(axes) - len(shape) :]
    return _with_all_tiles(
        low,
        call,
        tile_ops.functional_layer_norm,
        "layer_norm",
        box,
        names=("weight", "bias", "eps"),
        keywords={"box": box},
    )


def dropout(low: Lowering, call: Call) -> Local:
    """Multiply by the tile's part of the mask of the whole value."""
    shape, axes = low.shape(call.input), _axes(low, call)
    box = low.result(call.node, axes)[low.place]
    return _with_all_tiles(
        low,
        call,
        tile_ops.functional_dropout,
        "dropout",
        shape,
        box,
        names=("p", "training"),
        keywords={"shape": shape, "box": box},
    )


def channel_dropout(low: Lowering, call: Call) -> Local:
    """Draw one number per channel: the same on all tiles, which have the same seed."""
    axes = _channels_whole(low, call)
    return call_again(low, call, axes, {call.input: alike(low, call, call.input, axes)})
