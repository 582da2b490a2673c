"""OPERATIONS: how a rank computes its part, where that is not the same call on less."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from gemsc.base.boxes import Interval
from gemsc.ir import meta
from gemsc.ir.mutation import elements
from gemsc.ir.operators.table import NO_OPERATOR, OPERATORS, operator_of
from gemsc.ir.program import Barrier
from gemsc.passes.shards.factors import size_of
from gemsc.passes.shards.inside import Inside
from gemsc.passes.spatial.emit import add_call, masked, on_tiles
from gemsc.passes.spatial.rules.lower_call import lower_call
from gemsc.passes.spatial.values import Local, Refused, refined, whole_shape
from gemsc.runtime import tiles


def compute(x: Inside) -> Local:
    """Add the nodes that compute this rank's part of a node's value.

    Raises:
        Refused: all of its inputs must be gathered.
    """
    kind = x.call.kind if x.node in x.analysis.calls else ""
    if x.low.pictures:
        sources = elements(x.node)
        cut = [source for source in sources if x.low.axes(source) is not None]
        if cut:
            tried = x.low.tried(x.node, lambda *_: _on_tiles(x, kind, sources))
            return tried if isinstance(tried, Local) else _gathered(x, cut, str(tried))
    if kind in OPERATIONS:
        tried = OPERATIONS[kind](x)
        if tried is not None:
            return tried
    local = _same_call(x)
    return x.added_up(local.node) if x.is_summed else local


def _same_call(x: Inside) -> Local:
    """Add the same call, of parts; sizes among its arguments are those of the part."""
    args = fx.node.map_arg(x.node.args, x.input)
    kwargs = fx.node.map_arg(x.node.kwargs, x.input)
    name = str(getattr(x.node.target, "__name__", x.node.target))
    name = "unflatten" if isinstance(x.layer, nn.Unflatten) else name
    if name in _SIZED:
        return _SIZED[name](x, args, kwargs)
    return x.create(x.node.op, x.node.target, args, kwargs)


# --------------------------------------------------- parts of a tile's part


def _on_tiles(x: Inside, kind: str, sources: Sequence[fx.Node]) -> Local:
    """Compute a shard's part of what the rule for tiles computes of a tile's part.

    Raises:
        Refused: the rule cannot, or looks at what shards cut.
    """
    low, operator = x.low, OPERATORS.get(kind, NO_OPERATOR)
    if kind == "cross_entropy":  # each tile's rows, of all classes
        with low.instead({s: low.shared(s, ()) for s in sources if s.op != "get_attr"}):
            return lower_call(low, x.node)
    if x.is_summed and not operator.addend:
        raise Refused("tiles and shards cut it")
    given = {source: x.placed(source) for source in sources}
    with low.instead(given), low.sharing(x.parts, addend=x.is_summed):
        if kind == "split" and (size := _smaller(x)):
            args = low.get(x.call.input).node, size, x.call.get("dim", 0)
            axes = low.axes(x.call.input)
            return low.create(x.node, x.node.op, x.node.target, args, {}, axes)
        local = lower_call(low, x.node, x.local_call if kind else None)
    if not x.is_summed:
        return local
    addend = local.node
    if kind == "mean":
        addend = _weighted(x, addend, sources)
    total = x.added_up(addend, local.axes)
    if kind in ("conv", "conv_transpose"):
        return _with_bias(x, total, (-1, *(1,) * x.call.rank))
    return _with_bias(x, total, ()) if kind == "linear" else total


def _gathered(x: Inside, cut: Sequence[fx.Node], reason: str) -> Local:
    """Compute a shard's part of whole pictures, on every tile; report it."""
    given = {source: Local(x.low.whole(source), None) for source in cut}
    with x.low.instead(given):
        local = compute(x)
    num_bytes = sum(meta.spec(source).num_bytes for source in cut)
    x.low.barriers.append(Barrier(local.node, reason, num_bytes))
    return local


