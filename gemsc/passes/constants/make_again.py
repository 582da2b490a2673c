"""Make again: what a stage can make of constants is not sent to it.

Example, the causal mask of a transformer on two stages:
    stage 0: mask = triu(ones(t, t), 1); y = block0(x, mask)    # before
    stage 1: z = block1(y, mask)                  # y and mask come from stage 0
    stage 0: mask = triu(ones(t, t), 1); y = block0(x, mask)    # after
    stage 1: mask_1 = triu(ones(t, t), 1); z = block1(y, mask_1)        # y comes
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from torch import fx

from gemsc.base.grid_shape import GridShape
from gemsc.costs.hardware import LinkSpeed
from gemsc.ir import meta
from gemsc.ir.constants import constant_nodes
from gemsc.ir.flow import makers, used_tensors
from gemsc.ir.holder import copied_graph
from gemsc.ir.program import Program, Stage
from gemsc.ir.staged import moved
from gemsc.passes.base import Pass

_Copies = dict[int, dict[fx.Node, fx.Node]]  # of nodes, by the stage that has them


@dataclass(frozen=True)
class MakeAgain(Pass):
    """Copy nodes of constants into the stages that use what they give.

    A mask, a table of positions: what depends on shapes and constants only. A stage on
    one rank makes it once, not for each micro-batch; so does the stage that would have
    sent it. The ranks of a grid make it each time, and only where that takes no longer
    than the message, which keeps both ends busy. Values that have nodes in common are
    made together or not at all. Random numbers are drawn once, what learns or changes
    is in one place.

    `link` connects two stages, `grids` are on several ranks; `changing` are buffers
    that change, though not in this graph.
    """

    requires = ("facts", "stages")

    link: LinkSpeed
    grids: tuple[GridShape, ...] = ()
    changing: frozenset[str] = field(default=frozenset(), repr=False)

    def apply(self, program: Program) -> Program:
        """Return the program, on another graph if anything is made again."""
        wanted = self._wanted(program)
        if not wanted:
            return program
        graph, mapping = copied_graph(program.graph)
        program = moved(program, graph, mapping)
        copies: _Copies = {}
        for dest, nodes in wanted.items():
            here = [mapping[node] for node in nodes]
            copies[dest] = _copied(program, dest, here)
        program = _with_copies(program, copies)
        pairs = chain.from_iterable(nodes.items() for nodes in copies.values())
        again = set(chain.from_iterable(pairs))
        again |= {item for node in again for item in _items(node)}
        for stage in program.require_stages():
            if self._makes_once(program, stage):
                _mark(node for node in stage.nodes if node in again)
        return program

    def _makes_once(self, program: Program, stage: Stage) -> bool:
        """Whether one rank runs a stage, of which it takes the device from weights."""
        parameters = dict(program.module.named_parameters())
        used = used_tensors(program, stage.nodes)
        is_split = bool(self.grids and self.grids[stage.index])
        return not is_split and any(name in parameters for name in used)

    def _wanted(self, program: Program) -> dict[int, list[fx.Node]]:
        """Return the nodes that each stage makes again, in order."""
        constant = constant_nodes(program, self.changing)
        stage_of = program.stage_of
        place = {node: i for i, node in enumerate(program.compute_nodes)}
        crossing: dict[int, list[fx.Node]] = defaultdict(list)
        for value in filter(constant.__contains__, place):
            for dest in {stage_of[u] for u in value.users if u in stage_of}:
                if dest != stage_of[value]:
                    crossing[dest].append(value)
        stages = program.require_stages()
        cheap = {s.index for s in stages if self._makes_once(program, s)}
        wanted: dict[int, list[fx.Node]] = {}
        for dest, values in sorted(crossing.items()):
            nodes: set[fx.Node] = set()
            for group, made in _groups(values):
                seconds = sum(meta.facts(node).forward_seconds for node in made)
                sent = sum(meta.facts(node).output_bytes for node in group)
                if dest in cheap or seconds <= 2 * self.link.seconds(sent):
                    nodes |= made
            if nodes:
                wanted[dest] = sorted(nodes, key=place.__getitem__)
        return wanted


def _groups(
    values: Sequence[fx.Node],
) -> list[tuple[list[fx.Node], set[fx.Node]]]:
    """Return values that have nodes in common together, with all that makes them."""
    groups: list[tuple[list[fx.Node], set[fx.Node]]] = []
    for value in values:
        group, made = [value], makers(value)
        apart = []
        for others, theirs in groups:
            if made & theirs:
                group, made = others + group, made | theirs
            else:
                apart.append((others, theirs))
        groups = [*apart, (group, made)]
    return groups


def _items(node: fx.Node) -> Iterable[fx.Node]:
    """Return what takes a value out of a tuple: a block is given tensors only."""
    return () if meta.is_one_tensor(node) else node.users


def _copied(
    program: Program, dest: int, nodes: Iterable[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Put copies before what uses them in a stage, which then takes the copies."""
    nodes = tuple(nodes)
    stage = program.require_stages()[dest]
    inside = set(stage.nodes)
    users = {user for node in nodes for user in node.users if user in inside}
    first = next(node for node in stage.nodes if node in users)
    copies: dict[fx.Node, fx.Node] = {}
    with program.graph.inserting_before(first):
        for node in nodes:
            copy = program.graph.node_copy(node, lambda n: copies.get(n, n))
            meta.copy_of.set(copy, node.name)
            copies[node] = copy
    for node, copy in copies.items():
        for user in [user for user in node.users if user in inside]:
            user.replace_input_with(node, copy)
    _rename_memory(dest, stage.nodes, copies.values())
    return copies


