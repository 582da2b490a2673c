"""Other graphs of a program: in another order, or with its blocks and stages.

What may pass what is said here alone. Example:
    s = zeros(2, 4); t = encoder(x); s[:, 1:] = y; u = embedding(s); v = decoder(u)
    # the encoder may go anywhere before what uses t; the assignment stays between
    # zeros and embedding, though embedding takes no value from it
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import fx, nn
from torch._jit_internal import boolean_dispatched

from gemsc.base.rng import may_draw
from gemsc.errors import InternalError
from gemsc.ir import meta
from gemsc.ir.holder import attribute, attributes_of, called_layer, with_graph
from gemsc.ir.mutation import memory, mutated_inputs
from gemsc.ir.program import Program

_Keys = set[object]  # of memory


def in_order(
    program: Program, order: Iterable[fx.Node]
) -> tuple[Program, dict[fx.Node, fx.Node]]:
    """Return the program with its nodes that compute in this order, and their copies.

    Nothing is known of the new graph; its nodes know what the old ones did.
    """
    order = tuple(order)
    if wrong := out_of_order(program, order):
        raise InternalError(wrong)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    passive = [n for n in program.graph.nodes if n.op in ("placeholder", "get_attr")]
    for node in (*passive, *order, program.output):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return program.with_module(with_graph(program.module, graph)), copies


def moved(
    program: Program, graph: fx.Graph, mapping: Mapping[fx.Node, fx.Node]
) -> Program:
    """Return the program on another graph, with all that is known of its nodes.

    `mapping` leads from the program's nodes to those of the graph. There are no
    transfers yet.
    """
    new = program.with_module(with_graph(program.module, graph))
    towers, skips = program.towers, program.skips
    if towers is not None:
        towers = tuple(tuple(mapping[n] for n in tower) for tower in towers)
    if skips is not None:
        skips = tuple(
            replace(s, value=mapping[s.value], last_use=mapping[s.last_use])
            for s in skips
        )
    return replace(
        same_stages(program, new, mapping),
        towers=towers,
        skips=skips,
        facts=program.facts,
        barriers=tuple(replace(b, node=mapping[b.node]) for b in program.barriers),
    )


def same_stages(
    program: Program, other: Program, mapping: Mapping[fx.Node, fx.Node]
) -> Program:
    """Return another program with the blocks, stages and so on of the first.

    Nodes that `mapping` does not have are gone.
    """
    blocks, stages = program.blocks, program.stages
    if blocks is not None:
        blocks = tuple(
            replace(b, nodes=tuple(mapping[n] for n in b.nodes if n in mapping))
            for b in blocks
        )
    if blocks is not None and stages is not None:
        by_index = {block.index: block for block in blocks}
        stages = tuple(
            replace(stage, blocks=tuple(by_index[b.index] for b in stage.blocks))
            for stage in stages
        )
    return replace(
        other,
        blocks=blocks,
        stages=stages,
        placement=program.placement,
        segments=program.segments,
    )


def with_copies(
    program: Program, other: Program, twins: Mapping[fx.Node, fx.Node]
) -> tuple[Program, dict[fx.Node, fx.Node]]:
    """Return another graph of the same nodes with the copies that the program has.

    `twins` leads from nodes of the names that the program's have to those of the other
    graph; what is returned, from the program's nodes to those of the new graph.
    """
    by_name = {node.name: twin for node, twin in twins.items()}

    def twin_of(node: fx.Node) -> fx.Node:
        return by_name[meta.copy_of(node) or node.name]

    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        given = {twin_of(source): new[source] for source in node.all_input_nodes}
        new[node] = graph.node_copy(twin_of(node), given.__getitem__)
    return other.with_module(with_graph(other.module, graph)), new


# Twins: two graphs that differ in constants only


def keywords_of_both(
    training: fx.Node, evaluation: fx.Node
) -> dict[str, tuple[Any, Any]] | None:
    """Return each keyword's value in both graphs; None where one is not known.

    A keyword that only one of them gives has its default in the other: `training=True`
    of F.dropout is left out by the frontend, `training=False` is not.
    """
    ours, theirs = training.kwargs, evaluation.kwargs
    missing = ours.keys() ^ theirs.keys()
    defaults = defaults_of(training.target) if missing else {}
    if not missing <= defaults.keys():
        return None
    names = [*ours, *(name for name in theirs if name not in ours)]
    return {
        name: (ours.get(name, defaults.get(name)), theirs.get(name, defaults.get(name)))
        for name in names
    }


@cache
def defaults_of(target: Any) -> dict[str, Any]:
    """Return the arguments of a function that have defaults; {} if it does not say."""
    try:
        # F.max_pool2d and the like are one of two functions, by `return_indices`
        target = boolean_dispatched.get(target, {}).get("if_false", target)
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {p.name: p.default for p in parameters if p.default is not p.empty}


# What may pass what


def predecessors(
    program: Program, nodes: Sequence[fx.Node] | None = None
) -> dict[fx.Node, list[fx.Node]]:
    """Return, for each node, earlier ones that it may not pass.

    1. Nodes whose values it takes.
    2. Where one of two writes to memory that the other uses, through whatever view or
       layer: a read stays behind the last write, a write behind all that came before.
       A call of a layer with buffers counts as a write to these.

    Without `nodes` these are the program's; else that is the order in which the user's
    model runs them. Draws of random numbers are no part of it: nodes that draw can be
    on different ranks, but see `random_nodes`. What only raises may pass everything.
    """
    nodes = program.compute_nodes if nodes is None else nodes
    memory = _Memory(program)
    known: set[fx.Node] = set()
    touched: dict[object, _Uses] = {}
    earlier: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        before = {source for source in node.all_input_nodes if source in known}
        written = memory.written(node)
        for key in written:
            uses = touched.setdefault(key, _Uses())
            before.update(uses.writes, uses.reads)
            touched[key] = _Uses([node])
        for key in memory.read(node) - written:
            uses = touched.setdefault(key, _Uses())
            before.update(uses.writes)
            uses.reads.append(node)
        known.add(node)
        earlier[node] = [other for other in before if other is not node]
    return earlier


def out_of_order(
    program: Program,
    order: Iterable[fx.Node],
    right: Sequence[fx.Node] | None = None,
) -> str:
    """Say which node passes one that it may not, "" if none does.

    Without `right` the program's own order is one that computes what the model does.
    """
    place = {node: i for i, node in enumerate(order)}
    for node, earlier in predecessors(program, right).items():
        for other in earlier:
            if place[other] > place[node]:
                return f"%{node.name} passes %{other.name}, whose memory it uses"
    return ""


def sharing(program: Program) -> list[list[fx.Node]]:
    """Return which nodes must run on one rank: one changes memory that all use.

    What only reads it once it has its last value can be elsewhere.
    """
    memory = _Memory(program)
    users: dict[object, list[fx.Node]] = {}
    last: dict[object, fx.Node] = {}
    for node in program.compute_nodes:
        written = memory.written(node)
        for key in memory.read(node) | written | memory.of(node):
            users.setdefault(key, []).append(node)
        last.update(dict.fromkeys(written, node))
    groups = []
    for key, end in last.items():
        until = users[key][: users[key].index(end) + 1]
        # canonicalize gave what came before the group a memory of its own
        groups.append([n for n in until if meta.glue(n) == meta.glue(end)])
    return groups


def random_nodes(program: Program, order: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the nodes that draw random numbers: on one rank their order must stay."""
    if program.facts:
        return [node for node in order if meta.facts(node).random]
    return [node for node in order if may_draw(_name(program, node))]


