"""Overlap halos: let tiles compute a convolution while its halo travels.

Example, on a tile:
    %halo = redistribute(grid, %x, Exchange(...))                         # before
    %conv = call_module conv(%halo)
    %conv = convolution(grid, %x, Exchange(...), %conv_layer)             # after
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from gemsc.ir import meta
from gemsc.ir.flow import exchange_of, grid_of, is_exchange, source_of
from gemsc.ir.program import Program
from gemsc.ir.staged import moved
from gemsc.passes.base import Pass
from gemsc.runtime.tiles.convolution import convolution, reach


@dataclass(frozen=True)
class OverlapHalos(Pass):
    """Convolve a tile while its halo travels, where the result has the tile's size.

    So no copy of the tile with its halo is made either: see
    `gemsc.runtime.tiles.convolution`.
    """

    requires = ("stages",)

    def apply(self, program: Program) -> Program:
        """Return the program in which these layers get their halo on the way."""
        chosen = set(_candidates(program))
        gone = {node.args[0] for node in chosen}
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        for node in program.graph.nodes:
            if node in chosen:
                mapping[node] = _overlapped(node, graph, mapping)
            elif node not in gone:
                mapping[node] = graph.node_copy(node, mapping.__getitem__)
        return moved(program, graph, mapping)


def _overlapped(
    node: fx.Node, graph: fx.Graph, mapping: dict[fx.Node, fx.Node]
) -> fx.Node:
    """Add a convolution that begins before its halo has come."""
    (halo,) = node.all_input_nodes
    layer = graph.get_attr(str(node.target))
    args: Any = grid_of(halo), mapping[source_of(halo)], exchange_of(halo), layer
    new = graph.create_node("call_function", convolution, args, {}, node.name)
    meta.copy_meta(node, new)
    meta.set_layer(new, str(node.target))
    return new


def _candidates(program: Program) -> list[fx.Node]:
    """Return the calls of convolutions that have an exchange of their own."""
    outputs = set(program.outputs)
    calls = []
    for stage in program.require_stages():
        inside = set(stage.nodes)
        for halo in filter(is_exchange, stage.nodes):
            # what arrives for the branches of other ranks has no user here
            if len(halo.users) != 1 or halo in outputs or source_of(halo) not in inside:
                continue
            (user,) = halo.users
            if user not in inside or user.op != "call_module":
                continue
            layer = program.module.get_submodule(str(user.target))
            alone = user.args == (halo,) and not user.kwargs
            if alone and _can_overlap(layer, halo):
                calls.append(user)
    return calls


def _can_overlap(layer: nn.Module, halo: fx.Node) -> bool:
    """Whether the layer is a convolution that keeps the size, wherever it is called."""
    exchange = exchange_of(halo)
    if exchange.is_local or exchange.wraps or exchange.adds:
        return False
    views = map(exchange.seen_from, exchange.present)
    return all(reach(layer, view) for view in views)
