"""Follow stages: the graph for evaluation is cut where the one for training is.

Example: a layer that training holds on stage 2 runs on stage 2 in evaluation too.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import fx

from gemsc.errors import GemscError
from gemsc.ir import meta
from gemsc.ir.program import Block, Program, Stage
from gemsc.ir.staged import (
    in_order,
    keywords_of_both,
    out_of_order,
    predecessors,
    random_nodes,
    sharing,
)
from gemsc.passes.base import Pass
from gemsc.passes.branches.evaluation import follow_forks


@dataclass(frozen=True, eq=False)
class FollowStages(Pass):
    """Give each node of an evaluation graph the stage that owns its parameters.

    A node without parameters runs where the last of the nodes is that it may not pass;
    nodes that change and use one memory are on one stage. The nodes are put in the
    order of their stages. `owned` are the tensors of each training stage.
    """

    name: ClassVar[str] = "follow-stages"
    requires: ClassVar[tuple[str, ...]] = ("facts",)
    provides: ClassVar[tuple[str, ...]] = ("blocks", "stages", "placement")

    training: Program = field(repr=False)
    owned: tuple[tuple[str, ...], ...] = field(repr=False)

    def apply(self, program: Program) -> Program:
        """Return the program with the training program's stages.

        Raises:
            GemscError: evaluation needs a layer earlier than training's order allows.
        """
        training = self.training
        used = {name for n in training.compute_nodes for name in _tensors(training, n)}
        earlier = predecessors(program)
        together = sharing(program)
        stage_of = dict.fromkeys(program.compute_nodes, 0)
        is_settled = False
        while not is_settled:
            before = dict(stage_of)
            for node, last in before.items():
                first = max([last, *(stage_of[other] for other in earlier[node])])
                stage_of[node] = self._place(program, node, first, used)
            for group in together:
                last = max(stage_of[node] for node in group)
                stage_of.update(dict.fromkeys(group, last))
            is_settled = stage_of == before
        order = sorted(program.compute_nodes, key=stage_of.__getitem__)
        moved, mapping = in_order(program, order)
        groups: list[list[fx.Node]] = [[] for _ in self.training.require_stages()]
        for node in program.compute_nodes:
            groups[stage_of[node]].append(mapping[node])
        return _with_stages(moved, self.training, groups)

    def _place(
        self, program: Program, node: fx.Node, earliest: int, used: set[str]
    ) -> int:
        """Return the first stage from `earliest` on that has what the node needs."""
        stage = earliest
        for name in used.intersection(_tensors(program, node)):
            homes = [i for i, names in enumerate(self.owned) if name in names]
            stage = max(stage, min((h for h in homes if h >= earliest), default=-1))
            if homes[-1] < earliest:
                raise GemscError(
                    f"in evaluation '{node.target}' runs after layers of stage "
                    f"{earliest}, but in training it is on stage {homes[-1]}",
                    at=meta.location(node),
                    help="let evaluation use the layers in the order of training",
                )
        return stage


@dataclass(frozen=True, eq=False)
class FollowShards(Pass):
    """Share the stages of an evaluation graph among ranks as training does.

    `twins` are the nodes of the two graphs; None where they differ in more than
    constants: then branches are where the ranks that hold their weights are.
    """

    name: ClassVar[str] = "follow-shards"
    requires: ClassVar[tuple[str, ...]] = ("stages",)

    training: Program = field(repr=False)
    twins: dict[fx.Node, fx.Node] | None = field(repr=False)

    def apply(self, program: Program) -> Program:
        """Return the program with its shards.

        Raises:
            GemscError: all ranks need in evaluation what one holds.
        """
        found = {}
        for index, training in self.training.shards.items():
            shards = training.for_evaluation(self.twins)
            if self.twins is None and training.placed:
                stage = program.require_stages()[index]
                shards = replace(shards, forks=follow_forks(program, stage, training))
            found[index] = shards
        return replace(program, shards=found)


@dataclass(frozen=True, eq=False)
class FollowOrder(Pass):
    """Put an evaluation graph of the same nodes into the order of the training graph.

    Then the two can be compared node by node.
    """

    name: ClassVar[str] = "follow-order"

    training: Program = field(repr=False)

    def apply(self, program: Program) -> Program:
        """Return the program, on another graph if the order differs."""
        place = {node.name: i for i, node in enumerate(self.training.compute_nodes)}
        nodes = program.compute_nodes
        if {node.name for node in nodes} != place.keys():
            return program
        order = tuple(sorted(nodes, key=lambda node: place[node.name]))
        if order == nodes or out_of_order(program, order):
            return program
        if random_nodes(program, order) != random_nodes(program, nodes):
            return program
        return in_order(program, order)[0]


def _tensors(program: Program, node: fx.Node) -> list[str]:
    """Return the names of the parameters and buffers that a node uses."""
    names = [str(s.target) for s in node.all_input_nodes if s.op == "get_attr"]
    if node.op == "call_module":
        layer = program.module.get_submodule(str(node.target))
        tensors = (*layer.named_parameters(), *layer.named_buffers())
        names += [f"{node.target}.{name}" for name, _ in tensors]
    return [program.aliases.get(name, name) for name in names]


def find_twins(training: Program, evaluation: Program) -> dict[fx.Node, fx.Node] | None:
    """Match the nodes of two graphs that differ in constants only; else return None."""
    ours, theirs = list(training.graph.nodes), list(evaluation.graph.nodes)
    if len(ours) != len(theirs):
        return None
    twins: dict[fx.Node, fx.Node] = {}
    for a, b in zip(ours, theirs, strict=True):
        if a.op != b.op or a.target != b.target:
            return None
        keywords = keywords_of_both(a, b)
        if keywords is None or not _alike(a.args, b.args, twins):
            return None
        if not all(_alike(x, y, twins) for x, y in keywords.values()):
            return None
        if meta.region(a) != meta.region(b):
            return None
        twins[a] = b
    same = training.structure == evaluation.structure
    return twins if same else None


def _alike(a: Any, b: Any, twins: dict[fx.Node, fx.Node]) -> bool:
    if isinstance(a, fx.Node) or isinstance(b, fx.Node):
        return twins.get(a) is b if isinstance(a, fx.Node) else False
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        pairs = zip(a, b, strict=False)
        return len(a) == len(b) and all(_alike(x, y, twins) for x, y in pairs)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_alike(a[k], b[k], twins) for k in a)
    if isinstance(a, slice) and isinstance(b, slice):
        parts = ("start", "stop", "step")
        return all(_alike(getattr(a, p), getattr(b, p), twins) for p in parts)
    return type(a) is type(b)


def _with_stages(
    program: Program, training: Program, groups: list[list[fx.Node]]
) -> Program:
    blocks = tuple(
        Block(index, f"stage{index}", tuple(nodes))
        for index, nodes in enumerate(groups)
    )
    stages = tuple(Stage(block.index, (block,)) for block in blocks)
    return replace(
        program,
        blocks=blocks,
        stages=stages,
        placement=training.placement,
        facts=True,
    )