def _weighted(x: Inside, value: fx.Node, sources: Sequence[fx.Node]) -> fx.Node:
    """Add a mean times its share of all elements."""
    share = next(filter(None, map(x.parts, sources)))[x.low.place].share
    return add_call(x.low, x.node, operator.mul, value, share, partial=True).node


# --------------------------------------------------------- sizes in arguments


def _to_shape(x: Inside, args: Any, kwargs: Any) -> Local:
    name = str(getattr(x.node.target, "__name__", x.node.target))
    target = name if name in ("view", "expand") else "reshape"
    (source,) = x.node.all_input_nodes
    return x.create("call_method", target, (x.input(source), *x.part.local_shape), {})


def _unflattened(x: Inside, args: Any, kwargs: Any) -> Local:
    source = x.node.all_input_nodes[0]
    count = len(whole_shape(x.node)) - len(whole_shape(source)) + 1
    given: Any = x.node.kwargs.get("dim", x.node.args[1:2])
    given = getattr(x.layer, "dim", given)
    dim = int(given[0] if isinstance(given, tuple) else given)
    dim %= len(whole_shape(source))
    sizes = x.part.local_shape[dim : dim + count]
    return x.create("call_method", "unflatten", (args[0], dim, sizes), {})


def _split(x: Inside, args: Any, kwargs: Any) -> Local:
    """Split into as many parts: smaller ones."""
    if size := _smaller(x):
        args, kwargs = (args[0], size, x.call.get("dim", 0)), {}
    return x.create(x.node.op, x.node.target, args, kwargs)


def _smaller(x: Inside) -> int | None:
    """Return the size of what a split gives of the rank's part; None if as ever."""
    source = x.call.input
    dim = int(x.call.get("dim", 0)) % len(whole_shape(source))
    parts = x.parts(source)
    if not parts or parts[0].dim != dim:
        return None
    return parts[x.low.place].local_shape[dim] // len(meta.value(x.node))


