"""Write a call again for one tile: the same call with other inputs and settings."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx

from gemsc.base.boxes import Box, first_cut, shape_of
from gemsc.base.parts import Part
from gemsc.ir.operators.calls import Call
from gemsc.ir.operators.table import operator_of
from gemsc.passes.spatial.cuts import Axes
from gemsc.passes.spatial.lowering import Lowering
from gemsc.passes.spatial.values import Local
from gemsc.runtime import tiles


def add_call(
    low: Lowering,
    like: fx.Node,
    target: str | Callable[..., Any],
    *args: Any,
    axes: Axes | None = None,
    partial: bool = False,
    **settings: Any,
) -> Local:
    """Add a call of a function, or of a method by its name, that stands for `like`.

    `partial`: what it gives is not yet the tile's part of the result.
    """
    op = "call_method" if isinstance(target, str) else "call_function"
    return low.create(like, op, target, args, settings, axes, partial=partial)


def call_again(
    low: Lowering,
    call: Call,
    axes: Axes | None,
    inputs: dict[fx.Node, fx.Node],
    changes: dict[str, Any] | None = None,
    *,
    partial: bool = False,
) -> Local:
    """Add the call with the given inputs; other tensors whole; settings changed.

    A layer whose settings change is replaced by a copy. What stands among the
    positional arguments changes in its place. `partial`: what the tile computes is not
    yet its part of the result. An addend has no bias.
    """
    given, missing = call.arguments, object()
    asked = (changes or {}).items()
    changed = {n: v for n, v in asked if given.get(n, missing) != v} | call.groups
    as_function = call.kind == "linear" or operator_of(call).settings
    if low.is_addend and as_function:
        source = inputs[call.input]
        return _as_function(low, call, axes, source, changed, partial=True)
    for source in call.node.all_input_nodes:
        if source not in inputs:
            inputs[source] = low.whole(source)
    args = fx.node.map_arg(call.node.args, inputs.__getitem__)
    kwargs = fx.node.map_arg(call.node.kwargs, inputs.__getitem__)
    target = call.node.target
    settings: dict[str, Any] = {}
    if call.layer is not None:
        settings = {n: v for n, v in changed.items() if n not in call.names}
    if settings and low.layers.is_shared(str(target)) and as_function:
        source = inputs[call.input]
        return _as_function(low, call, axes, source, settings, partial=partial)
    if settings:
        low.layers.change(call.node, settings)
    places = {name: i for i, name in enumerate(call.names[: len(args)])}
    args = tuple(
        changed.get(call.names[i], argument) if i < len(call.names) else argument
        for i, argument in enumerate(args)
    )
    others = {n: v for n, v in changed.items() if n not in places | settings}
    kwargs = {**kwargs, **others}
    return low.create(
        call.node, call.node.op, target, args, kwargs, axes, partial=partial
    )


def _as_function(
    low: Lowering,
    call: Call,
    axes: Axes | None,
    source: fx.Node,
    changed: dict[str, Any],
    *,
    partial: bool,
) -> Local:
    """Add the function of a layer that is called elsewhere with other settings."""
    parameters = [
        _given(low, call, name)
        for name in (("weight",) if low.is_addend else ("weight", "bias"))
        if hasattr(call.layer, name) or name in call.arguments
    ]
    kwargs = {
        name: changed.get(name, call[name])
        for name in operator_of(call).settings
        if name in call.arguments
    }
    if call.kind in ("conv", "conv_transpose"):
        kwargs = {n: v for n, v in kwargs.items() if not _is_default(n, v)}
    function = getattr(F, f"{call.kind}{call.rank}d" if call.detail else call.kind)
    inputs = (source, *parameters)
    return add_call(
        low, call.node, function, *inputs, axes=axes, partial=partial, **kwargs
    )


def _is_default(name: str, value: Any) -> bool:
    """Whether a setting of a convolution is what it is if it is not given."""
    default = int(name in ("stride", "dilation", "groups"))
    values = value if isinstance(value, tuple | list) else [value]
    return all(entry == default for entry in values)


def on_tiles(
    low: Lowering,
    call: Call,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    axes: Axes | None,
    parts: tuple[Part, ...] = (),
    **settings: Any,
) -> Local:
    """Add an operation on tiles with these arguments, and settings by name.

    Under the names of its other parameters it gets what the call was given: settings
    other than the default, tensors as a whole, and those of the call's layer.
    """
    kwargs: dict[str, Any] = {}
    in_order = True
    for parameter in list(inspect.signature(function).parameters.values())[len(args) :]:
        name = parameter.name
        value = settings[name] if name in settings else _given(low, call, name)
        if value is None or value == parameter.default:
            in_order = False
            continue
        in_order &= parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        in_order &= isinstance(value, fx.Node) or parameter.default is parameter.empty
        if in_order:
            args = (*args, value)
        else:
            kwargs[name] = value
    make = low.create
    return make(call.node, "call_function", function, args, kwargs, axes, parts=parts)


def _given(low: Lowering, call: Call, name: str) -> Any:
    """Return what a call was given, or has from its layer, as an operation takes it."""
    if isinstance(getattr(call.layer, name, None), Tensor):
        return low.parameter(call.node, f"{call.node.target}.{name}")
    value = call.get(name)
    return low.whole(value) if isinstance(value, fx.Node) else value


def masked(
    low: Lowering,
    call: Call,
    source: fx.Node,
    shape: tuple[int, ...],
    boxes: Sequence[Box],
    axes: Axes | None,
    parts: tuple[Part, ...] = (),
) -> Local:
    """Multiply by the rank's box of a dropout mask of a shape, or of its channels.

    A rank whose box is all of a dimension that is cut, as a wide halo may be, is told
    so: it draws as the others do.
    """
    if call.kind == "channel_dropout":
        num_axes = len(shape) - 2
        shape = (*shape[:2], *(1,) * num_axes)
        boxes = [(*box[:2], *((0, 1),) * num_axes) for box in boxes]
    box = boxes[low.place]
    settings: dict[str, Any] = {"shape": shape, "box": box, "draw": low.draw(call.node)}
    cut = [first_cut(shape, box) for box in boxes if all(shape_of(box))]
    along = min((dim for dim in cut if dim is not None), default=None)
    if first_cut(shape, box) != along:
        settings["along"] = along
    if call.layer is not None:
        settings["training"] = low.trains(call.node)
    return on_tiles(low, call, tiles.dropout, (source,), axes, parts, **settings)


def alike(low: Lowering, call: Call, source: fx.Node, axes: Axes) -> fx.Node:
    """Return the node of an input's rows that the tile computes of the result.

    Along dimensions that are not cut all of the input is taken.
    """
    return meeting(low, source, axes, low.result(call.node, axes))


def meeting(
    low: Lowering, source: fx.Node, axes: Axes, boxes: Iterable[Box]
) -> fx.Node:
    """Return the node of an input's rows that boxes have; all where it is not cut."""
    wanted = [
        tuple(
            (0, size) if axis is None else interval
            for size, axis, interval in zip(low.shape(source), axes, box, strict=True)
        )
        for box in boxes
    ]
    return low.part(source, wanted)


