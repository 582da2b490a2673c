"""Lowering: build the graph that one tile runs, node by node."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx, nn

from gemsc.boxes import Box, everything, hull, intersection, shape_of
from gemsc.errors import InternalError
from gemsc.ir import meta, tile_ops
from gemsc.ir.holder import with_graph
from gemsc.ir.layout import Layout
from gemsc.ir.program import Barrier, Block, Input, Program, Stage
from gemsc.ir.tile_ops import Exchange, TileLayer
from gemsc.passes.spatial.classify import Probe
from gemsc.passes.spatial.cuts import Axes, boxes, coordinates, cut, fits, num_tiles

__all__ = ["Local", "Lowering", "Refused", "Rule"]


class Refused(Exception):  # noqa: N818 - no error: the caller gathers instead
    """A rule cannot compute a node on tiles; says why, for the report."""


@dataclass(frozen=True, slots=True)
class Local:
    """A value as the lowered graph has it.

    `axes` says which of its dimensions are cut; None: every tile holds all of it. Of a
    tuple of tensors, all have the same axes.
    """

    node: fx.Node
    axes: Axes | None


Rule = Callable[["Lowering", fx.Node], Local]
InputKey = tuple[str, tuple[int, ...]]  # a placeholder's name, the grid that uses it
Wide = dict[InputKey, tuple[Box, ...]]


class Lowering:
    """The state of one run of SplitTiles: what is lowered so far, and the tools.

    Rules read the old graph's nodes, whose values are the whole ones, and create nodes
    of the new graph for tile `self.place` of the stage at hand.
    """

    def __init__(
        self,
        program: Program,
        grids: tuple[tuple[int, ...], ...],
        tile: int,
        probe: Probe,
        rule: Rule,
        wide: Wide | None = None,
    ) -> None:
        self.program = program
        self.probe = probe
        self.module = with_graph(program.module, fx.Graph())
        self.graph = self.module.graph
        self.grid: tuple[int, ...] = ()
        self.barriers: list[Barrier] = []
        self.wishes: dict[InputKey, list[tuple[Box, ...]]] = {}
        self._wide = wide or {}
        self._rule = rule
        self._grids = grids
        self._tile = tile
        self._stage = 0
        self._stage_of = {
            node: stage.index
            for stage in program.require_stages()
            for node in stage.nodes
        }
        self._env: dict[fx.Node, Local] = {}
        self._inputs: dict[tuple[fx.Node, tuple[int, ...]], Local] = {}
        self._crossed: dict[tuple[fx.Node, int], Local] = {}
        self._parts: dict[tuple[Any, ...], fx.Node] = {}
        self._exchanges: dict[Any, Exchange] = {}
        self._made: list[fx.Node] = []
        self._calls = Counter(
            str(n.target) for n in program.graph.nodes if n.op == "call_module"
        )

    # ------------------------------------------------------------ run

    def run(self) -> Program:
        """Lower every node; return the program, without facts."""
        inputs = self._add_inputs()
        for node in self.program.graph.nodes:
            if node.op == "get_attr":
                self._env[node] = Local(self.graph.node_copy(node), None)
        stages = []
        for stage in self.program.require_stages():
            self._stage, self.grid = stage.index, self._grids[stage.index]
            blocks = tuple(self._block(block) for block in stage.blocks)
            stages.append(Stage(stage.index, blocks))
        output = fx.node.map_arg(self.program.output.args, self._result)
        meta.copy_meta(self.program.output, self.graph.output(output[0]))
        return replace(
            self.program.with_module(self.module),
            inputs=inputs,
            blocks=tuple(block for stage in stages for block in stage.blocks),
            stages=tuple(stages),
            placement=self.program.placement,
            barriers=tuple(self.barriers),
        )

    def _block(self, block: Block) -> Block:
        self._made = []
        for node in block.nodes:
            self._env[node] = self._lower(node)
        return Block(block.index, block.name, tuple(self._made))

    def _lower(self, node: fx.Node) -> Local:
        if not self.grid:
            return self.copy(node, None)
        before = len(self._made)
        num_barriers = len(self.barriers)
        try:
            return self._rule(self, node)
        except Refused as refused:
            self._take_back(before)
            del self.barriers[num_barriers:]
            return self.barrier(node, str(refused))

    def _take_back(self, count: int) -> None:
        """Erase the nodes that a rule made before it refused."""
        for node in reversed(self._made[count:]):
            self._parts = {k: v for k, v in self._parts.items() if v is not node}
            self._crossed = {
                k: v for k, v in self._crossed.items() if v.node is not node
            }
            self.graph.erase_node(node)
        del self._made[count:]

    def _result(self, node: fx.Node) -> fx.Node:
        """Return an output of the model where it was computed."""
        if node.op == "placeholder":
            return next(v.node for (n, _), v in self._inputs.items() if n is node)
        return self._env[node].node

    # --------------------------------------------------------- inputs

    def _add_inputs(self) -> tuple[Input, ...]:
        """Add a placeholder for each input and each grid that uses it."""
        result = []
        by_name = {item.name: item for item in self.program.inputs}
        for node in self.program.graph.nodes:
            if node.op != "placeholder":
                continue
            stages = {self._stage_of[u] for u in node.users if u in self._stage_of}
            grids = dict.fromkeys(self._grids[index] for index in sorted(stages))
            for grid in grids or {(): None}:
                axes = self._image_axes(node, grid)
                new = self.graph.placeholder(node.name)
                self._describe(new, node, axes, grid)
                self._widen(new, node, axes, grid)
                self._inputs[node, grid] = Local(new, axes)
                spec = replace(
                    by_name[node.name].spec, shape=tuple(meta.value(new).shape)
                )
                result.append(replace(by_name[node.name], name=new.name, spec=spec))
        return tuple(result)

    def _widen(
        self, new: fx.Node, node: fx.Node, axes: Axes | None, grid: tuple[int, ...]
    ) -> None:
        """Let an input come with the halo that its users want."""
        wide = self._wide.get((node.name, grid))
        if wide is None:
            return
        shape, fake = self.shape(node), meta.value(node)
        owned = self._boxes(shape, axes, grid)
        meta.set_layout(new, Layout(shape, wide, owned))
        with fake.fake_mode:
            place = self._tile % num_tiles(grid)
            meta.set_value(new, fake.new_empty(shape_of(wide[place])))

    def wide_inputs(self) -> Wide:
        """Return what each input that is cut should hold, so that nothing is sent."""
        result: Wide = {}
        for (name, grid), wishes in self.wishes.items():
            node = next(n for n, g in self._inputs if n.name == name and g == grid)
            shape = self.shape(node)
            owned = self._boxes(shape, self._inputs[node, grid].axes, grid)
            image = everything(shape)
            boxes = tuple(
                hull(mine, *(intersection(wish[tile], image) for wish in wishes))
                for tile, mine in enumerate(owned)
            )
            if boxes != owned:
                result[name, grid] = boxes
        return result

    def _image_axes(self, node: fx.Node, grid: tuple[int, ...]) -> Axes | None:
        """Return how an input is cut: images and masks, not labels or sequences."""
        shape = self.shape(node)
        axes = self.last_axes(len(shape), grid)
        images = [
            self.shape(n)
            for n in self.program.graph.nodes
            if n.op == "placeholder" and len(self.shape(n)) == len(grid) + 2
        ]
        if axes is None or not fits(shape, axes, grid):
            return None
        sizes = shape[len(shape) - len(grid) :]
        if len(shape) == len(grid) + 2:
            return axes
        alike = any(image[2:] == sizes for image in images)
        return axes if alike and len(shape) == len(grid) + 1 else None

    def last_axes(self, dims: int, grid: tuple[int, ...] | None = None) -> Axes | None:
        """Return the axes that cut the last dimensions, None if there are too few."""
        grid = self.grid if grid is None else grid
        if dims < len(grid) or not grid:
            return None
        cuts = tuple(axis if parts > 1 else None for axis, parts in enumerate(grid))
        return (*(None,) * (dims - len(grid)), *cuts)

    # --------------------------------------------- what rules look up

    @property
    def place(self) -> int:
        """The number of the tile at hand in the stage's grid."""
        return self._tile % num_tiles(self.grid)

    @property
    def tiles(self) -> int:
        """How many tiles the stage's grid has."""
        return num_tiles(self.grid)

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """Return the shape of a whole value; () for what is no tensor."""
        fake = meta.value(node)
        return tuple(fake.shape) if isinstance(fake, Tensor) else ()

    def get(self, node: fx.Node) -> Local:
        """Return a value as the stage at hand has it."""
        if node.op == "placeholder":
            local = self._inputs[node, self.grid]
            if (node.name, self.grid) in self._wide:
                owned = self.owned(self.shape(node), local.axes)
                return Local(self._part_of_input(node, owned, 0.0), local.axes)
            return local
        if node.op == "get_attr" or self._stage_of[node] == self._stage:
            return self._env[node]
        source = self._grids[self._stage_of[node]]
        if source == self.grid or not isinstance(meta.value(node), Tensor):
            return self._env[node]
        if (node, self._stage) not in self._crossed:
            self._crossed[node, self._stage] = self._cross(node, source)
        return self._crossed[node, self._stage]

    def _cross(self, node: fx.Node, source: tuple[int, ...]) -> Local:
        """Let a value arrive from a stage with another grid, as what it sends."""
        shape, local = self.shape(node), self._env[node]
        axes = self.last_axes(len(shape)) if len(shape) == len(self.grid) + 2 else None
        if axes is not None and not fits(shape, axes, self.grid):
            axes = None
        held = self._boxes(shape, local.axes, source)
        wanted = self._boxes(shape, axes, self.grid)
        exchange = self.exchange(shape, held, wanted)
        new = self._create(
            "call_function",
            tile_ops.redistribute,
            (local.node, exchange, self._tile),
            {},
            node.name,
        )
        self._describe(new, node, axes, self.grid)
        return Local(new, axes)

    def axes(self, node: fx.Node) -> Axes | None:
        """Return which dimensions of a value are cut, None if it is whole."""
        if node.op == "placeholder":
            return self._inputs[node, self.grid].axes
        return self.get(node).axes

    def held(self, node: fx.Node) -> tuple[Box, ...]:
        """Return what each tile holds of a value."""
        return self.owned(self.shape(node), self.axes(node))

    def owned(self, shape: tuple[int, ...], axes: Axes | None) -> tuple[Box, ...]:
        """Return what each tile of the stage holds of a value with these axes."""
        return self._boxes(shape, axes, self.grid)

    @staticmethod
    def _boxes(
        shape: tuple[int, ...], axes: Axes | None, grid: tuple[int, ...]
    ) -> tuple[Box, ...]:
        if axes is None:
            return (everything(shape),) * num_tiles(grid)
        return boxes(shape, axes, grid)

    def share(self, shape: tuple[int, ...], axes: Axes) -> float:
        """Return the part of all elements that the tile at hand holds."""
        part = 1.0
        place = coordinates(self.grid, self.place)
        for size, axis in zip(shape, axes, strict=True):
            if axis is not None:
                start, stop = cut(size, self.grid[axis])[place[axis]]
                part *= (stop - start) / size
        return part

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
    ) -> Local:
        """Add a node that stands for `like`, or for a part of its computation."""
        new = self._create(op, target, args, kwargs, like.name)
        self._describe(new, like, axes, self.grid)
        if partial:
            meta.set_layout(new, None)
        return Local(new, axes)

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

    def _describe(
        self,
        new: fx.Node,
        old: fx.Node,
        axes: Axes | None,
        grid: tuple[int, ...],
    ) -> None:
        """Give a node the facts of the old one, with local shapes and a layout."""
        meta.copy_meta(old, new)
        fake = meta.value(old)
        if not isinstance(fake, Tensor) or not grid:
            meta.set_layout(new, None)
            return
        shape = tuple(fake.shape)
        layout = Layout(shape, self._boxes(shape, axes, grid))
        meta.set_layout(new, layout)
        place = self._tile % num_tiles(grid)
        with fake.fake_mode:  # type: ignore[attr-defined]
            meta.set_value(new, fake.new_empty(layout.local_shape(place)))

    def copy(
        self,
        node: fx.Node,
        axes: Axes | None,
        *,
        inputs: dict[fx.Node, fx.Node] | None = None,
    ) -> Local:
        """Add the same call; of its inputs the local values, or what `inputs` says."""
        chosen = inputs or {}

        def choose(source: fx.Node) -> fx.Node:
            return chosen[source] if source in chosen else self.get(source).node

        args = fx.node.map_arg(node.args, choose)
        kwargs = fx.node.map_arg(node.kwargs, choose)
        return self.create(node, node.op, node.target, args, kwargs, axes)

    def part(
        self, node: fx.Node, wanted: Iterable[Box], fill: float = 0.0
    ) -> fx.Node:
        """Return the node that holds what each tile wants of a value.

        Wanted boxes may reach outside it: there is `fill`.
        """
        wanted = tuple(wanted)
        if node.op == "placeholder" and self._inputs[node, self.grid].axes is not None:
            return self._part_of_input(node, wanted, fill)
        local = self.get(node)
        shape = self.shape(node)
        return self._part_of(local.node, shape, self.held(node), wanted, fill)

    def _part_of_input(
        self, node: fx.Node, wanted: tuple[Box, ...], fill: float
    ) -> fx.Node:
        local, shape = self._inputs[node, self.grid], self.shape(node)
        owned = self.owned(shape, local.axes)
        key = (node.name, self.grid)
        self.wishes.setdefault(key, []).append(wanted)
        held = self._wide.get(key, owned)
        return self._part_of(local.node, shape, held, wanted, fill, owned)

    def _part_of(
        self,
        source: fx.Node,
        shape: tuple[int, ...],
        held: tuple[Box, ...],
        wanted: tuple[Box, ...],
        fill: float,
        owned: tuple[Box, ...] = (),
    ) -> fx.Node:
        if wanted == held:
            return source
        key = (source, wanted, fill, self._stage)
        if key in self._parts:
            return self._parts[key]
        owned = () if owned == held else owned
        exchange = self.exchange(shape, held, wanted, fill, owned)
        args = (source, exchange, self.place)
        redistribute = tile_ops.redistribute
        new = self._create("call_function", redistribute, args, {}, source.name)
        meta.copy_meta(source, new)
        meta.set_layout(new, Layout(shape, wanted))
        fake = meta.value(source)
        with fake.fake_mode:
            meta.set_value(new, fake.new_empty(shape_of(wanted[self.place])))
        self._parts[key] = new
        return new

    def stands_for(self, new: fx.Node, old: fx.Node, axes: Axes) -> Local:
        """Return a node that holds just what its tile has of an old node's value."""
        is_other = any(new is local.node for local in self._env.values())
        if new.op != "placeholder" and not is_other:
            self._describe(new, old, axes, self.grid)
        return Local(new, axes)

    def exchange(
        self,
        shape: tuple[int, ...],
        held: tuple[Box, ...],
        wanted: tuple[Box, ...],
        fill: float = 0.0,
        owned: tuple[Box, ...] = (),
    ) -> Exchange:
        """Return the exchange of these boxes: one object for all that are equal."""
        key = (shape, held, wanted, fill, owned)
        if key not in self._exchanges:
            index = len(self._exchanges)
            self._exchanges[key] = Exchange(index, shape, held, wanted, fill, owned)
        return self._exchanges[key]

    def whole(self, node: fx.Node) -> fx.Node:
        """Return the node that holds all of a value on every tile."""
        if self.axes(node) is None:
            return self.get(node).node
        return self.part(node, (everything(self.shape(node)),) * self.tiles)

    def spread(self, node: fx.Node, axes: Axes | None) -> fx.Node:
        """Return the node that holds a value cut like this."""
        if axes is None:
            return self.whole(node)
        return self.part(node, self.owned(self.shape(node), axes))

    def all_reduce(
        self,
        like: fx.Node,
        partial: fx.Node,
    ) -> Local:
        """Add a sum over the tiles that stands for `like`."""
        return self.create(
            like, "call_function", tile_ops.all_reduce, (partial,), {}, None
        )

    def barrier(self, node: fx.Node, reason: str) -> Local:
        """Compute a node on whole inputs, on every tile; report it."""
        inputs: dict[fx.Node, fx.Node] = {}
        num_bytes = 0
        for source in node.all_input_nodes:
            if self.axes(source) is None:
                continue
            if not isinstance(meta.value(source), Tensor):
                raise InternalError(f"{source.name} cannot be gathered: no tensor")
            inputs[source] = self.whole(source)
            num_bytes += meta.spec(source).num_bytes
        local = self.copy(node, None, inputs=inputs)
        if num_bytes:
            self.barriers.append(Barrier(local.node, reason, num_bytes))
        return local

    # --------------------------------------------------------- layers

    def is_shared(self, path: str) -> bool:
        """Whether a layer is called more than once."""
        return self._calls[path] > 1

    def parameter(self, call: fx.Node, name: str) -> fx.Node | None:
        """Return the node of a parameter of the layer called, None if it has none."""
        path = str(call.target)
        tensor = getattr(self.program.module.get_submodule(path), name)
        if tensor is None:
            return None
        node = self.graph.get_attr(f"{path}.{name}")
        fake = meta.value(call)
        with fake.fake_mode:
            meta.set_value(node, fake.new_empty(tensor.shape, dtype=tensor.dtype))
        return node

    def set_layer(self, path: str, layer: nn.Module) -> None:
        """Put a layer in the place of the user's, whose module stays as it is."""
        *parents, name = path.split(".")
        owner: nn.Module = self.module
        for parent in parents:
            child = owner.get_submodule(parent)
            shallow = _shallow(child)
            owner._modules[parent] = shallow
            owner = shallow
        owner._modules[name] = layer

    def changed_layer(self, node: fx.Node, changes: dict[str, Any]) -> nn.Module:
        """Return a copy of a node's layer with other settings; the same parameters.

        Raises:
            Refused: the layer is called elsewhere too.
        """
        path = str(node.target)
        if self.is_shared(path):
            raise Refused("the layer is called more than once")
        layer = _shallow(self.program.module.get_submodule(path))
        for name, value in changes.items():
            setattr(layer, name, value)
        return layer

    def tile_layer(
        self, node: fx.Node, method: str, *extra: Any, **changes: Any
    ) -> None:
        """Make a node's layer one that works with all tiles."""
        layer = self.changed_layer(node, changes)
        self.set_layer(str(node.target), TileLayer(layer, method, *extra))


def _shallow(module: nn.Module) -> nn.Module:
    """Return a copy with the same children, parameters and buffers."""
    copied = copy.copy(module)
    copied.__dict__["_modules"] = dict(module._modules)
    return copied