def _repeated(x: Inside, args: Any, kwargs: Any) -> Local:
    """Repeat as often as the rank's part is longer than what it has of the input."""
    parts, shape = x.parts(x.call.input), whole_shape(x.call.input)
    given = parts[x.low.place].local_shape if parts else shape
    out_shape = x.part.local_shape
    given = (1,) * (len(out_shape) - len(given)) + given
    times = [mine // size for mine, size in zip(out_shape, given, strict=True)]
    return x.create("call_method", "repeat", (args[0], *times), {})


def _filled(x: Inside, args: Any, kwargs: Any) -> Local:
    settings = {name: value for name, value in kwargs.items() if name != "size"}
    if x.node.target is torch.full and "fill_value" not in settings:
        settings["fill_value"] = args[-1]
    return x.create("call_function", x.node.target, (x.part.local_shape,), settings)


_SIZED: dict[str, Callable[[Inside, Any, Any], Local]] = {
    **dict.fromkeys(("view", "reshape", "expand", "broadcast_to"), _to_shape),
    **dict.fromkeys(("zeros", "ones", "full"), _filled),
    "unflatten": _unflattened,
    "split": _split,
    **dict.fromkeys(("repeat", "tile"), _repeated),
}


# ------------------------------------------------------------- row-parallel


def _linear(x: Inside) -> Local | None:
    """Multiply by the rank's columns; the bias is added once, to the sum."""
    if not x.is_summed:
        return None
    args = x.input(x.call.input), x.tensor("weight")
    addend = x.create("call_function", F.linear, args, {})
    return _with_bias(x, x.added_up(addend.node), ())


def _convolution(x: Inside) -> Local | None:
    """Convolve the rank's channels; the bias is added once, to the sum."""
    if not x.is_summed:
        return _of_groups(x, "groups")
    transposed = x.call.kind == "conv_transpose"
    names = ["stride", "padding", "dilation"]
    names += ["output_padding"] if transposed else []
    settings = {name: x.call[name] for name in names if name in x.call.arguments}
    if (groups := int(x.call.get("groups", 1))) > 1:
        settings["groups"] = groups
    kind = "conv_transpose" if transposed else "conv"
    function = getattr(F, f"{kind}{x.call.rank}d")
    args = x.input(x.call.input), x.tensor("weight")
    addend = x.create("call_function", function, args, settings)
    return _with_bias(x, x.added_up(addend.node), (-1, *(1,) * x.call.rank))


def _of_groups(x: Inside, setting: str) -> Local | None:
    """Call a function that is told the number of groups, of which the rank has some."""
    layer = x.call.layer
    if not x.letter("g") or getattr(layer, "weight", None) is not None:
        return None  # a layer is smaller as its weight is
    num_groups = x.local_call[setting]
    if layer is not None:  # a GroupNorm without weights
        given = x.input(x.call.input), num_groups, None, None, layer.eps
        return x.create("call_function", F.group_norm, given, {})
    args = list(fx.node.map_arg(x.node.args, x.input))
    kwargs = dict(fx.node.map_arg(x.node.kwargs, x.input))
    place = x.call.names.index(setting)
    if place < len(args):
        args[place] = num_groups
    else:
        kwargs[setting] = num_groups
    return x.create(x.node.op, x.node.target, tuple(args), kwargs)


def _instance_norm(x: Inside) -> Local | None:
    """Normalize as many channels as come: a layer without weights knows how many."""
    layer = x.call.layer
    if layer is None or getattr(layer, "weight", None) is not None:
        return None
    args, settings = (x.input(x.call.input),), {"eps": layer.eps}
    return x.create("call_function", F.instance_norm, args, settings)


def _addmm(x: Inside) -> Local | None:
    """Multiply; what is added to the product is added once, to the sum."""
    if not x.is_summed:
        return None
    names = ("batch1", "batch2") if "batch1" in x.call.arguments else ("mat1", "mat2")
    args = tuple(x.input(x.call[name]) for name in names)
    addend = x.create("call_function", torch.matmul, args, {})
    bias = x.call.input
    if len(whole_shape(bias)) == 1:
        total = x.added_up(addend.node)
    else:
        total = x.low.all_reduce(x.node, addend.node, None, x.low.beside)
    return _plus(x, total, _met(x, x.input(bias), total, -1))


def _index_add(x: Inside) -> Local | None:
    """Add the rank's own rows; what they are added to is added once, to the sum."""
    if not x.is_summed:
        return None
    base, call = x.input(x.call.input), x.call
    zeros = add_call(x.low, x.node, torch.zeros_like, base)
    args = zeros.node, 0, x.input(call["index"]), x.input(call["source"])
    addend = x.create("call_method", "index_add", args, {})
    total = x.low.all_reduce(x.node, addend.node, None, x.low.beside)
    return add_call(x.low, x.node, operator.add, total.node, base)


def _with_bias(x: Inside, total: Local, view: tuple[int, ...]) -> Local:
    """Add a layer's bias to the sum, each rank to what it has of it."""
    bias = x.tensor("bias")
    if bias is None:
        return total
    bias = _met(x, bias, total, -len(view) or -1)
    if view:
        bias = add_call(x.low, x.node, "view", bias, *view, partial=True).node
    return _plus(x, total, bias)


def _met(x: Inside, bias: fx.Node, total: Local, dim: int) -> fx.Node:
    """Return the part of a bias that meets the rank's part of a sum."""
    if total.axes is None or total.axes[dim] is None:
        return bias
    rows = x.low.owned(whole_shape(x.node), total.axes)[x.low.place][dim]
    args = bias, slice(*rows)
    return add_call(x.low, x.node, operator.getitem, *args, partial=True).node


def _plus(x: Inside, total: Local, bias: fx.Node) -> Local:
    """Add a bias to a sum, in its precision."""
    if meta.region(x.node).autocast is not None:
        bias = add_call(x.low, x.node, tiles.lowered, bias, partial=True).node
    return add_call(x.low, x.node, operator.add, total.node, bias, axes=total.axes)


# ------------------------------------------------- words, losses, random numbers


def _words(x: Inside) -> tuple[Interval, int]:
    """Return which words the rank has, and how many there are."""
    words = x.analysis.roles[x.node].letters[operator_of(x.call).words]
    ((start, stop),) = x.cut([words])[x.low.place].intervals
    return (start, stop), size_of(words)


def _embedding(x: Inside) -> Local | None:
    """Look up the rank's own words; other ranks add the rest."""
    if not x.is_summed:
        return None
    words, count = _words(x)
    args = x.input(x.call.input), x.tensor("weight"), words
    settings: dict[str, Any] = {"num_words": count}
    if (padding := x.call.get("padding_idx")) is not None:
        settings["padding_idx"] = padding
    addend = x.create("call_function", tiles.embedding, args, settings)
    return x.added_up(addend.node)


def _cross_entropy(x: Inside) -> Local | None:
    """Compare with the logits of the rank's own words."""
    if not x.letter("c"):
        raise Refused("its samples are cut among shards")
    words, count = _words(x)
    args = x.low.here, x.input(x.call.input), x.low.whole(x.call["target"])
    settings: dict[str, Any] = {"words": words, "num_words": count}
    settings["among"] = x.low.beside
    function = tiles.parallel_cross_entropy
    return on_tiles(x.low, x.call, function, args, None, **settings)


def _attention(x: Inside) -> Local | None:
    """Draw the rank's part of the mask of all heads' weights."""
    if x.call.get("dropout_p") is None:
        return None
    query, key = x.call["query"], x.call["key"]
    shape = (*whole_shape(query)[:-1], whole_shape(key)[-2])
    whole = [(0, size) for size in shape]
    if parts := x.parts(query):  # else only the width of values is cut
        part = parts[x.low.place]
        if part.outer > 1 or part.dim > len(shape) - 3:
            raise Refused("its mask is drawn for the whole value")
        whole[part.dim] = part.rows[0] * part.inner, part.rows[1] * part.inner
    names = ("query", "key", "value", "attn_mask")
    given = [(n, x.call.get(n)) for n in names]
    args = tuple(x.input(node) for _, node in given if node is not None)
    settings = {
        name: x.call[name]
        for name in ("dropout_p", "is_causal", "scale", "enable_gqa")
        if x.call.get(name) is not None
    }
    settings |= {"shape": shape, "box": tuple(whole), "draw": x.low.draw(x.node)}
    function = tiles.scaled_dot_product_attention
    return x.create("call_function", function, args, settings)


def _reduced(x: Inside) -> Local | None:
    """Weigh each rank's mean by its share of all elements; add up."""
    if not x.is_summed:
        return None
    addend, kind = _same_call(x).node, x.call.kind
    if (x.call.get("reduction", "mean") if kind == "loss" else kind) == "mean":
        addend = _weighted(x, addend, x.node.all_input_nodes)
    return x.added_up(addend)


def _dropout(x: Inside) -> Local:
    """Multiply by the rank's part of the mask: of the whole value, or of channels."""
    if x.part.outer > 1:
        raise Refused("its mask is drawn for the whole value")
    source, shape = x.input(x.call.input), whole_shape(x.node)
    boxes = refined(x.low.owned(shape, None), x.parts())
    return masked(x.low, x.call, source, shape, boxes, None, x.parts())


OPERATIONS: dict[str, Callable[[Inside], Local | None]] = {
    "linear": _linear,
    "conv": _convolution,
    "conv_transpose": _convolution,
    "group_norm": partial(_of_groups, setting="num_groups"),
    "instance_norm": _instance_norm,
    "addmm": _addmm,
    "embedding": _embedding,
    "index_add": _index_add,
    "attention": _attention,
    "cross_entropy": _cross_entropy,
    "mean": _reduced,
    "sum": _reduced,
    "loss": _reduced,
    "dropout": _dropout,
    "channel_dropout": _dropout,
}
