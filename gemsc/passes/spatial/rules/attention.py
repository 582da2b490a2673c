"""Attention of which each rank has some samples or heads, or some of the queries.

Of queries that are cut along the tokens each rank computes its own, against all keys
and values, which are gathered:

    query 8 x 4 x 32 of 64 x 16        key, value 8 x 4 x 64 x 16
    causal: row r of the rank's mask is row r + 32 of the whole one

Source: all-gather attention of Llama Team, The Llama 3 Herd of Models, 2024, section
3.3.2 (context parallelism).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from gemsc.ir.operators.calls import Call
from gemsc.passes.spatial.cuts import Axes
from gemsc.passes.spatial.lowering import Lowering
from gemsc.passes.spatial.values import Local, Refused
from gemsc.runtime import tiles


def own_attention(low: Lowering, call: Call) -> Local:
    """Attend from the rank's own queries, samples or heads.

    Raises:
        Refused: something else is cut, or a part of the heads that share a key.
    """
    query, key, value = (call[name] for name in ("query", "key", "value"))
    axes = low.axes(query)
    if axes is None or axes[-1] is not None:
        raise Refused("its queries are whole, or cut along their features")
    if call.get("enable_gqa", False) and axes[-3] is not None:
        raise Refused("heads that share a key are cut")
    others: Axes = (*axes[:-2], None, None)
    given = [low.get(query).node]
    for node in (key, value):
        own = others[len(others) - len(low.shape(node)) :]
        given.append(low.spread(node, own if any(a is not None for a in own) else None))
    mask = _mask(low, call, (*axes[:-1], None))
    given += [mask] if mask is not None else []
    names = ("scale", "enable_gqa")
    settings = {name: call[name] for name in names if call.get(name) is not None}
    if mask is None and call.get("is_causal", False):
        settings["is_causal"] = True
    function: Any = F.scaled_dot_product_attention
    if call.get("dropout_p") is not None:
        keys = low.shape(key)[-2]
        shape = (*low.shape(query)[:-1], keys)
        box = (*low.box(call.node, axes)[:-1], (0, keys))
        settings |= {"dropout_p": call["dropout_p"], "shape": shape, "box": box}
        settings["draw"] = low.draw(call.node)
        function = tiles.scaled_dot_product_attention
    return low.create(
        call.node, "call_function", function, tuple(given), settings, axes
    )


def _mask(low: Lowering, call: Call, axes: Axes) -> fx.Node | None:
    """Return the node of the mask of the rank's queries; None if it needs none."""
    mask = call.get("attn_mask")
    if mask is not None:
        shape = low.shape(mask)
        own = axes[len(axes) - len(shape) :]
        cut = [a if size > 1 else None for size, a in zip(shape, own, strict=True)]
        is_cut = any(axis is not None for axis in cut)
        return low.spread(mask, tuple(cut) if is_cut else None)
    if not call.get("is_causal", False) or axes[-2] is None:
        return None
    start, stop = low.owned(low.shape(call["query"]), axes)[low.place][-2]
    size = stop - start, low.shape(call["key"])[-2]
    make, node, kind = low.create, call.node, {"dtype": torch.bool}
    like = (low.get(call["query"]).node, size)
    ones = make(node, "call_method", "new_ones", like, kind, None, partial=True)
    rows = (ones.node, start)
    return make(node, "call_method", "tril", rows, {}, None, partial=True).node
