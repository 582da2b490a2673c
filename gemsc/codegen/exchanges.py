"""How exchanges between tiles are named, and told in a comment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from gemsc.boxes import Box, everything
from gemsc.ir.flow import base_name, exchange_of, is_exchange
from gemsc.ir.tile_ops import Exchange, all_reduce

__all__ = ["exchanges_of", "note_of", "wish_of"]

# how the sides of a box are called, with two axes of tiles
SIDES = (("row", "up", "down"), ("column", "left", "right"))


def exchanges_of(stage: Any) -> Iterator[tuple[fx.Node, Exchange]]:
    """Yield the exchanges that a stage's text mentions, each with its node."""
    flows = (stage.flow, stage.evaluation) if stage.apart else (stage.flow,)
    for flow in flows:
        for node in flow.nodes:
            if is_exchange(node):
                yield node, exchange_of(node)


def wish_of(node: fx.Node, exchange: Exchange) -> str:
    """Return a name for the constant: HALO_CONV1, WHOLE_LOGITS, PART_X."""
    whole = everything(exchange.shape)
    source = node.args[0]
    if all(box == whole for box in exchange.wanted):
        value = source if isinstance(source, fx.Node) else node
        return f"WHOLE_{base_name(value).upper()}"
    if all(box == whole for box in exchange.held):
        value = source if isinstance(source, fx.Node) else node
        return f"PART_{base_name(value).upper()}"
    user = next(iter(node.users), node) if is_exchange(node) else node
    return f"HALO_{base_name(user).upper()}"


def note_of(node: fx.Node, tile: int | None) -> str:
    """Return what a tile gets from the others, for a comment; '' for other nodes."""
    if tile is None:
        return ""
    if node.target is all_reduce:
        return "sum over the tiles"
    if not is_exchange(node):
        return ""
    exchange = exchange_of(node)
    held, wanted = exchange.held[tile], exchange.wanted[tile]
    whole = everything(exchange.shape)
    if wanted == whole and held != whole:
        return f"gather {len(exchange.held)} tiles"
    if held == whole:
        return "this tile's part"
    return ", ".join(_widths(held, wanted)) or "nothing on this tile"


def _widths(held: Box, wanted: Box) -> Iterator[str]:
    """Yield how much further a wanted box reaches on each side."""
    num_axes = len(held) - 2
    for axis, ((start, stop), (first, end)) in enumerate(
        zip(held[2:], wanted[2:], strict=True)
    ):
        noun, before, after = f"along axis {axis}", "before", "after"
        if num_axes == 2:
            noun, before, after = SIDES[axis]
        for count, side in ((start - first, before), (end - stop, after)):
            if count:
                plural = "s" if num_axes == 2 and abs(count) > 1 else ""
                yield f"{count} {noun}{plural} {side}"