def _name(program: Program, node: fx.Node) -> str:
    if (layer := called_layer(node, program.module)) is not None:
        return type(layer).__name__
    return str(getattr(node.target, "__name__", node.target))


@dataclass
class _Uses:
    """The last node that wrote to some memory, and those that have read it since."""

    writes: list[fx.Node] = field(default_factory=list)
    reads: list[fx.Node] = field(default_factory=list)


class _Memory:
    """Knows which memory a node reads and writes."""

    def __init__(self, program: Program) -> None:
        self.module = program.module
        self.of_value: dict[fx.Node, _Keys] = {}
        self.of_state: dict[int, _Keys] = {}  # that parameters and buffers are in
        for node in program.graph.find_nodes(op="get_attr"):
            state = self._attribute(node)
            self.of_state.setdefault(id(state), set()).update(self.of(node))

    def of(self, node: fx.Node) -> _Keys:
        """Return the storages of a value."""
        if node not in self.of_value:
            is_layer = isinstance(self._attribute(node), nn.Module)
            self.of_value[node] = set() if is_layer else {*memory(node)}
        return self.of_value[node]

    def _attribute(self, node: fx.Node) -> object:
        is_state = node.op == "get_attr"
        return attribute(self.module, str(node.target)) if is_state else None

    def read(self, node: fx.Node) -> _Keys:
        keys: _Keys = set()
        for source in node.all_input_nodes:
            keys |= self.of(source)
        for layer in self._layers(node):
            for tensor in layer.parameters():
                keys |= self._state(tensor)
        return keys

    def written(self, node: fx.Node) -> _Keys:
        keys: _Keys = set()
        for source in mutated_inputs(node, self.module):
            keys |= self.of(source)
        for layer in self._layers(node):
            for tensor in layer.buffers():
                keys |= self._state(tensor)
        return keys

    def _layers(self, node: fx.Node) -> list[nn.Module]:
        """Return the layers that a node calls or, on tiles, that its function takes."""
        attributes = (attribute(self.module, path) for path in attributes_of(node))
        return [layer for layer in attributes if isinstance(layer, nn.Module)]

    def _state(self, tensor: torch.Tensor) -> _Keys:
        return self.of_state.get(id(tensor), set()) | {("state", id(tensor))}
