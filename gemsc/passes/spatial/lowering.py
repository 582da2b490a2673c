"""Lowering: build the graph that one tile runs, node by node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from operator import getitem
from typing import Any

from torch import Tensor, fx

from gemsc.base.boxes import Box, everything, is_inside, shape_of
from gemsc.base.grid_shape import ALONE, GridShape
from gemsc.base.parts import Part
from gemsc.errors import InternalError
from gemsc.ir import meta
from gemsc.ir.halos import Halos, Need
from gemsc.ir.holder import attribute, with_graph
from gemsc.ir.layout import Layout
from gemsc.ir.mutation import elements
from gemsc.ir.opaque import has_own_backward
from gemsc.ir.program import Barrier, Block, Program, Stage
from gemsc.ir.shape_grid import ShapeGrid
from gemsc.ir.shards import StageShards
from gemsc.messages.exchange import Exchange
from gemsc.passes.spatial.classify import Probe
from gemsc.passes.spatial.cuts import Axes, coordinates, cut, fits, num_tiles
from gemsc.passes.spatial.inputs import Placeholders
from gemsc.passes.spatial.values import (
    Flattened,
    Layers,
    Local,
    Refused,
    annotate_part,
    covers,
    held_boxes,
    held_parts,
    last_axes,
    local_sizes,
    refined,
    unfolded,
    whole_shape,
)
from gemsc.runtime import tiles

Rule = Callable[["Lowering", fx.Node], Local | None]  # None: on another rank
PartsOf = Callable[[fx.Node], tuple[Part, ...]]


def _of_all(node: fx.Node) -> tuple[Part, ...]:
    """Return that each rank of a tile has all of a value."""
    return ()


class Lowering:
    """The state of one run of SplitTiles: what is lowered so far, and the tools.

    Rules read the old graph's nodes, whose values are the whole ones, and create nodes
    of the new graph for tile `self.place` of the stage at hand.
    """

    def __init__(
        self,
        program: Program,
        grids: tuple[GridShape, ...],
        tile: int,
        probe: Probe,
        rule: Rule,
        halos: Halos | None = None,
        *,
        training: bool = True,
    ) -> None:
        self.program = program
        self.probe = probe
        self.module = with_graph(program.module, fx.Graph())
        self.graph = self.module.graph
        self.grid: tuple[int, ...] = ()  # parts along the axes of the stage at hand
        self._form = ALONE  # of the stage at hand
        self._tile = tile  # beyond the grid it begins anew
        self._stage = 0  # the one at hand
        self._made: list[fx.Node] = []
        self._elsewhere: list[fx.Node] = []  # see `on_member`
        self._parts: dict[tuple[Any, ...], fx.Node] = {}
        self._exchanges: dict[Any, Exchange] = {}
        self.barriers: list[Barrier] = []
        self._rule = rule
        self._training = training
        self._grids = grids
        self._stage_of = {
            node: stage.index
            for stage in program.require_stages()
            for node in stage.nodes
        }
        self._env: dict[fx.Node, Local] = {}
        self._replaced: dict[fx.Node, Local] = {}  # see `instead`
        self.parts_of: PartsOf = _of_all  # see `sharing`
        self.is_addend = False
        self._crossed: dict[tuple[fx.Node, int], Local] = {}
        self._flattened: dict[fx.Node, Flattened] = {}
        self._halos = halos or Halos()
        self._needs: list[Need] = []
        self.layers = Layers(program, self.module)
        self.inputs = Placeholders(program, grids, tile, self._halos.inputs, probe)

    # ------------------------------------------------------------ run

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
        self._made = []
        for glue, nodes in groupby(block.nodes, meta.glue):
            run = tuple(nodes)
            if glue is not None and self.grid and not self.is_in_branch(run[0]):
                self._lower_run(run)
                continue
            for node in run:
                local = self.lower(node, self._rule) if self.grid else self.copy(node)
                if local is not None:
                    self._env[node] = local
        return Block(block.index, block.name, tuple(self._made))

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
            found = self.tried(node, rule)
            if isinstance(found, Refused):
                return self.barrier(node, str(found))
            return found
        finally:  # what it takes of other values, it takes here
            for made in self._made[before[0] :]:
                meta.set_traced_place(made, meta.traced_place(node))

    def tried(self, node: fx.Node, rule: Rule) -> Local | Refused | None:
        """Return what a rule gives, or why it refused: then nothing is left of it."""
        before = self._made_so_far()
        try:
            return rule(self, node)
        except Refused as refused:
            self._take_back(*before)
            self._flattened.pop(node, None)
            return refused

    def _lower_run(self, run: tuple[fx.Node, ...]) -> None:
        """Lower nodes that share memory: the tile's own part, or all of it whole."""
        before = self._made_so_far()
        for node in run:
            local = self.lower(node, self._rule)
            assert local is not None
            self._env[node] = local
            if not self._changes_alike(node, run):
                break
        else:
            return
        self._take_back(*before)
        for node in run:
            self._flattened.pop(node, None)
            reason = "it shares memory that is changed in place"
            self._env[node] = self.barrier(node, reason)

    def _changes_alike(self, node: fx.Node, run: tuple[fx.Node, ...]) -> bool:
        """Whether a lowered node does to the run's memory what the node does.

        That it does as the same call, of what the run has made and not of copies.
        """
        local = self._env[node]
        given = {self._env[s].node for s in node.all_input_nodes if s in run}
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

    @contextmanager
    def instead(self, locals_: Mapping[fx.Node, Local]) -> Iterator[None]:
        """Let rules find other values for these nodes."""
        before, self._replaced = self._replaced, {**self._replaced, **locals_}
        try:
            yield
        finally:
            self._replaced = before

    @contextmanager
    def sharing(self, parts: PartsOf, *, addend: bool) -> Iterator[None]:
        """Let shards have these parts of the results that rules for tiles create.

        What they create may be an `addend` of the result.
        """
        self.parts_of, self.is_addend = parts, addend
        try:
            yield
        finally:
            self.parts_of, self.is_addend = _of_all, False

    @contextmanager
    def on_member(self, number: int) -> Iterator[None]:
        """Lower as this one of the ranks that share our tile; only it keeps the nodes.

        All lower what one of them computes: they have to know what others hold, and to
        count exchanges alike.
        """
        before, tile = len(self._made), self._tile
        self._tile += number - self.member
        try:
            yield
        finally:
            if self._tile != tile:
                self._elsewhere += self._made[before:]
            self._tile = tile

    @property
    def stage(self) -> Stage:
        """The stage at hand."""
        return self.program.require_stages()[self._stage]

    @property
    def shards(self) -> StageShards | None:
        """How the stage at hand is shared, None if its ranks share no channels."""
        return self.program.shards.get(self._stage)

    def is_in_branch(self, node: fx.Node) -> bool:
        """Whether one rank of the stage at hand computes a node, for its branch."""
        return self.shards is not None and node.name in self.shards.rank_of

    def is_in_fork(self, node: fx.Node) -> bool:
        """Whether a node is in a branch, or one of those that join them."""
        return self.shards is not None and node.name in self.shards.fork_of

    def split_axes(self, node: fx.Node) -> Axes | None:
        """Return how a trunk that is split cuts a value; None if all hold all of it."""
        assert self.shards is not None
        dim = self.shards.split_dims.get(node.name)
        if dim is None or dim < 0:
            return None
        rank, axis = len(whole_shape(node)), len(self.pictures)
        return tuple(axis if d == dim else None for d in range(rank))

    def is_split(self, stage: Stage) -> bool:
        """Whether a stage has a grid."""
        return bool(self._grids[stage.index])

    def enter(self, stage: Stage) -> None:
        """Let a stage be the one at hand."""
        self._stage, self._form = stage.index, self._grids[stage.index]
        self.grid = self._form.axes

    def needs(self, node: fx.Node, boxes: tuple[Box, ...]) -> tuple[Need, ...]:
        """Return what a node wants of its inputs if its tiles compute `boxes`.

        Everything is lowered before; nothing stays of what the rule makes here.
        """
        before, self._halos = self._halos, Halos({node.name: boxes})
        self._made, self._needs = [], []
        made = self._made_so_far()
        try:
            self._rule(self, node)
        except Refused:
            self._needs = []
        self._take_back(*made)
        self._halos = before
        return tuple(self._needs)

    # ------------------------------------------------ the tile at hand

    @property
    def place(self) -> int:
        """The number of the tile at hand in the stage's grid."""
        return self._tile % num_tiles(self.grid)

    @property
    def here(self) -> ShapeGrid:
        """The stage's grid, as an argument of operations on tiles."""
        return ShapeGrid(self._tile, self.tiles)

    @property
    def tiles(self) -> int:
        """How many tiles the stage's grid has, each counted for all of its shards."""
        return num_tiles(self.grid)

    @property
    def pictures(self) -> tuple[int, ...]:
        """The parts along the axes of pictures; () where the ranks share none."""
        return self._form.tiles

    @property
    def beside(self) -> tuple[int, ...]:
        """The ranks that share the same part of pictures; () for all."""
        return self.among([len(self.pictures)])

    @property
    def member(self) -> int:
        """The number of the rank among those that share its part of pictures."""
        return self.place % self._form.beside

    def by_rank(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        """Return what each rank has, of what each shard has."""
        return tuple(parts) * (self.tiles // len(parts)) if parts else ()

    def owned(self, shape: tuple[int, ...], axes: Axes | None) -> tuple[Box, ...]:
        """Return what each tile of the stage holds of a value with these axes."""
        return held_boxes(shape, axes, self.grid)

    def sizes(self, node: fx.Node, axes: Axes) -> tuple[int, ...]:
        """Return the sizes of the rank's own part of a value with these axes."""
        box = self.owned(self.shape(node), axes)[self.place]
        return local_sizes(shape_of(box), self._held_parts_of(node), self.place)

    def share(self, shape: tuple[int, ...], axes: Axes) -> float:
        """Return the part of all elements that the tile at hand holds."""
        part = 1.0
        place = coordinates(self.grid, self.place)
        for size, axis in zip(shape, axes, strict=True):
            if axis is not None:
                start, stop = cut(size, self.grid[axis])[place[axis]]
                part *= (stop - start) / size
        return part

    def among(self, axes: Iterable[int | None]) -> tuple[int, ...]:
        """Return the tiles that differ from ours along these axes only; () for all."""
        free = set(axes)
        ours = coordinates(self.grid, self.place)
        tiles = tuple(
            tile
            for tile in range(self.tiles)
            if all(
                axis in free or place == ours[axis]
                for axis, place in enumerate(coordinates(self.grid, tile))
            )
        )
        return () if len(tiles) == self.tiles else tiles

    def require_all_axes(self, axes: Axes) -> None:
        """See that no two tiles have the same part of a value with these axes.

        Raises:
            Refused: some have, as of a sum over rows that leaves columns cut.
        """
        if {axis for axis in axes if axis is not None} != {
            axis for axis, parts in enumerate(self.grid) if parts > 1
        }:
            raise Refused("it is cut along some axes of the grid only")

    def draw(self, node: fx.Node) -> int:
        """Return the number of a node that draws, of its own in the stage."""
        return self.stage.nodes.index(node)

    # --------------------------------------------- what rules look up

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """Return the shape of a whole value as it is held; () for what is no tensor."""
        flattened = self.flattened(node)
        return whole_shape(node) if flattened is None else flattened.shape

    def flattened(self, node: fx.Node) -> Flattened | None:
        """Return how a value is held that was flattened, None for others."""
        local = self._replaced.get(node)
        return self._flattened.get(node) if local is None else local.flattened

    def _held_parts_of(self, node: fx.Node) -> tuple[Part, ...]:
        """Return what shards have of a result, as it is held."""
        return held_parts(self.parts_of(node), self.flattened(node))

    def hold(self, node: fx.Node, how: Flattened) -> None:
        """Let a flattened value be held with all dimensions.

        Raises:
            Refused: the model returns it.
        """
        if node in self.program.output.all_input_nodes:
            raise Refused("the model returns it flattened")
        self._flattened[node] = how

    def get(self, node: fx.Node) -> Local:
        """Return a value as the stage at hand has it: the tile's own part."""
        local = self.local(node)
        if local.axes is None and local.flattened is not None:
            return Local(self.whole(node), None)
        is_input = node.op == "placeholder" and self.inputs.is_wide(node, self._form)
        if is_input or node.name in self._halos.wide:
            return replace(local, node=self.spread(node, local.axes))
        return local

    def local(self, node: fx.Node) -> Local:
        """Return a value with all that the tile computes or is given of it."""
        if node in self._replaced:
            return self._replaced[node]
        if node.op == "placeholder":
            return self.inputs[node, self._form]
        if node.op == "get_attr" or self._stage_of[node] == self._stage:
            return self._env[node]
        source = self._grids[self._stage_of[node]]
        if source == self._form or not isinstance(meta.value(node), Tensor):
            return self._env[node]
        if (node, self._stage) not in self._crossed:
            self._crossed[node, self._stage] = self._cross(node, source.axes)
        return self._crossed[node, self._stage]

    def _cross(self, node: fx.Node, source: tuple[int, ...]) -> Local:
        """Let a value arrive from a stage with another grid, as what it sends."""
        shape, local = self.shape(node), self._env[node]
        axes = None
        if len(shape) == len(self.pictures) + 2:
            axes = last_axes(len(shape), self.pictures)
        if axes is None and self.shards is not None:
            axes = self.split_axes(node)
        if axes is not None and not fits(shape, axes, self.grid):
            axes = None
        held = held_boxes(shape, local.axes, source)
        wanted = held_boxes(shape, axes, self.grid)
        exchange = replace(self.exchange(shape, held, wanted), arrives=True)
        args = (self.here, local.node, exchange)
        new = self._create("call_function", tiles.redistribute, args, {}, node.name)
        annotate_part(new, node, axes, self.grid, self._tile, shape=shape)
        return Local(new, axes, flattened=local.flattened)

    def axes(self, node: fx.Node) -> Axes | None:
        """Return which dimensions of a value are cut, None if it is whole."""
        return self.local(node).axes

    def held(self, node: fx.Node) -> tuple[Box, ...]:
        """Return what each tile holds of a value."""
        return self.result(node, self.axes(node))

    def result(self, node: fx.Node, axes: Axes | None) -> tuple[Box, ...]:
        """Return what each tile computes of a value with these axes.

        More than it owns where one wide exchange serves several layers.
        """
        wide = self._halos.wide.get(node.name) if axes is not None else None
        return wide or self.owned(self.shape(node), axes)

    def box(self, node: fx.Node, axes: Axes) -> Box:
        """Return what the rank computes of a value with these axes.

        Raises:
            Refused: it is several boxes.
        """
        parts = self._held_parts_of(node)
        if parts and parts[0].outer > 1:
            raise Refused("its mask is drawn for the whole value")
        return refined(self.result(node, axes), parts)[self.place]

    def own_rows(self, node: fx.Node, axes: Axes | None) -> Box | None:
        """Return where the tile's own part is in what it computes; None if all is."""
        held = self.result(node, axes)[self.place]
        owned = self.owned(self.shape(node), axes)[self.place]
        if held == owned:
            return None
        return tuple(
            (start - begin, stop - begin)
            for (start, stop), (begin, _) in zip(owned, held, strict=True)
        )

    # ------------------------------------------------ making of nodes

    def create(
        self,
        like: fx.Node,
        op: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        axes: Axes | None,
        *,
        partial: bool = False,
        parts: tuple[Part, ...] = (),
    ) -> Local:
        """Add a node that stands for `like`, or for a part of its computation."""
        new = self._create(op, target, args, kwargs, like.name)
        parts, flattened = self.parts_of(like) or parts, self.flattened(like)
        self._describe(new, like, axes, held_parts(parts, flattened))
        if op != "call_module" and (path := meta.layer(like)):
            meta.set_layer(new, path)
        if partial:
            meta.set_layout(new, None)
        return Local(new, axes, parts, flattened)

    def _describe(
        self,
        new: fx.Node,
        old: fx.Node,
        axes: Axes | None,
        parts: tuple[Part, ...] = (),
    ) -> None:
        wide, shape = self._halos.wide.get(old.name), self.shape(old)
        annotate_part(new, old, axes, self.grid, self._tile, wide, shape, parts)

    def copy(
        self,
        node: fx.Node,
        axes: Axes | None = None,
        *,
        inputs: dict[fx.Node, fx.Node] | None = None,
    ) -> Local:
        """Add the same call; of its inputs the local values, or what `inputs` says."""
        chosen = inputs or {}

        def choose(source: fx.Node) -> fx.Node:
            return chosen[source] if source in chosen else self.get(source).node

        args = fx.node.map_arg(node.args, choose)
        kwargs = fx.node.map_arg(node.kwargs, choose)
        local = self.create(node, node.op, node.target, args, kwargs, axes)
        whole = bool(self.grid) and axes is None and self.has_own_backward(node)
        meta.set_whole_gradients(local.node, self.here if whole else None)
        return local

    def has_own_backward(self, node: fx.Node) -> bool:
        """Whether code of the user's computes a node's gradients."""
        return has_own_backward(node, self.program.module)

    def part(
        self,
        node: fx.Node,
        wanted: Iterable[Box],
        fill: float = 0.0,
        *,
        wraps: bool = False,
    ) -> fx.Node:
        """Return the node that holds what each tile wants of a value.

        Wanted boxes may reach outside it: there is `fill`, or it `wraps` around.
        """
        wanted = tuple(wanted)
        local = self.local(node)
        if local.flattened == self._flattened.get(node):  # not that, laid flat
            self._needs.append(Need(node, wanted, fill, wraps))
        parts = local.held_parts
        if node.op == "placeholder" and self.inputs[node, self._form].axes is not None:
            return self._part_of_input(node, wanted, fill, wraps, parts)
        shape, held = self.shape(node), self.held(node)
        source, owned = local.node, self.owned(shape, local.axes)
        fetched = self._halos.fetched.get((node.name, self._stage))
        if fetched and not wraps and not covers(held, wanted, shape):
            source = self._part_of(source, shape, held, fetched, 0.0, parts=parts)
            held = fetched
        if held not in (wanted, owned) and all(map(is_inside, wanted, held)):
            return self.cropped(source, shape, held, wanted, parts)
        return self._part_of(source, shape, held, wanted, fill, owned, wraps, parts)

    def _part_of_input(
        self,
        node: fx.Node,
        wanted: tuple[Box, ...],
        fill: float,
        wraps: bool,
        parts: tuple[Part, ...],
    ) -> fx.Node:
        local, shape = self.inputs[node, self._form], self.shape(node)
        source, owned = local.node, self.owned(shape, local.axes)
        held = self.inputs.held(node, self._form, wanted)
        return self._part_of(source, shape, held, wanted, fill, owned, wraps, parts)

    def stands_for(self, new: fx.Node, old: fx.Node, axes: Axes) -> Local:
        """Return a node that holds just what its tile has of an old node's value.

        What leaves the stage needs a node of its own, for its own layout.
        """
        parts, flattened = self.parts_of(old), self.flattened(old)
        is_other = any(new is local.node for local in self._env.values())
        if new.op == "placeholder" or is_other:
            if all(self._stage_of.get(user) == self._stage for user in old.users):
                return Local(new, axes, parts, flattened)
            new = self._create("call_function", getitem, (new, (...,)), {}, old.name)
        self._describe(new, old, axes, held_parts(parts, flattened))
        return Local(new, axes, parts, flattened)

    def shared(self, node: fx.Node, parts: tuple[Part, ...]) -> Local:
        """Return a value of which shards have these parts; tiles cut it as before."""
        local = self.local(node)
        if local.parts == parts:
            return local
        if local.parts:
            found = self._beside(node, local, local.held_parts, gathers=True)
            local = replace(local, node=found, parts=())
        if parts:
            local = replace(local, parts=parts)
            found = self._beside(node, local, local.held_parts, gathers=False)
            local = replace(local, node=found)
        return local

    def shard(self, node: fx.Node, parts: tuple[Part, ...]) -> fx.Node:
        """Return the node of what a shard has of a value that no tiles cut."""
        if self.local(node).parts == parts:
            return self.local(node).node
        with self.instead({node: Local(self.whole(node), None)}):
            return self.shared(node, parts).node

    def _beside(
        self, node: fx.Node, local: Local, parts: tuple[Part, ...], *, gathers: bool
    ) -> fx.Node:
        """Return the node of what a tile has of a value: all of it, or a shard's."""
        shape = self.shape(node)
        owned = self.owned(shape, local.axes)
        boxes = self.result(node, local.axes) if local.axes is not None else owned
        held, wanted = (
            refined(boxes, parts, cut=cut) for cut in (gathers, not gathers)
        )
        given = () if boxes == owned else refined(owned, parts, cut=gathers)
        shape = unfolded(shape, parts)
        source = self._viewed(local.node, Layout(shape, held))
        found = self._part_of(source, shape, held, wanted, 0.0, given)
        sizes = shape_of(boxes[self.place])
        if not gathers:
            sizes = local_sizes(sizes, parts, self.place)
        return self._viewed(found, Layout(shape, wanted), sizes)

    def laid_flat(
        self, node: fx.Node, rows: tuple[Box, ...], flat: tuple[Box, ...], axes: Axes
    ) -> Local:
        """Return a flattened value cut by its own dimensions.

        `rows` are boxes of it with all dimensions that are boxes when they are `flat`.
        """
        local, shape, unflattened = (
            self.local(node),
            whole_shape(node),
            self.shape(node),
        )
        held, owned = self.held(node), self.owned(unflattened, local.axes)
        in_rows = self._part_of(
            local.node, unflattened, held, rows, 0.0, owned, parts=local.held_parts
        )
        parts = local.parts
        layout = Layout(unfolded(shape, parts), refined(flat, parts))
        sizes = local_sizes(shape_of(flat[self.place]), parts, self.place)
        viewed = self._viewed(in_rows, layout, sizes)
        wanted = self.owned(shape, axes)
        own = self._part_of(viewed, shape, flat, wanted, 0.0, parts=parts)
        return Local(own, axes, parts)

    def _viewed(
        self, source: fx.Node, layout: Layout, shape: tuple[int, ...] = ()
    ) -> fx.Node:
        """Return the node of the same elements in a shape, by default the layout's."""
        here = layout.local_shape(self.place)
        shape = shape or here
        if tuple(meta.value(source).shape) == shape:
            return source
        key = (source, shape, self._stage)
        if key not in self._parts:
            args = (source, *shape)
            new = self._create("call_method", "reshape", args, {}, source.name)
            self._describe_part(new, source, layout if here == shape else None, shape)
            self._parts[key] = new
        return self._parts[key]

    def whole(self, node: fx.Node) -> fx.Node:
        """Return the node that holds all of a value on every tile.

        Of one that stands there instead, shards keep their parts.
        """
        local = self.local(node)
        if local.parts and node not in self._replaced:
            with self.instead({node: self.shared(node, ())}):
                return self.whole(node)
        whole = local.node
        if local.axes is not None:
            whole = self.part(node, (everything(self.shape(node)),) * self.tiles)
        if local.flattened is None:
            return whole
        given = Layout.whole(whole_shape(node), self.tiles)
        held = local_sizes(local.flattened.shape, local.held_parts, self.place)
        return self._viewed(whole, given, local.flattened.sizes(held))

    def spread(self, node: fx.Node, axes: Axes | None) -> fx.Node:
        """Return the node that holds a value cut like this."""
        if axes is None:
            return self.whole(node)
        return self.part(node, self.owned(self.shape(node), axes))

    def all_reduce(
        self,
        like: fx.Node,
        partial: fx.Node,
        axes: Axes | None = None,
        among: tuple[int, ...] = (),
    ) -> Local:
        """Add a sum over the tiles, or some of them, that stands for `like`."""
        args = (self.here, partial, *((among,) if among else ()))
        return self.create(like, "call_function", tiles.all_reduce, args, {}, axes)

    def reduce_scatter(self, like: fx.Node, partial: fx.Node, axes: Axes) -> Local:
        """Add each rank's part of a sum over the ranks, that stands for `like`."""
        shape = self.shape(like)
        whole = (everything(shape),) * self.tiles
        exchange = self.exchange(shape, whole, self.owned(shape, axes), adds=True)
        args = (self.here, partial, exchange)
        return self.create(like, "call_function", tiles.redistribute, args, {}, axes)

    def barrier(self, node: fx.Node, reason: str) -> Local:
        """Compute a node on whole inputs, on every tile; report it."""
        inputs: dict[fx.Node, fx.Node] = {}
        num_bytes = 0
        for source in elements(node):
            if self.axes(source) is None and not self.local(source).parts:
                continue
            if not isinstance(meta.value(source), Tensor):
                raise InternalError(f"{source.name} cannot be gathered: no tensor")
            inputs[source] = self.whole(source)
            num_bytes += meta.spec(source).num_bytes
        local = self.copy(node, None, inputs=inputs)
        if num_bytes:
            self.barriers.append(Barrier(local.node, reason, num_bytes))
        return local

    def layer(self, call: fx.Node) -> fx.Node:
        """Return the node of the layer called, as an argument of an operation."""
        return self.graph.get_attr(str(call.target))

    def trains(self, call: fx.Node) -> bool:
        """Whether the layer called is in training mode."""
        return self._training and str(call.target) not in self.program.frozen

    def parameter(
        self, like: fx.Node, path: str, parts: tuple[Part, ...] = ()
    ) -> fx.Node:
        """Return the node of a parameter or buffer, or of this rank's part of it."""
        tensor = attribute(self.program.module, path)
        shape = parts[self.place].local_shape if parts else tensor.shape
        node = self.graph.get_attr(path)
        fake: Any = meta.tensors(like)[0]
        with fake.fake_mode:
            meta.set_value(node, fake.new_empty(shape, dtype=tensor.dtype))
        return node

    # ------------------------------------- parts of values, made once

    def add(
        self,
        like: fx.Node,
        target: Any,
        args: tuple[Any, ...],
        shape: tuple[int, ...],
        layout: Layout | None = None,
        *,
        name: str = "",
        **kwargs: Any,
    ) -> fx.Node:
        """Add a call whose value has a dtype like another's, and this shape."""
        name = name or like.name
        new = self._create("call_function", target, args, kwargs, name)
        self._describe_part(new, like, layout, shape)
        return new

    def _create(
        self,
        op: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str,
    ) -> fx.Node:
        node = self.graph.create_node(op, target, args, kwargs, name=name)
        self._made.append(node)
        return node

    def cropped(
        self,
        source: fx.Node,
        shape: tuple[int, ...],
        held: tuple[Box, ...],
        wanted: tuple[Box, ...],
        parts: tuple[Part, ...] = (),
    ) -> fx.Node:
        """Return the node of the rows that are wanted of those held."""
        key = (source, wanted, 0.0, self._stage, parts)
        if key not in self._parts:
            index = tuple(
                slice(start - begin, stop - begin)
                for (start, stop), (begin, _) in zip(
                    wanted[self.place], held[self.place], strict=True
                )
            )
            sizes = shape_of(held[self.place])
            index = tuple(
                slice(None) if rows == slice(0, size) else rows
                for rows, size in zip(index, sizes, strict=True)
            )
            new = self._create(
                "call_function", getitem, (source, index), {}, source.name
            )
            self._describe_box(new, source, shape, wanted, parts)
            self._parts[key] = new
        return self._parts[key]

    def _describe_box(
        self,
        new: fx.Node,
        source: fx.Node,
        shape: tuple[int, ...],
        boxes: tuple[Box, ...],
        parts: tuple[Part, ...],
    ) -> None:
        """Give a node the layout of boxes of which shards have parts."""
        sizes = local_sizes(shape_of(boxes[self.place]), parts, self.place)
        repeats = bool(parts) and parts[0].outer > 1
        layout = None if repeats else Layout(shape, refined(boxes, parts))
        self._describe_part(new, source, layout, sizes)

    def _describe_part(
        self,
        new: fx.Node,
        source: fx.Node,
        layout: Layout | None,
        shape: tuple[int, ...],
    ) -> None:
        meta.copy_meta(source, new)
        meta.set_whole_gradients(new, None)
        meta.set_layout(new, layout)
        fake = meta.value(source)
        with fake.fake_mode:
            meta.set_value(new, fake.new_empty(shape))

    def _part_of(
        self,
        source: fx.Node,
        shape: tuple[int, ...],
        held: tuple[Box, ...],
        wanted: tuple[Box, ...],
        fill: float,
        owned: tuple[Box, ...] = (),
        wraps: bool = False,
        parts: tuple[Part, ...] = (),
    ) -> fx.Node:
        """Return the node of the wanted boxes; `parts` are what shards have of both."""
        if wanted == held:
            return source
        key = (source, wanted, fill, self._stage, wraps, parts)
        if key in self._parts:
            return self._parts[key]
        owned = () if owned == held else owned
        sizes = local_sizes(shape_of(wanted[self.place]), parts, self.place)
        repeats = unfolded(shape, parts) != shape
        shape = unfolded(shape, parts)
        held, wanted, owned = (refined(b, parts) for b in (held, wanted, owned))
        given = self._viewed(source, Layout(shape, held)) if repeats else source
        exchange = self.exchange(shape, held, wanted, fill, owned, wraps)
        args = (self.here, given, exchange)
        new = self._create("call_function", tiles.redistribute, args, {}, source.name)
        layout = Layout(shape, wanted)
        self._describe_part(new, source, layout, layout.local_shape(self.place))
        self._parts[key] = self._viewed(new, layout, sizes) if repeats else new
        return self._parts[key]

    def exchange(
        self,
        shape: tuple[int, ...],
        held: tuple[Box, ...],
        wanted: tuple[Box, ...],
        fill: float = 0.0,
        owned: tuple[Box, ...] = (),
        wraps: bool = False,
        adds: bool = False,
    ) -> Exchange:
        """Return the exchange of these boxes: one object for all that are equal."""
        key = (shape, held, wanted, fill, owned, wraps)
        if (*key, adds) not in self._exchanges:
            made = Exchange(len(self._exchanges), *key, adds=adds)
            self._exchanges[*key, adds] = made
        return self._exchanges[*key, adds]