def crop(
    low: Lowering,
    call: Call,
    local: Local,
    rows: list[tuple[int, int]],
    *,
    partial: bool = False,
) -> Local:
    """Drop (before, after) rows of the last dimensions of a tile, if any.

    It is the value of the call, or where it is `partial` one before it.
    """
    if not any(before or after for before, after in rows):
        return local
    index: list[Any] = [...]
    for before, after in rows:
        index.append(slice(before or None, -after if after else None))
    args = (local.node, tuple(index))
    how: dict[str, Any] = {"axes": local.axes, "partial": partial}
    return add_call(low, call.node, operator.getitem, *args, **how)


def weighted_sum(
    low: Lowering,
    call: Call,
    local: Local,
    over: Axes,
    axes: Axes | None = None,
) -> Local:
    """Add up a value of each tile, or of those `over` axes, times its share.

    That is its share of the input; the sum has `axes`.
    """
    share = low.share(low.shape(call.input), over)
    weighted = add_call(low, call.node, operator.mul, local.node, share, partial=True)
    return low.all_reduce(call.node, weighted.node, axes, low.among(over))


def spread_beside(low: Lowering, node: fx.Node, axes: Axes) -> fx.Node:
    """Return what of a value meets others that are cut like this; of size 1, all."""
    pairs = zip(low.shape(node), axes, strict=True)
    return low.spread(node, tuple(a if size > 1 else None for size, a in pairs))
