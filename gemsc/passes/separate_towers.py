"""Separate towers: branches worth a stage of their own stand one after the other.

Example, a model that calls two encoders in turn (t of text, i of images):
    t0 i0 t1 i1 scale(t1) scale(i1) matmul
    -> t0 t1 scale(t1) | i0 i1 scale(i1) | matmul   # no block lies across a bar
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from torch import fx

from gemsc.ir import meta
from gemsc.ir.program import Program
from gemsc.ir.staged import in_order, predecessors, random_nodes
from gemsc.passes.base import Pass

Nodes = tuple[fx.Node, ...]


@dataclass(frozen=True)
class SeparateTowers(Pass):
    """Find the towers of a model and let no other node stand between theirs.

    Towers are what two inputs of a node, their *join*, are computed from without each
    other: neither needs a value of the other, so that both can run at once. What both
    need goes before them, if it is not computed from parameters alone: weights are not
    sent. A tower has at least two heavy nodes and `share` of the predicted time; there
    may be towers inside of it. A single heavy node behind a value that others need as
    well (the keys that a decoder computes from an encoder) is the join's.

    All other nodes keep their order, and so must those that draw random numbers: where
    towers that are called in turn draw some, the graph stays as it is. What else may
    not pass each other says `gemsc.ir.staged.predecessors`.
    """

    requires = ("facts",)
    provides = ("towers",)

    share: float = 1 / 8

    def apply(self, program: Program) -> Program:
        """Return the program with its towers, on another graph if nodes must move."""
        nodes = program.compute_nodes
        needed = _needed(program)
        towers = _Finder(nodes, needed, self.share).towers()
        extended = [_with_changes(tower, needed) for tower in towers]
        order = nodes
        for tower in extended:
            order = _gathered(order, tower, needed)
        if random_nodes(program, order) != random_nodes(program, nodes):
            return replace(program, towers=())
        rows = filter(None, (_row(order, tower) for tower in extended))
        there = tuple(sorted(rows, key=lambda row: order.index(row[0])))
        if order == nodes:
            return replace(program, towers=there)
        moved, copy = in_order(program, order)
        there = tuple(tuple(copy[node] for node in tower) for tower in there)
        return replace(moved, towers=there, facts=True)


def _needed(program: Program) -> dict[fx.Node, int]:
    """Return which nodes each one needs, itself among them: a bit for each place.

    Who needs a part of a tuple needs all parts: they are never cut from each other.
    """
    place = {node: i for i, node in enumerate(program.compute_nodes)}
    earlier = predecessors(program)
    glued: dict[int | None, list[fx.Node]] = {}
    needed: dict[fx.Node, int] = {}
    for node in place:
        sources = [source for source in node.all_input_nodes if source in place]
        parts = {node}
        if len(sources) == 1 and not meta.is_one_tensor(sources[0]):
            parts |= {user for user in sources[0].users if user in place}
        bits = sum(1 << place[part] for part in parts)
        before = [*earlier[node], *glued.get(meta.glue(node), ())]
        needed[node] = reduce(operator.or_, (needed[s] for s in before), bits)
        if meta.glue(node) is not None:  # these stay in one block
            glued[meta.glue(node)] = [node]
    return needed


class _Finder:
    """Finds towers: sets of nodes are bits, one for each place in the graph."""

    def __init__(self, nodes: Nodes, needed: dict[fx.Node, int], share: float) -> None:
        self.nodes, self.needed = nodes, needed
        self.place = {node: i for i, node in enumerate(nodes)}
        facts = [meta.facts(node) for node in nodes]
        self.heavy = sum(1 << i for i, fact in enumerate(facts) if fact.heavy)
        self.seconds = [fact.seconds for fact in facts]
        self.least = share * sum(self.seconds)

    def towers(self) -> list[frozenset[fx.Node]]:
        """Return the towers of all joins, each before those inside of it."""
        weights, towers = self._weights(), list[int]()
        for node in self.nodes:
            sources = [s for s in node.all_input_nodes if s in self.place]
            inputs = sorted({self.needed[source] for source in sources})
            for parts in _apart(inputs, weights):
                some = self._worth_a_stage(parts)
                some = self._worth_a_stage(map(self._without_last_layer, some))
                if len(some) > 1 and all(_nested(a, b) for a in some for b in towers):
                    towers += [tower for tower in some if tower not in towers]
        towers.sort(key=int.bit_count, reverse=True)
        return [frozenset(self.nodes[i] for i in _bits(tower)) for tower in towers]

    def _weights(self) -> int:
        """Return which nodes are computed from parameters alone."""
        fed = weights = 0
        for i, node in enumerate(self.nodes):
            if any(source.op == "placeholder" for source in node.all_input_nodes):
                fed |= 1 << i
        for i, node in enumerate(self.nodes):
            if meta.needs_gradient(node) and not self.needed[node] & fed:
                weights |= 1 << i
        return weights

    def _worth_a_stage(self, parts: Iterable[int]) -> list[int]:
        return [
            part
            for part in parts
            if (part & self.heavy).bit_count() > 1
            and sum(self.seconds[i] for i in _bits(part)) >= self.least
        ]

    def _without_last_layer(self, part: int) -> int:
        """Leave out a last heavy node if others need the value that it starts from."""
        for i in _bits(part):
            places = [self.place[u] for u in self.nodes[i].users if u in self.place]
            if all(part >> place & 1 for place in places):
                continue
            others = part & ~(1 << i)
            if sum(self._needs(b, i) for b in _bits(others & self.heavy)) == 1:
                part &= ~sum(1 << b for b in _bits(others) if self._needs(b, i))
        return part

    def _needs(self, place: int, other: int) -> bool:
        return bool(self.needed[self.nodes[place]] >> other & 1)


def _apart(inputs: Sequence[int], weights: int) -> Iterator[list[int]]:
    """Yield what inputs need apart from each other; then so for those that share some.

    Of three inputs that need ax, bx and c these are abx and c, then a and b.
    """
    if len(inputs) < 2:
        return
    common = reduce(operator.and_, inputs) & ~weights
    groups: list[tuple[int, list[int]]] = []
    for needed in inputs:
        part, members = needed & ~common, [needed]
        for group in [group for group in groups if group[0] & part]:
            groups.remove(group)
            part, members = part | group[0], [*members, *group[1]]
        groups.append((part, members))
    if len(groups) > 1:
        yield [part for part, _ in groups]
        for _, members in groups:
            yield from _apart(members, weights)


def _nested(a: int, b: int) -> bool:
    return a & b in (0, a, b)


def _bits(number: int) -> Iterator[int]:
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


def _with_changes(
    tower: frozenset[fx.Node], needed: dict[fx.Node, int]
) -> frozenset[fx.Node]:
    """Return a tower with the changes of its weights that come behind their last use.

    These need nothing of the model's inputs that the tower does not need.
    """
    glues = {meta.glue(node) for node in tower} - {None}
    wanted = reduce(operator.or_, (needed[node] for node in tower))
    fed = [any(s.op == "placeholder" for s in node.all_input_nodes) for node in needed]
    others = sum(1 << i for i, is_fed in enumerate(fed) if is_fed) & ~wanted
    changes = (n for n in needed if meta.glue(n) in glues and not needed[n] & others)
    return tower.union(changes)


def _gathered(
    order: Nodes, tower: frozenset[fx.Node], needed: dict[fx.Node, int]
) -> Nodes:
    """Return the nodes with those of a tower in one piece.

    What stands between them goes before the tower if it is needed there, else behind.
    """
    inside = [i for i, node in enumerate(order) if node in tower]
    first, last = inside[0], inside[-1] + 1
    span = order[first:last]
    wanted = reduce(operator.or_, (needed[node] for node in tower))
    before = [n for n in span if n not in tower and needed[n] & ~wanted == 0]
    members = [node for node in span if node in tower]
    behind = [n for n in span if n not in tower and n not in before]
    return (*order[:first], *before, *members, *behind, *order[last:])


def _row(order: Nodes, tower: frozenset[fx.Node]) -> Nodes:
    """Return the nodes of a tower in order, none if others stand between them."""
    first = next(i for i, node in enumerate(order) if node in tower)
    row = order[first : first + len(tower)]
    return row if tower.issuperset(row) else ()
