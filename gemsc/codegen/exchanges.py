"""How exchanges between tiles are named, and told in a comment."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from typing import Any

from torch import fx

from gemsc.base.boxes import Box, everything, intersection, shape_of, volume
from gemsc.ir import meta
from gemsc.ir.flow import (
    base_name,
    exchange_of,
    is_exchange,
    is_overlapped,
    is_ring,
    source_of,
)
from gemsc.ir.program import Program
from gemsc.ir.shape_grid import ShapeGrid
from gemsc.messages.exchange import Exchange
from gemsc.runtime import tiles

# how the sides of a box are called, with two axes of tiles
SIDES = (("row", "up", "down"), ("column", "left", "right"))


def exchanges_of(stage: Any) -> Iterator[tuple[fx.Node, Exchange]]:
    """Yield the exchanges that a stage's text mentions, each with its node."""
    for node in _nodes(stage):
        if is_exchange(node):
            yield node, exchange_of(node)


def sums_of(stage: Any) -> Iterator[tuple[int, ...]]:
    """Yield the tiles of each sum that a stage's text mentions, () for all."""
    for node in _nodes(stage):
        if meta.whole_gradients(node) is not None:
            yield ()
        if any(isinstance(arg, ShapeGrid) for arg in node.args[:1]):
            assert callable(node.target)
            bound = signature(node.target).bind(*node.args, **node.kwargs).arguments
            if "exchange" not in bound:
                yield bound.get("among", ())


def _nodes(stage: Any) -> Iterator[fx.Node]:
    yield from stage.flow.nodes
    if stage.apart:
        yield from stage.evaluation.nodes


def wish_of(node: fx.Node, exchange: Exchange) -> str:
    """Return a name for the constant: HALO_CONV1, WHOLE_LOGITS, SUM_Y, ..."""
    whole = everything(exchange.shape)
    if is_ring(node):
        return f"RING_{base_name(node).upper()}"
    if exchange.adds:
        return f"SUM_{base_name(source_of(node)).upper()}"
    if source_of(node).target in (tiles.pack, tiles.nothing, tiles.tied):
        return f"JOIN_{base_name(source_of(node)).upper()}"
    if all(box == whole for box in exchange.wanted):
        return f"WHOLE_{base_name(source_of(node)).upper()}"
    if all(box == whole for box in exchange.held):
        return f"PART_{base_name(source_of(node)).upper()}"
    if _is_turned(exchange):
        return f"TURNED_{base_name(source_of(node)).upper()}"
    is_apart = is_exchange(node) and not is_overlapped(node)
    user = next(iter(node.users), node) if is_apart else node
    return f"HALO_{base_name(user).upper()}"


def gathers_of(evaluation: Program, tile: int | None) -> dict[fx.Node, Exchange]:
    """Return how the tiles put the model's outputs together, where the loss is.

    What comes from another grid comes whole.
    """
    if tile is None:
        return {}
    placement = evaluation.require_placement()
    stage_of = evaluation.stage_of
    home = placement.grid(evaluation.home)
    gathers = {}
    for node in evaluation.outputs:
        layout = meta.layout(node)
        here = node not in stage_of or placement.grid(stage_of[node]) == home
        if here and layout is not None and not layout.is_whole:
            whole = (everything(layout.shape),) * layout.num_tiles
            owned = layout.owned
            gathers[node] = Exchange(0, layout.shape, layout.boxes, whole, owned=owned)
    return gathers


def note_of(node: fx.Node, tile: int | None, noun: str) -> str:
    """Return what a tile gets from the others, for a comment; '' for other nodes.

    A `noun` is "tile" or "shard".
    """
    if tile is None:
        return ""
    if node.target is tiles.all_reduce:
        among = node.args[2:]
        return f"all-reduce over {f'{noun}s {among[0]}' if among else f'the {noun}s'}"
    if not is_exchange(node):
        return ""
    if is_ring(node):
        count = len(exchange_of(node).seen_from(tile).received)
        return f"keys of {count} other {noun}{'s' * (count != 1)}, one after the other"
    if is_overlapped(node):
        return f"{_part_of(node, tile, noun)}, on its way meanwhile"
    return _part_of(node, tile, noun)


def _part_of(node: fx.Node, tile: int, noun: str) -> str:
    exchange = exchange_of(node)
    held, wanted = exchange.held[tile], exchange.wanted[tile]
    whole = everything(exchange.shape)
    if exchange.adds:
        verb = "sum" if wanted == whole else "reduce-scatter"
        return f"{verb} of {sum(map(bool, map(volume, exchange.held)))} {noun}s"
    if held == whole and exchange.is_local:
        return f"this {noun}'s part" if volume(wanted) else f"nothing on this {noun}"
    if not exchange.wraps and not volume(intersection(held, wanted)):
        others = f"the other {noun}" + "s" * (len(exchange.held) > 2)
        return f"from {others}" if volume(wanted) else f"to {others}"
    sides = zip(held, wanted, whole, strict=True)
    grown = [want == size for have, want, size in sides if want != have]
    if grown and all(grown):
        sources = {piece.source for piece in exchange.pieces if piece.dest == tile}
        return f"gather {len(sources)} {noun}s"
    if held == whole:
        return f"this {noun}'s part"
    if _is_turned(exchange):
        return f"all-to-all among {len(exchange.held)} {noun}s"
    if exchange.wraps and shape_of(held) == shape_of(wanted):
        return "rolled"
    widths = list(_widths(held, wanted))
    if len(widths) == 2 * (len(held) - 2) and len({count for count, _ in widths}) == 1:
        return f"halo of {widths[0][0]}"
    return ", ".join(text for _, text in widths) or f"nothing on this {noun}"


def _is_turned(exchange: Exchange) -> bool:
    """Whether parts of one dimension become parts of another."""
    cut, wanted = (
        {dim for dim in range(len(exchange.shape)) if len({b[dim] for b in boxes}) > 1}
        for boxes in (exchange.held, exchange.wanted)
    )
    return bool(cut and wanted and not cut & wanted)


def _widths(held: Box, wanted: Box) -> Iterator[tuple[int, str]]:
    """Yield how much further a wanted box reaches on each side, and that as text."""
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
                yield count, f"{count} {noun}{plural} {side}"
