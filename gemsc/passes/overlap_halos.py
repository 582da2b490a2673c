"""Overlap halos: let tiles compute the inner part of a layer while its halo travels.

Example, on a tile:
    %halo = redistribute(%x, Exchange(...))             # before
    %conv = call_module conv(%halo)
    %conv = call_module conv(%x, Exchange(...), 0)      # after: grid.overlapped
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import fx, nn

from gemsc.costs.hardware import Device, Link, read_hardware
from gemsc.ir import meta
from gemsc.ir.flow import exchange_of, is_exchange, is_overlapped
from gemsc.ir.holder import put_layer
from gemsc.ir.program import Program
from gemsc.ir.staged import keep_stages
from gemsc.ir.tile_ops import TileLayer, reach, split
from gemsc.passes.annotate import annotate
from gemsc.passes.base import Pass
from gemsc.planner.tiles import inner_share, traffic_of

__all__ = ["OverlapHalos", "overlap", "overlapped_layers"]

WINDOWS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AvgPool3d,
)
SPLIT_SHARE = 0.25  # more time of an operator in parts, on one core: 25 to 40 %


@dataclass(frozen=True)
class OverlapHalos(Pass):
    """Choose the layers whose halo travels while their inner part is computed.

    `layers` are taken as they are, where that is possible, and all with `everywhere`;
    otherwise the seconds decide:

        hidden: the exchange or the inner part, whichever is shorter, in each direction
        extra:  the parts and putting them together, less the layer on the whole halo
                and the copy of the tile with its halo

    by the device and by `links`, one for each stage that is split. A convolution that
    keeps the size is computed as a whole, without that copy: there, `extra` is mostly
    less than nothing. A core's model knows no loss for thin parts: of other layers it
    is 25 % of the layer at least.
    """

    name: ClassVar[str] = "overlap-halos"
    requires: ClassVar[tuple[str, ...]] = ("stages",)

    layers: frozenset[str] | None = None
    everywhere: bool = False
    links: tuple[tuple[int, Link], ...] = ()
    device: Device | None = None
    training: bool = True

    def apply(self, program: Program) -> Program:
        """Return the program in which these layers get their halo on the way."""
        found = _candidates(program)
        if found and self.layers is None and not self.everywhere:
            return self._where_it_pays(program, found)
        layers = found if self.layers is None else self.layers & found.keys()
        return self._annotated(overlap(program, layers)) if layers else program

    def _annotated(self, program: Program) -> Program:
        annotate(program, device=self.device, training=self.training)
        return program

    def _where_it_pays(self, program: Program, found: Mapping[str, fx.Node]) -> Program:
        """Return the program in which layers overlap that are predicted to gain."""
        device = self.device or read_hardware().device
        links = dict(self.links)
        hidden = {}
        for stage in program.require_stages():
            for path, node in found.items():
                if node in stage.nodes and stage.index in links:
                    hidden[path] = _hidden(node, links[stage.index])
        tried = self._annotated(overlap(program, hidden))
        worth = set()
        for node in tried.compute_nodes:
            if is_overlapped(node):
                path = str(node.target)
                halo, layer = found[path].args[0], found[path]
                assert isinstance(halo, fx.Node)
                extra = _seconds(node) - _seconds(layer) - _seconds(halo)
                if not device.half_flops and not _is_whole(program, layer, halo):
                    extra = max(extra, SPLIT_SHARE * _seconds(layer))
                if hidden[path] > extra:
                    worth.add(path)
        if len(worth) == len(hidden):
            return tried
        return self._annotated(overlap(program, worth)) if worth else program


def overlapped_layers(program: Program) -> tuple[str, ...]:
    """Return the layers whose halo travels while their inner part is computed."""
    return tuple(str(n.target) for n in program.compute_nodes if is_overlapped(n))


def overlap(program: Program, layers: Collection[str] | None = None) -> Program:
    """Return the program in which layers, None for all that can, overlap; no facts."""
    found = _candidates(program)
    chosen = {node for path, node in found.items() if layers is None or path in layers}
    gone = {node.args[0] for node in chosen}
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        if node in gone:
            continue
        if node in chosen:
            halo = node.args[0]
            assert isinstance(halo, fx.Node)
            source, *rest = halo.args
            assert isinstance(source, fx.Node)
            args = (mapping[source], *rest)
            new = graph.create_node("call_module", node.target, args, {}, node.name)
        else:
            new = graph.node_copy(node, mapping.__getitem__)
        meta.copy_meta(node, new)
        mapping[node] = new
    changed = keep_stages(program, graph, mapping)
    for node in chosen:
        path = str(node.target)
        layer = changed.module.get_submodule(path)
        put_layer(changed.module, path, TileLayer(layer, "overlapped"))
    return changed


def _candidates(program: Program) -> dict[str, fx.Node]:
    """Return the calls of layers with an exchange of their own, by path."""
    calls = Counter(n.target for n in program.graph.nodes if n.op == "call_module")
    outputs = set(program.outputs)
    found = {}
    for stage in program.require_stages():
        inside = set(stage.nodes)
        for halo in filter(is_exchange, stage.nodes):
            (user, *others) = halo.users
            if others or halo in outputs or halo.args[0] not in inside:
                continue
            if user not in inside or user.op != "call_module":
                continue
            alone = calls[user.target] == 1 and user.args == (halo,)
            layer = program.module.get_submodule(str(user.target))
            if alone and not user.kwargs and _can_be_split(layer, halo):
                found[str(user.target)] = user
    return found


def _can_be_split(layer: nn.Module, halo: fx.Node) -> bool:
    """Whether a layer is a window that can be moved over parts of its input."""
    if type(layer) not in WINDOWS:
        return False
    if getattr(layer, "ceil_mode", False) or getattr(layer, "return_indices", False):
        return False
    if getattr(layer, "padding_mode", "zeros") != "zeros":
        return False
    exchange = exchange_of(halo)
    views = [exchange.seen_from(tile) for tile in range(len(exchange.held))]
    if exchange.is_local or exchange.wraps or not all(view.own for view in views):
        return False
    return any(
        reach(layer, view) or split(layer, view).inner is not None for view in views
    )


def _is_whole(program: Program, node: fx.Node, halo: fx.Node) -> bool:
    """Whether the layer is computed as a whole while its halo travels."""
    exchange = exchange_of(halo)
    layer = program.module.get_submodule(str(node.target))
    views = map(exchange.seen_from, range(len(exchange.held)))
    return all(reach(layer, view) for view in views)


def _hidden(node: fx.Node, link: Link) -> float:
    """Return the seconds of an exchange that the inner part can hide, both ways."""
    halo = node.args[0]
    assert isinstance(halo, fx.Node)
    traffic = traffic_of(halo)
    share = inner_share(halo)
    seconds, facts = link.seconds(traffic.most_bytes), meta.facts(node)
    total = min(seconds, share * facts.forward_seconds)
    if traffic.gradient:
        total += min(seconds, share * facts.backward_seconds)
    return total


def _seconds(node: fx.Node) -> float:
    facts = meta.facts(node)
    return facts.forward_seconds + facts.backward_seconds
