"""Signature: what the facts of a program depend on; tiles that agree in it share them.

Example, a grid of 4 x 4 tiles: the four corners have one signature, the upper and the
lower edge one, the left and the right edge one, and so have the four tiles inside.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from gemsc.base.boxes import shape_of
from gemsc.ir import meta
from gemsc.ir.flow import exchange_of, is_exchange, source_of
from gemsc.ir.holder import attribute
from gemsc.ir.program import Program
from gemsc.ir.shape_grid import ShapeGrid
from gemsc.messages.exchange import Exchange


def signature(program: Program) -> Hashable:
    """Return which operators a program runs, on tensors of which sizes."""
    places = {node: place for place, node in enumerate(program.graph.nodes)}
    tensors: dict[int, int] = {}  # a rank's parts of tensors are objects of its own

    def of(value: Any) -> Hashable:
        if isinstance(value, fx.Node):
            return places[value]
        if isinstance(value, tuple | list):
            return tuple(map(of, value))
        if isinstance(value, dict):
            return tuple((name, of(item)) for name, item in value.items())
        if isinstance(value, slice):
            return value.start, value.stop, value.step
        if isinstance(value, ShapeGrid):
            return value.num_tiles
        if isinstance(value, Tensor):
            number = tensors.setdefault(id(value), len(tensors))
            return tuple(value.shape), value.dtype, value.requires_grad, number
        return _hashable(value)

    def call(node: fx.Node) -> Hashable:
        args: Hashable = of(node.args)
        target = _what(node, program.module)
        if is_exchange(node):
            sizes = _sizes(exchange_of(node), program.tile)
            args = of((source_of(node), *node.args[3:])), sizes
        modes = meta.region(node), meta.whole_gradients(node) is not None
        return node.op, of(target), args, of(node.kwargs), modes

    return program.frozen, tuple(map(call, program.graph.nodes))


def alike_ranks(first: Program) -> list[int]:
    """Return, for each shard of the largest grid, the first that has parts as large.

    `first` is what the first one runs. Of values, weights and messages alike.
    """
    placement = first.require_placement()
    parts = [cut.parts for shards in first.shards.values() for cut in shards.cut]
    layouts = [meta.layout(node) for node in first.compute_nodes]
    exchanges = [exchange_of(node) for node in first.compute_nodes if is_exchange(node)]
    seen: dict[Hashable, int] = {}

    def sizes(rank: int) -> Hashable:
        return (
            tuple(row[rank % len(row)].local_shape for row in parts),
            tuple(w and shape_of(w.boxes[rank % w.num_tiles]) for w in layouts),
            tuple(_sizes(exchange, rank) for exchange in exchanges),
        )

    ranks = range(placement.num_tiles)
    return [seen.setdefault(sizes(rank), rank) for rank in ranks]


def _what(node: fx.Node, module: nn.Module) -> Any:
    """Return what a node is: a tensor's size, a layer's settings, or a function."""
    if node.op == "placeholder":
        return meta.spec(node)
    if node.op in ("call_module", "get_attr"):
        used = attribute(module, str(node.target))
        is_layer = isinstance(used, nn.Module)
        return {"type": type(used), **vars(used)} if is_layer else used
    return node.target


def _hashable(value: object) -> Hashable:
    """Return a value, or which object it is; frozen records may hold a dict."""
    try:
        hash(value)
    except TypeError:
        return _Object(value)
    return value


@dataclass(frozen=True, eq=False)
class _Object:
    """Stands for an object, which lives as long as it."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _sizes(exchange: Exchange, tile: int) -> Hashable:
    """Return the sizes of what a tile holds, wants and receives, and if it adds."""
    held, wanted = exchange.held, exchange.wanted
    received = []
    if not exchange.arrives:
        pieces = exchange.seen_from(tile % len(held)).received.values()
        received = sorted(piece.shape for row in pieces for piece in row)
    ends = shape_of(held[tile % len(held)]), shape_of(wanted[tile % len(wanted)])
    return *ends, tuple(received), exchange.adds