def _mark(nodes: Iterable[fx.Node]) -> None:
    """Say that nodes run once, which takes no time of a micro-batch."""
    for node in nodes:
        meta.is_made_once.set(node, True)
        facts = replace(meta.facts(node), forward_seconds=0.0, forward_launches=0.0)
        meta.facts.set(node, facts)


def _rename_memory(
    dest: int, nodes: Iterable[fx.Node], copies: Collection[fx.Node]
) -> None:
    """Say that copies, and what a stage keeps of them, are in memory of their own."""
    keys = {key for node in copies for key, _ in meta.facts(node).storages}
    new = {key: -1 - abs(hash((key, dest))) for key in keys}

    def renamed(storages: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        return tuple((new.get(key, key), size) for key, size in storages)

    for node in (*copies, *nodes):
        facts = meta.facts(node)
        known = renamed(facts.storages), renamed(facts.saved)
        meta.facts.set(node, replace(facts, storages=known[0], saved=known[1]))


def _with_copies(program: Program, copies: _Copies) -> Program:
    """Return the program with its copies in the blocks that use them first."""
    unused = _erase_unused(program, copies)
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    stages = []
    for stage in program.require_stages():
        made = [*copies.get(stage.index, {}).values()]
        blocks = []
        for block in stage.blocks:
            kept = [node for node in block.nodes if node not in unused]
            inside = [node for node in made if order[node] < order[kept[-1]]]
            made = made[len(inside) :]
            nodes = tuple(sorted((*inside, *kept), key=order.__getitem__))
            blocks.append(replace(block, nodes=nodes))
        stages.append(replace(stage, blocks=tuple(blocks)))
    skips = (s for s in program.skips or () if s.value not in unused)
    return replace(
        program,
        stages=tuple(stages),
        blocks=tuple(block for stage in stages for block in stage.blocks),
        skips=tuple(s for s in skips if s.value in s.last_use.all_input_nodes),
    )


def _erase_unused(program: Program, copies: _Copies) -> set[fx.Node]:
    """Erase what nothing uses any more, and return it; no block is left empty."""
    left = {block.index: len(block.nodes) for block in program.blocks or ()}
    block_of = {n: b.index for b in program.blocks or () for n in b.nodes}
    copied = {node for nodes in copies.values() for node in nodes}
    erased = set()
    for node in reversed(program.compute_nodes):
        if node in copied and not node.users and left[block_of[node]] > 1:
            left[block_of[node]] -= 1
            program.graph.erase_node(node)
            erased.add(node)
    return erased
