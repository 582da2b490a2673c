"""Parts: the nodes by which tiles take what they want of a value."""

from __future__ import annotations

from operator import getitem
from typing import Any

from torch import fx

from gemsc.base.boxes import Box, shape_of
from gemsc.ir import meta
from gemsc.ir.layout import Layout
from gemsc.messages.exchange import Exchange
from gemsc.passes.spatial.place import Place
from gemsc.runtime import tiles

__all__ = ["Parts"]


class Parts(Place):
    """A graph that is being made, and the parts of values that are in it already."""

    def __init__(self, graph: fx.Graph, tile: int) -> None:
        super().__init__(tile)
        self.graph = graph
        self._stage = 0  # the one at hand
        self._made: list[fx.Node] = []
        self._parts: dict[tuple[Any, ...], fx.Node] = {}
        self._exchanges: dict[Any, Exchange] = {}

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

    def _cropped(
        self,
        source: fx.Node,
        shape: tuple[int, ...],
        held: tuple[Box, ...],
        wanted: tuple[Box, ...],
    ) -> fx.Node:
        """Return the node of the rows that are wanted of those held."""
        key = (source, wanted, 0.0, self._stage)
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
            self._describe_part(new, source, Layout(shape, wanted))
            self._parts[key] = new
        return self._parts[key]

    def _describe_part(self, new: fx.Node, source: fx.Node, layout: Layout) -> None:
        meta.copy_meta(source, new)
        meta.set_whole_gradients(new, None)
        meta.set_layout(new, layout)
        fake = meta.value(source)
        with fake.fake_mode:
            meta.set_value(new, fake.new_empty(layout.local_shape(self.place)))

    def _part_of(
        self,
        source: fx.Node,
        shape: tuple[int, ...],
        held: tuple[Box, ...],
        wanted: tuple[Box, ...],
        fill: float,
        owned: tuple[Box, ...] = (),
        wraps: bool = False,
    ) -> fx.Node:
        if wanted == held:
            return source
        key = (source, wanted, fill, self._stage, wraps)
        if key in self._parts:
            return self._parts[key]
        owned = () if owned == held else owned
        exchange = self.exchange(shape, held, wanted, fill, owned, wraps)
        args = (self.here, source, exchange)
        new = self._create("call_function", tiles.redistribute, args, {}, source.name)
        self._describe_part(new, source, Layout(shape, wanted))
        self._parts[key] = new
        return new

    def exchange(
        self,
        shape: tuple[int, ...],
        held: tuple[Box, ...],
        wanted: tuple[Box, ...],
        fill: float = 0.0,
        owned: tuple[Box, ...] = (),
        wraps: bool = False,
    ) -> Exchange:
        """Return the exchange of these boxes: one object for all that are equal."""
        key = (shape, held, wanted, fill, owned, wraps)
        if key not in self._exchanges:
            self._exchanges[key] = Exchange(len(self._exchanges), *key)
        return self._exchanges[key]
