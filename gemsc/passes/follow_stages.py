"""Follow stages: another graph of a model is cut where the first one is.

Example: a layer that training holds on stage 2 runs on stage 2 in evaluation too, and
in the other phases of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

from torch import fx

from gemsc.base.elementwise import check_elementwise
from gemsc.errors import GemscError
from gemsc.ir import meta
from gemsc.ir.flow import layer_path, unique_names, used_tensors
from gemsc.ir.opaque import changed_inside
from gemsc.ir.program import Block, Program, Stage
from gemsc.ir.shards import Fork, StageShards
from gemsc.ir.staged import (
    in_order,
    keywords_of_both,
    out_of_order,
    predecessors,
    random_nodes,
    sharing,
)
from gemsc.passes.base import Pass
from gemsc.passes.branches.assignment import ALL
from gemsc.passes.branches.candidates import ForkChoice, heaviest
from gemsc.passes.branches.forks import Finder, ForkWindow
from gemsc.passes.shards.analysis import analysis_of
from gemsc.passes.shards.trunk import choose_trunk


@dataclass(frozen=True, eq=False)
class FollowStages(Pass):
    """Give each node of another graph the stage that owns its parameters.

    A node without parameters runs where the last of the nodes is that it may not pass;
    nodes that change and use one memory are on one stage. The nodes are put in the
    order of their stages, and keep their blocks, if they have some. `owned` are the
    tensors of each stage of `training`, the first graph; `what` is the other one. If
    its nodes are `twins` of the first one's nodes, by names, each is where its twin is.
    """

    requires = ("facts",)
    provides = ("blocks", "stages", "placement")

    training: Program = field(repr=False)
    owned: tuple[tuple[str, ...], ...] = field(repr=False)
    what: str = "evaluation"
    twins: Mapping[str, fx.Node] | None = field(default=None, repr=False)

    def apply(self, program: Program) -> Program:
        """Return the program with the stages of the first one.

        Raises:
            GemscError: it needs a layer earlier than the order of stages allows.
        """
        places = self._by_owners(program) if self.twins is None else self._by_twins()
        moved, mapping = in_order(program, places)
        groups: list[list[tuple[str, fx.Node | None]]] = [
            [] for _ in self.training.require_stages()
        ]
        for node, (index, name) in places.items():
            groups[index].append((name, mapping[node]))
        return _with_stages(moved, self.training, groups)

    def _by_twins(self) -> dict[fx.Node, tuple[int, str]]:
        """Return the stage and the block of each node, in their order."""
        assert self.twins is not None
        placed: dict[fx.Node, tuple[int, str]] = {}
        for stage in self.training.require_stages():
            for block in stage.blocks:
                for node in block.nodes:
                    twin = self.twins[meta.copy_of(node) or node.name]
                    placed.setdefault(twin, (stage.index, block.name))
        return placed

    def _by_owners(self, program: Program) -> dict[fx.Node, tuple[int, str]]:
        """Return the same where the two graphs are not alike."""
        training = self.training
        used = set(used_tensors(training, training.compute_nodes))
        earlier = predecessors(program)
        groups = sharing(program)
        stage_of = dict.fromkeys(program.compute_nodes, 0)
        is_settled = False
        while not is_settled:
            before = dict(stage_of)
            for node, last in before.items():
                first = max([last, *(stage_of[other] for other in earlier[node])])
                stage_of[node] = self._place(program, node, first, used)
            for group in groups:
                last = max(stage_of[node] for node in group)
                stage_of.update(dict.fromkeys(group, last))
            is_settled = stage_of == before
        order = sorted(program.compute_nodes, key=stage_of.__getitem__)
        names = {n: block.name for block in program.blocks or () for n in block.nodes}
        return {n: (i := stage_of[n], names.get(n, f"stage{i}")) for n in order}

    def _place(
        self, program: Program, node: fx.Node, earliest: int, used: set[str]
    ) -> int:
        """Return the first stage from `earliest` on that has what the node needs."""
        stage = earliest
        for name in used.intersection(used_tensors(program, [node])):
            homes = [i for i, names in enumerate(self.owned) if name in names]
            stage = max(stage, min((h for h in homes if h >= earliest), default=-1))
            if homes[-1] < earliest:
                raise GemscError(
                    f"in {self.what} '{node.target}' runs after layers of stage "
                    f"{earliest}, but in training it is on stage {homes[-1]}",
                    at=meta.location(node),
                    help=f"let {self.what} use the layers in the order of training",
                )
        return stage


@dataclass(frozen=True, eq=False)
class FollowShards(Pass):
    """Share the stages of another graph among ranks as those of the first one are.

    `twins` are the names of its nodes by those of the first one's; None where they
    differ in more than constants. Then branches are where the ranks that hold their
    weights are, and values outside of what is cut are held as `trunk` says.
    """

    requires = ("stages",)

    training: Program = field(repr=False)
    twins: Mapping[str, str] | None = field(repr=False)
    trunk: str = "whole"
    what: str = "evaluation"

    def apply(self, program: Program) -> Program:
        """Return the program with its shards.

        Raises:
            GemscError: all ranks need what one holds, or the optimizer of this graph
                does not update element by element what is cut.
        """
        by_stage = {}
        for index, training in self.training.shards.items():
            if self.twins is not None:
                by_stage[index] = training.renamed(self.twins)
                continue
            stage, forks = program.require_stages()[index], tuple[Fork, ...]()
            if training.placed:
                forks = follow_forks(program, stage, training, self.what)
            shards = replace(training, trunk="whole", split=(), forks=forks)
            placement = self.training.placement
            if placement is None or not placement.grid(index).tiles:
                analysis = analysis_of(program, stage)
                trunk, split = choose_trunk(analysis, shards, self.trunk)
                shards = replace(shards, trunk=trunk, split=split)
            by_stage[index] = shards
        names = [[tensor.name for tensor in stage.cut] for stage in by_stage.values()]
        check_elementwise(program.updated_whole(), *names)
        return replace(program, shards=by_stage)


@dataclass(frozen=True, eq=False)
class FollowOrder(Pass):
    """Put an evaluation graph of the same nodes into the order of the training graph.

    Then the two can be compared node by node.
    """

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
        changed = changed_inside(b, evaluation.module)
        if not {*changed} <= {*changed_inside(a, training.module)}:
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
    program: Program, training: Program, groups: list[list[tuple[str, fx.Node | None]]]
) -> Program:
    """Return the program with a stage for each group of nodes, by their blocks."""
    runs = [
        (index, name, tuple(node for _, node in inside))
        for index, nodes in enumerate(groups)
        for name, inside in groupby(nodes or [(f"stage{index}", None)], itemgetter(0))
    ]
    names = unique_names(name for _, name, _ in runs)
    blocks = tuple(
        Block(number, name, tuple(node for node in nodes if node is not None))
        for number, (name, (_, _, nodes)) in enumerate(zip(names, runs, strict=True))
    )
    stages = tuple(
        Stage(
            index,
            tuple(b for b, run in zip(blocks, runs, strict=True) if run[0] == index),
        )
        for index in range(len(groups))
    )
    return replace(
        program,
        blocks=blocks,
        stages=stages,
        placement=training.placement,
        facts=True,
    )


def follow_forks(
    program: Program, stage: Stage, training: StageShards, what: str
) -> tuple[Fork, ...]:
    """Return forks in which each rank computes what it alone holds the weights of.

    Raises:
        GemscError: a layer that one rank holds is in no branch in this graph.
    """
    holders = dict(training.placed)
    owners = {
        node: {holders[n] for n in used_tensors(program, [node]) if n in holders}
        for node in stage.nodes
    }
    finder = Finder(program, stage, {})
    ends = {finder.position[node] for node in stage.nodes if owners[node]}
    choices: list[ForkChoice] = []
    for join, added in finder.joins():
        for window in finder.windows(join, added, ends):
            choices += _followed(finder, window, owners)
        if any(choice.last == join for choice in choices):
            ends.add(join)  # as in training: a fork may begin behind another one
    forks = tuple(choice.fork() for choice in heaviest(choices))
    inside = {name for fork in forks for b in fork.branches for name in b.nodes}
    needed = [node for node in stage.nodes if owners[node] and node.name not in inside]
    if needed:
        paths = dict.fromkeys(map(layer_path, needed))
        raise GemscError(
            f"'{layer_path(needed[0])}' is in a branch of one rank in training, but "
            f"all ranks need it in {what}",
            at=meta.location(needed[0]),
            help=f"keep it whole: --whole {','.join(paths)}",
        )
    return tuple(replace(fork, saved=0.0) for fork in forks)


def _followed(
    finder: Finder, window: ForkWindow, owners: dict[fx.Node, set[int]]
) -> Iterator[ForkChoice]:
    """Yield the window as a fork, if each component needs what one rank holds."""
    needed = [{r for n in c.nodes for r in owners[n]} for c in window.components]
    ranks = [next(iter(holders), ALL) for holders in needed]
    stays = [c.stays for c, r in zip(window.components, ranks, strict=True) if r != ALL]
    if stays and not any(stays) and all(len(holders) < 2 for holders in needed):
        covered = sum(bool(owners[n]) for c in window.components for n in c.nodes)
        yield ForkChoice.of(finder, window, ranks, float(covered))
