"""RULES: how each kind of operation is lowered to tiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import getitem

from torch import fx

from gemsc.ir import meta
from gemsc.ir.mutation import elements
from gemsc.ir.opaque import opaque_of
from gemsc.ir.operators.calls import ALONG, Call, call_of
from gemsc.ir.operators.table import operator_of
from gemsc.passes.spatial import flattened
from gemsc.passes.spatial.lowering import Lowering
from gemsc.passes.spatial.rules import (
    norms,
    pooling,
    reductions,
    resizing,
    samples,
    shapes,
    windows,
)
from gemsc.passes.spatial.rules.attention import own_attention
from gemsc.passes.spatial.values import Local, Refused
from gemsc.runtime import tiles

RULES: dict[str, Callable[[Lowering, Call], Local]] = {
    "conv": windows.convolution,
    "conv_transpose": windows.transposed_convolution,
    "max_pool": pooling.max_pooling,
    "max_unpool": pooling.max_unpooling,
    "avg_pool": pooling.average_pooling,
    "lp_pool": pooling.lp_pooling,
    "adaptive_avg_pool": partial(resizing.adaptive_pooling, kind="avg"),
    "adaptive_max_pool": partial(resizing.adaptive_pooling, kind="max"),
    "interpolate": resizing.interpolation,
    "pixel_shuffle": resizing.pixel_shuffle,
    "pixel_unshuffle": resizing.pixel_unshuffle,
    "pad": windows.pad,
    "batch_norm": norms.batch_norm,
    "group_norm": norms.group_norm,
    "instance_norm": norms.instance_norm,
    **dict.fromkeys(("layer_norm", "rms_norm"), norms.last_norm),
    "dropout": norms.dropout,
    "channel_dropout": norms.channel_dropout,
    "channels": shapes.channels,
    "linear": flattened.linear,
    **dict.fromkeys(("addmm", "matmul", "einsum", "embedding"), samples.by_equation),
    "cat": shapes.concatenation,
    "stack": shapes.concatenation,
    **dict.fromkeys(ALONG, shapes.along),
    "cumsum": partial(reductions.along_tiles, function=tiles.cumsum),
    "narrow": shapes.narrow,
    "repeat": shapes.repeat,
    "roll": shapes.roll,
    "flip": shapes.flip,
    "softmax": partial(reductions.along_tiles, function=tiles.softmax),
    "log_softmax": partial(reductions.along_tiles, function=tiles.softmax, log=True),
    "mean": reductions.reduction,
    "sum": reductions.reduction,
    "amax": reductions.reduction,
    "amin": reductions.reduction,
    "max": reductions.extreme,
    "min": reductions.extreme,
    "var": reductions.reduction,
    "std": reductions.reduction,
    "loss": reductions.elementwise_loss,
    "cross_entropy": reductions.cross_entropy,
    "attention": own_attention,
}


def lower_call(low: Lowering, node: fx.Node, call: Call | None = None) -> Local:
    """Lower one node of a stage that is split; `call` is what it calls.

    Raises:
        Refused: its inputs must be gathered.
    """
    call = call or call_of(node, low.program.module)
    sources = elements(node)
    operator, is_cut = operator_of(call), any(low.axes(s) is not None for s in sources)
    if not is_cut and not (operator.cuts_again and low.pictures):
        return low.copy(node, None)
    if opaque_of(call.layer) is not None:
        raise Refused("its forward depends on data")
    if low.has_own_backward(node):
        _require_own_elements(low, node)
    held = [s for s in sources if low.flattened(s) is not None]
    if plain := {s: Local(low.whole(s), None) for s in held if low.axes(s) is None}:
        with low.instead(plain):
            return lower_call(low, node, call)
    if not held:
        return _by_rule(low, call)

    def as_held(low: Lowering, node: fx.Node) -> Local:
        flattened.check(low, call, elementwise=low.probe.is_pointwise(node))
        return _by_rule(low, call)

    local = low.tried(node, as_held)
    if isinstance(local, Local):
        return local
    with low.instead({source: flattened.in_rows(low, source) for source in held}):
        return lower_call(low, node, call)


def _by_rule(low: Lowering, call: Call) -> Local:
    node, operator = call.node, operator_of(call)
    if node.target is getitem:
        local = shapes.subscript(low, node)
        if local is not None:
            return local
    if call.kind in RULES:
        if not _has_tensor_input(call):
            raise Refused("its input is not a tensor")
        if not operator.any_operand and low.axes(call.input) is None:
            raise Refused("its first operand is whole, and another one is cut")
        return samples.by_sample(low, call) or RULES[call.kind](low, call)
    return _by_operators(low, node)


def _has_tensor_input(call: Call) -> bool:
    source = call.arguments.get("query", call.arguments.get("input"))
    if call.kind in ("cat", "stack"):
        return isinstance(call.arguments.get("tensors"), (tuple, list))
    if call.kind == "einsum":
        return True
    return isinstance(source, fx.Node) and meta.is_one_tensor(source)


def _by_operators(low: Lowering, node: fx.Node) -> Local:
    """Lower what PyTorch itself tells to be elementwise, or a view."""
    if low.probe.is_pointwise(node) and meta.is_one_tensor(node):
        return shapes.elementwise(low, node)
    local = shapes.view(low, node)
    if local is None:
        name = getattr(node.target, "__name__", node.target)
        raise Refused(f"no rule for {name}")
    return local


def _require_own_elements(low: Lowering, node: fx.Node) -> None:
    """See that a backward of the user's own can work on a tile's elements alone.

    Raises:
        Refused: it may look at others, or some have a gradient on several tiles.
    """
    for source in node.all_input_nodes:
        axes = low.axes(source)
        if axes is not None:
            low.require_all_axes(axes)
    if not low.probe.is_pointwise_both_ways(node):
        raise Refused("its backward may depend on all elements")
