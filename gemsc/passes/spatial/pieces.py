"""Pieces: nodes that hold boxes of values, each made once, and their exchanges."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import getitem
from typing import Any

from torch import fx

from gemsc.base.boxes import Box, shape_of
from gemsc.base.parts import Part
from gemsc.ir import meta
from gemsc.ir.holder import attribute, with_graph
from gemsc.ir.layout import Layout
from gemsc.messages.exchange import Exchange, index_of
from gemsc.passes.spatial.position import StagePosition
from gemsc.passes.spatial.values import describe, local_sizes, refined, unfolded
from gemsc.runtime import tiles


@dataclass(eq=False)
class Pieces(StagePosition):
    """The graph that is built, and the nodes in it that hold boxes of values."""

    _made: list[fx.Node] = field(default_factory=list, init=False)  # of a block
    _parts: dict[tuple[Any, ...], fx.Node] = field(default_factory=dict, init=False)
    _exchanges: dict[Any, Exchange] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.module = with_graph(self.program.module, fx.Graph())
        self.graph = self.module.graph

    def layer(self, call: fx.Node) -> fx.Node:
        """Return the node of the layer called, as an argument of an operation."""
        return self.graph.get_attr(str(call.target))

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
        op = "call_method" if isinstance(target, str) else "call_function"
        new = self._create(op, target, args, kwargs, name or like.name)
        describe(new, like, layout, shape)
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
            index = index_of(wanted[self.place], held[self.place])
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
        describe(new, source, layout, layout.local_shape(self.place))
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
            describe(new, source, layout if here == shape else None, shape)
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
        describe(new, source, layout, sizes)
