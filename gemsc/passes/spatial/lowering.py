"""Lowering: build the graph that one tile runs, node by node."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby

from torch import fx

from gemsc.base.boxes import Box
from gemsc.errors import InternalError
from gemsc.ir import meta
from gemsc.ir.halos import Halos, Need
from gemsc.ir.mutation import elements, memory, mutated_inputs
from gemsc.ir.program import Barrier, Block, Program, Stage
from gemsc.passes.spatial.conversions import Conversions
from gemsc.passes.spatial.values import (
    Layers,
    Local,
    Refused,
)

Rule = Callable[["Lowering", fx.Node], Local | None]  # None: on another rank


@dataclass(eq=False)
class Lowering(Conversions):
    """The state of one run of SplitTiles: what is lowered so far, and the tools.

    Rules read the old graph's nodes, whose values are the whole ones, and create nodes
    of the new graph for tile `self.place` of the stage at hand. With `rings`, keys and
    values that are cut by tokens come part by part.
    """

    rule: Rule
    rings: bool = False
    barriers: list[Barrier] = field(default_factory=list, init=False)
    _elsewhere: list[fx.Node] = field(default_factory=list, init=False)
    _changed: dict[object, set[int]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.layers = Layers(self.program, self.module)

    def run(self) -> Program:
        """Lower every node; return the program, without facts."""
        inputs = self.inputs.add_to(self.graph)
        for node in self.program.graph.nodes:
            if node.op == "get_attr":
                self._env[node] = Local(self.graph.node_copy(node), None)
        stages = []
        for stage in self.program.require_stages():
            self.enter(stage)
            blocks = tuple(self._block(block) for block in stage.blocks)
            stages.append(Stage(stage.index, blocks))
        output = fx.node.map_arg(self.program.output.args, self._result)
        meta.copy_meta(self.program.output, self.graph.output(output[0]))
        stages = self._without_others(stages)
        return replace(
            self.program.with_module(self.module),
            inputs=inputs,
            blocks=tuple(block for stage in stages for block in stage.blocks),
            stages=tuple(stages),
            placement=self.program.placement,
            segments=self.program.segments,
            barriers=tuple(self.barriers),
        )

    def _block(self, block: Block) -> Block:
        self._made, whole = [], set[object]()
        before, elsewhere = self._made_so_far(), len(self._elsewhere)
        while (memory := self._lowered(block, whole)) is not None:
            whole.add(memory)
            self._take_back(*before)
            del self._elsewhere[elsewhere:]
            for node in block.nodes:
                self._flattened.pop(node, None)
        return Block(block.index, block.name, tuple(self._made))

    def _lowered(self, block: Block, whole: Collection[object]) -> object:
        """Lower the nodes of a block; those that share memory in `whole` as a whole.

        Return another memory that has to be, if nodes between which there are others
        share it: what has been made of it is wrong then.
        """
        begun = set[object]()
        for glue, nodes in groupby(block.nodes, meta.glue):
            run = tuple(nodes)
            if glue is not None and self.grid and not self.is_in_branch(run[0]):
                is_whole = glue in whole or not self._lower_run(run)
                if is_whole and glue in begun and glue not in whole:
                    return glue
                if is_whole:
                    self._gather_run(run)
                begun.add(glue)
                continue
            for node in run:
                local = self.lower(node, self.rule if self.grid else Lowering.copy)
                if local is not None:
                    self._env[node] = local
        return None

    def _without_others(self, stages: list[Stage]) -> list[Stage]:
        """Return the stages without what other ranks of their tile compute."""
        gone = set(self._elsewhere)
        self.barriers = [b for b in self.barriers if b.node not in gone]
        for node in reversed(self._elsewhere):
            self.graph.erase_node(node)
        if not gone:
            return stages
        return [
            replace(
                stage,
                blocks=tuple(
                    replace(b, nodes=tuple(n for n in b.nodes if n not in gone))
                    for b in stage.blocks
                ),
            )
            for stage in stages
        ]

    def lower(self, node: fx.Node, rule: Rule) -> Local | None:
        """Lower a node by a rule, or of whole inputs where that refuses."""
        before = self._made_so_far()
        try:
            outcome = self.tried(node, rule)
            if isinstance(outcome, Refused):
                return self.barrier(node, str(outcome))
            return outcome
        finally:  # what it takes of other values, it takes here
            draws = self.is_in_branch(node) and meta.facts(node).random
            for made in self._made[before[0] :]:
                meta.traced_place.set(made, meta.traced_place(node))
                if draws and (made.target == node.target or "draw" in made.kwargs):
                    meta.set_draw(made, self.draw(node))

    def tried(self, node: fx.Node, rule: Rule) -> Local | Refused | None:
        """Return what a rule gives, or why it refused: then nothing is left of it."""
        before = self._made_so_far()
        try:
            return rule(self, node)
        except Refused as refused:
            self._take_back(*before)
            self._flattened.pop(node, None)
            return refused

    def barrier(self, node: fx.Node, reason: str) -> Local:
        """Compute a node on whole inputs, on every tile; report it."""
        inputs: dict[fx.Node, fx.Node] = {}
        num_bytes = 0
        for source in elements(node):
            if self.axes(source) is None and not self.local(source).parts:
                continue
            if not meta.is_one_tensor(source):
                raise InternalError(f"{source.name} cannot be gathered: no tensor")
            inputs[source] = self.whole(source)
            num_bytes += meta.spec(source).num_bytes
        local = self.copy(node, None, inputs=inputs)
        if num_bytes:
            self.barriers.append(Barrier(local.node, reason, num_bytes))
        return local

    @contextmanager
    def on_member(self, number: int) -> Iterator[None]:
        """Lower as this one of the ranks that share our tile; only it keeps the nodes.

        All lower what one of them computes: they have to know what others hold, and to
        count exchanges alike.
        """
        before, tile = len(self._made), self.tile
        self.tile += number - self.member
        try:
            yield
        finally:
            if self.tile != tile:
                self._elsewhere += self._made[before:]
            self.tile = tile

    def needs(self, node: fx.Node, boxes: tuple[Box, ...]) -> tuple[Need, ...]:
        """Return what a node wants of its inputs if its tiles compute `boxes`.

        Everything is lowered before; nothing stays of what the rule makes here.
        """
        before, self.halos = self.halos, Halos({node.name: boxes})
        self._made, self._needs = [], []
        made = self._made_so_far()
        try:
            self.rule(self, node)
        except Refused:
            self._needs = []
        self._take_back(*made)
        self.halos = before
        return tuple(self._needs)

    def _lower_run(self, run: tuple[fx.Node, ...]) -> bool:
        """Lower nodes that share memory, where tiles change their own part alike."""
        before = self._made_so_far()
        for node in run:
            local = self.lower(node, self.rule)
            assert local is not None
            self._env[node] = local
            if not (self._is_beside(node) or self._changes_alike(node)):
                self._take_back(*before)
                return False
        return True

    def _gather_run(self, run: tuple[fx.Node, ...]) -> None:
        for node in run:
            self._flattened.pop(node, None)
            local = self.lower(node, _gathered)
            assert local is not None
            self._env[node] = local

    def _is_beside(self, node: fx.Node) -> bool:
        """Whether a node takes or gives no value whose memory is changed around it.

        Weights that are changed may be those of the layer that it calls: a tile has all
        of them, and calls its layer at the same place.
        """
        module, glue = self.program.module, meta.glue(node)
        if glue not in self._changed:
            around = [n for n in self.program.compute_nodes if meta.glue(n) == glue]
            sources = (s for n in around for s in mutated_inputs(n, module))
            self._changed[glue] = {key for s in sources for key in memory(s)}
        values = (node, *node.all_input_nodes)
        touched = {key for value in values for key in memory(value)}
        return touched.isdisjoint(self._changed[glue])

    def _changes_alike(self, node: fx.Node) -> bool:
        """Whether a lowered node does to its memory what the node does.

        That it does as the same call, of what has been made of that memory and not of
        copies.
        """
        local, glue = self._env[node], meta.glue(node)
        given = {
            self._env[source].node
            for source in node.all_input_nodes
            if meta.glue(source) == glue
        }
        return (
            (local.axes is None or self.probe.is_pointwise(node))
            and local.node.target == node.target
            and given.issubset(local.node.all_input_nodes)
        )

    def _made_so_far(self) -> tuple[int, int, int]:
        """Return how many nodes of the block, barriers and other layers there are."""
        return len(self._made), len(self.barriers), self.layers.num_replaced

    def _take_back(self, nodes: int, barriers: int, layers: int) -> None:
        """Erase what a rule made before it refused: all but the first ones."""
        for node in reversed(self._made[nodes:]):
            self._parts = {k: v for k, v in self._parts.items() if v is not node}
            self._crossed = {
                k: v for k, v in self._crossed.items() if v.node is not node
            }
            self.graph.erase_node(node)
        del self._made[nodes:]
        del self.barriers[barriers:]
        self.layers.take_back(layers)

    def _result(self, node: fx.Node) -> fx.Node:
        """Return an output of the model where it was computed."""
        if node.op == "placeholder":
            return self.inputs.any_of(node)
        return self._env[node].node


def _gathered(low: Lowering, node: fx.Node) -> Local:
    return low.barrier(node, "it shares memory that is changed in place")
