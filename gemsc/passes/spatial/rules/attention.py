"""Attention of which each rank has some samples or heads, or some of the queries.

Of queries that are cut along the tokens each rank computes its own, against all keys
and values, which are gathered:

    query 8 x 4 x 32 of 64 x 16        key, value 8 x 4 x 64 x 16
    causal: row r of the rank's mask is row r + 32 of the whole one

With `--attention ring` they are not: they come part by part, and are fetched again in
the backward (`gemsc/runtime/tiles/ring.py`). Where that cannot be, a barrier says why.

Source: all-gather attention of Llama Team, The Llama 3 Herd of Models, 2024, section
3.3.2 (context parallelism).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from gemsc.base.boxes import Box, Interval
from gemsc.ir import meta
from gemsc.ir.operators.calls import Call
from gemsc.ir.program import Barrier
from gemsc.passes.spatial.cuts import Axes
from gemsc.passes.spatial.emit import add_call, spread_beside
from gemsc.passes.spatial.lowering import Lowering
from gemsc.passes.spatial.values import Local, Refused, refined
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
    if low.rings and (keys := low.axes(key)) is not None and keys[-2] is not None:
        reason = _why_gathered(low, call, axes, keys)
        if reason is None:
            return _around(low, call, axes)
        num_bytes = sum(meta.spec(node).num_bytes for node in (key, value))
        attended = _gathered(low, call, axes)
        low.barriers.append(Barrier(attended.node, f"no ring: {reason}", num_bytes))
        return attended
    return _gathered(low, call, axes)


def _gathered(low: Lowering, call: Call, axes: Axes) -> Local:
    """Attend to all keys and values, on each rank."""
    query, key, value = (call[name] for name in ("query", "key", "value"))
    others: Axes = (*axes[:-2], None, None)
    given = [low.get(query).node]
    for node in (key, value):
        node_axes = others[len(others) - len(low.shape(node)) :]
        given.append(low.spread(node, node_axes))
    mask = _mask(low, call, (*axes[:-1], None))
    given += [mask] if mask is not None else []
    names = ("scale", "enable_gqa")
    settings = {name: call[name] for name in names if call.get(name) is not None}
    if mask is None and call.get("is_causal", False):
        settings["is_causal"] = True
    function: Any = F.scaled_dot_product_attention
    if call.get("dropout_p") is not None:
        settings |= _dropout(low, call, axes)
        function = tiles.scaled_dot_product_attention
    return add_call(low, call.node, function, *given, axes=axes, **settings)


def _dropout(low: Lowering, call: Call, axes: Axes) -> dict[str, Any]:
    """Return which part of the mask of all weights the rank takes."""
    keys = low.shape(call["key"])[-2]
    shape = (*low.shape(call["query"])[:-1], keys)
    box = (*low.boxes(call.node, axes)[low.place][:-1], (0, keys))
    given = {"dropout_p": call["dropout_p"], "shape": shape, "box": box}
    return given | {"draw": low.draw(call.node)}


def _why_gathered(low: Lowering, call: Call, axes: Axes, keys: Axes) -> str | None:
    """Return why keys and values cannot come part by part; None if they can."""
    query, key, value = (call[name] for name in ("query", "key", "value"))
    shape, mask = low.shape(key), call.get("attn_mask")
    parts = low.local(key).held_parts
    if len(low.shape(query)) != 4 or low.shape(value) != shape:
        return "keys and values are not batch x heads x tokens x features of one size"
    if keys != axes or low.axes(value) != keys:
        return "queries, keys and values are not cut alike"
    if low.local(value).held_parts != parts or (parts and parts[0].outer > 1):
        return "ranks have other heads of keys than of values"
    wanted = (shape[0], *(() if call.get("enable_gqa") else (shape[1],)))
    if low.shape(query)[: len(wanted)] != wanted:
        return "some queries share keys without enable_gqa"
    if call.get("is_causal") and low.shape(query)[-2] != shape[-2]:
        return "there are not as many queries as keys, and the mask is causal"
    if mask is not None and len(low.shape(mask)) > 4:
        return "its mask has more than four dimensions"
    return None


def _around(low: Lowering, call: Call, axes: Axes) -> Local:
    """Attend to keys and values that come part by part; causal, to earlier ones."""
    query, key, value = (call[name] for name in ("query", "key", "value"))
    *outer, tokens, features = low.shape(key)
    shape, is_causal = (*outer, tokens, 2 * features), bool(call.get("is_causal"))
    held = low.owned(shape, axes)
    cut = len({box[-2] for box in held})
    turns = is_causal and tokens >= 2 * cut  # a half of one token is nothing
    halves = _Halves(low, call, axes) if turns else None
    ends = [box[-2][1] if is_causal else tokens for box in held]
    ends = halves.ends if halves else ends
    wanted = [
        (*box[:-2], (0, end), box[-1]) for box, end in zip(held, ends, strict=True)
    ]
    parts = low.local(key).held_parts
    exchange = low.exchange(shape, refined(held, parts), refined(tuple(wanted), parts))
    queries = halves.dealt() if halves else low.get(query).node
    args: tuple[Any, ...] = (low.here, low.get(key).node, exchange)
    args = (*args, low.get(value).node, queries)
    if call.get("attn_mask") is not None:
        args = (*args, _mask(low, call, (*axes[:-1], None)))
    names = ("is_causal", "scale", "enable_gqa")
    settings = {n: call[n] for n in names if call.get(n) not in (None, False)}
    if halves:
        settings["rows"] = halves.rows
    if call.get("dropout_p"):
        settings |= _dropout(low, call, axes)
    settings |= {"axes": axes, "partial": halves is not None}
    local = add_call(low, call.node, tiles.ring_attention, *args, **settings)
    return halves.home(local.node) if halves is not None else local


class _Halves:
    """Queries under a causal mask, dealt out so that all ranks have as much to do.

        tokens of 3 ranks   0 1     2 3     4 5
        sees so many        1 2     3 4     5 6
        attends for         0 5     2 3     4 1     seven each

    The second half of what a rank holds goes to the rank that is as far from the other
    end, and what comes of it goes back.

    Source: Megatron-LM's context parallelism, which cuts the sequence so.
    """

    def __init__(self, low: Lowering, call: Call, axes: Axes) -> None:
        self.low, self.call, self.axes = low, call, axes
        self.shape = low.shape(call["query"])
        self.held = low.owned(self.shape, axes)
        cuts = sorted({box[-2] for box in self.held})
        other = dict(zip(cuts, reversed(cuts), strict=True))
        self.second_half = tuple(_second(box, box[-2]) for box in self.held)
        self.dealt_out = tuple(_second(box, other[box[-2]]) for box in self.held)

    @property
    def ends(self) -> list[int]:
        """Where the keys end that each rank's queries see."""
        boxes = zip(self.held, self.dealt_out, strict=True)
        return [max(box[-2][1], other[-2][1]) for box, other in boxes]

    @property
    def rows(self) -> tuple[Interval, Interval]:
        """The tokens whose queries the rank has."""
        here = self.low.place
        return (
            (self.held[here][-2][0], self.second_half[here][-2][0]),
            self.dealt_out[here][-2],
        )

    def dealt(self) -> fx.Node:
        """Return the node of the queries that the rank attends for."""
        local = self.low.get(self.call["query"])
        other = self._moved(local.node, self.held, self.dealt_out)
        (start, stop), _ = self.rows
        first = self._made("narrow", local.node, 2, 0, stop - start)
        return self._made(torch.cat, (first, other), 2)

    def home(self, attended: fx.Node) -> Local:
        """Return what was found of the rank's own queries."""
        (start, stop), (begin, end) = self.rows
        size = stop - start
        first = self._made("narrow", attended, 2, 0, size)
        other = self._made("narrow", attended, 2, size, end - begin)
        back = self._moved(other, self.dealt_out, self.second_half)
        args = (first, back), 2
        return add_call(self.low, self.call.node, torch.cat, *args, axes=self.axes)

    def _moved(
        self, node: fx.Node, held: tuple[Box, ...], wanted: tuple[Box, ...]
    ) -> fx.Node:
        parts = self.low.local(self.call["query"]).held_parts
        held, wanted = refined(held, parts), refined(wanted, parts)
        exchange = self.low.exchange(self.shape, held, wanted)
        return self._made(tiles.redistribute, self.low.here, node, exchange)

    def _made(self, target: Any, *args: Any) -> fx.Node:
        return add_call(self.low, self.call.node, target, *args, partial=True).node


def _second(box: Box, rows: Interval) -> Box:
    """Return the box of the second half of some rows."""
    start, stop = rows
    return (*box[:-2], (start + (stop - start + 1) // 2, stop), box[-1])


def _mask(low: Lowering, call: Call, axes: Axes) -> fx.Node | None:
    """Return the node of the mask of the rank's queries; None if it needs none."""
    mask = call.get("attn_mask")
    if mask is not None:
        return spread_beside(low, mask, axes[len(axes) - len(low.shape(mask)) :])
    if not call.get("is_causal", False) or axes[-2] is None:
        return None
    start, stop = low.owned(low.shape(call["query"]), axes)[low.place][-2]
    size = stop - start, low.shape(call["key"])[-2]
    made = partial(add_call, low, call.node, partial=True)
    ones = made("new_ones", low.get(call["query"]).node, size, dtype=torch.bool)
    return made("tril", ones.node, start).node
