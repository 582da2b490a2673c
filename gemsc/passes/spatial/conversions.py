"""Conversions: from the layout that a value has to the one that somebody wants.

All that tiles, shards and branches send to each other within a stage begins here:

    part       the boxes that tiles want: halos, rows, a crop
    whole      all of it, on every rank
    spread     cut along other dimensions
    shared     the parts that shards have, or all of what tiles have
    laid_flat  a flattened value, by its own dimensions
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import getitem
from typing import Any

import torch
from torch import fx

from gemsc.base.boxes import Box, everything, is_inside, shape_of
from gemsc.base.dtypes import lying_of
from gemsc.base.parts import Part
from gemsc.ir import meta
from gemsc.ir.halos import Halos, Need
from gemsc.ir.layout import Layout
from gemsc.passes.spatial.classify import Probe
from gemsc.passes.spatial.cuts import Axes, fits, or_whole
from gemsc.passes.spatial.inputs import Placeholders
from gemsc.passes.spatial.pieces import Pieces
from gemsc.passes.spatial.values import (
    Flattened,
    Local,
    Refused,
    annotate_part,
    check_written_views,
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

# what goes by how its input lies in memory: a gathered one may lie otherwise
_GO_BY_STRIDES = frozenset({"as_strided", "view_as_complex"})
PartsOf = Callable[[fx.Node], tuple[Part, ...]]


def _of_all(node: fx.Node) -> tuple[Part, ...]:
    """Return that each rank of a tile has all of a value."""
    return ()


@dataclass(eq=False)
class Conversions(Pieces):
    """Values as the stage at hand has them, and what turns one layout into another."""

    probe: Probe
    halos: Halos
    is_addend: bool = field(default=False, init=False)
    _needs: list[Need] = field(default_factory=list, init=False)
    _env: dict[fx.Node, Local] = field(default_factory=dict, init=False)
    _replaced: dict[fx.Node, Local] = field(default_factory=dict, init=False)
    _crossed: dict[tuple[fx.Node, int], Local] = field(default_factory=dict, init=False)
    _flattened: dict[fx.Node, Flattened] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parts_of: PartsOf = _of_all  # see `sharing`
        given = self.program, self.grids, self.tile, self.halos.inputs, self.probe
        self.inputs = Placeholders(*given)
        self._stage_of = self.program.stage_of

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

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """Return the shape of a whole value as it is held; () for what is no tensor."""
        flattened = self.flattened(node)
        return whole_shape(node) if flattened is None else flattened.shape

    def flattened(self, node: fx.Node) -> Flattened | None:
        """Return how a value is held that was flattened, None for others."""
        local = self._replaced.get(node)
        return self._flattened.get(node) if local is None else local.flattened

    def hold(self, node: fx.Node, how: Flattened) -> None:
        """Let a flattened value be held with all dimensions.

        Raises:
            Refused: the model returns it.
        """
        if node in self.program.output.all_input_nodes:
            raise Refused("the model returns it flattened")
        self._flattened[node] = how

    def sizes(self, node: fx.Node, axes: Axes) -> tuple[int, ...]:
        """Return the sizes of the rank's own part of a value with these axes."""
        box = self.owned(self.shape(node), axes)[self.place]
        return local_sizes(shape_of(box), self._held_parts_of(node), self.place)

    def _held_parts_of(self, node: fx.Node) -> tuple[Part, ...]:
        """Return what shards have of a result, as it is held."""
        return held_parts(self.parts_of(node), self.flattened(node))

    def local(self, node: fx.Node) -> Local:
        """Return a value with all that the tile computes or is given of it."""
        if node in self._replaced:
            return self._replaced[node]
        if node.op == "placeholder":
            return self.inputs[node, self._form]
        if node.op == "get_attr" or self._stage_of[node] == self._stage:
            return self._env[node]
        source = self.grids[self._stage_of[node]]
        if source == self._form or not meta.is_one_tensor(node):
            return self._env[node]
        if (node, self._stage) not in self._crossed:
            self._crossed[node, self._stage] = self._cross(node, source.axes)
        return self._crossed[node, self._stage]

    def get(self, node: fx.Node) -> Local:
        """Return a value as the stage at hand has it: the tile's own part."""
        local = self.local(node)
        if local.axes is None and local.flattened is not None:
            return Local(self.whole(node), None)
        is_input = node.op == "placeholder" and self.inputs.is_wide(node, self._form)
        if is_input or node.name in self.halos.wide:
            return replace(local, node=self.spread(node, local.axes))
        return local

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
        annotate_part(new, node, axes, self.grid, self.tile, shape=shape)
        return Local(new, axes, flattened=local.flattened)

    def axes(self, node: fx.Node) -> Axes | None:
        """Return which dimensions of a value are cut, None if it is whole."""
        return self.local(node).axes

    def cut_axes(self, node: fx.Node) -> Axes:
        """Return which dimensions of a value are cut, of which some are."""
        axes = self.axes(node)
        assert axes is not None
        return axes

    def held(self, node: fx.Node) -> tuple[Box, ...]:
        """Return what each tile holds of a value."""
        return self.result(node, self.axes(node))

    def result(self, node: fx.Node, axes: Axes | None) -> tuple[Box, ...]:
        """Return what each tile computes of a value with these axes.

        More than it owns where one wide exchange serves several layers.
        """
        wide = self.halos.wide.get(node.name) if axes is not None else None
        return wide or self.owned(self.shape(node), axes)

    def boxes(self, node: fx.Node, axes: Axes) -> tuple[Box, ...]:
        """Return what each rank computes of a value with these axes.

        Raises:
            Refused: some have several boxes.
        """
        parts = self._held_parts_of(node)
        if parts and parts[0].outer > 1:
            raise Refused("its mask is drawn for the whole value")
        return refined(self.result(node, axes), parts)

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
            meta.layout.set(new, None)
        return Local(new, axes, parts, flattened)

    def _describe(
        self,
        new: fx.Node,
        old: fx.Node,
        axes: Axes | None,
        parts: tuple[Part, ...] = (),
    ) -> None:
        wide, shape = self.halos.wide.get(old.name), self.shape(old)
        annotate_part(new, old, axes, self.grid, self.tile, wide, shape, parts)

    def copy(
        self,
        node: fx.Node,
        axes: Axes | None = None,
        *,
        inputs: dict[fx.Node, fx.Node] | None = None,
    ) -> Local:
        """Add the same call; of its inputs the local values, or what `inputs` says."""
        chosen = inputs or {}
        is_whole, target = axes is None and bool(self.grid), node.target
        name = str(getattr(target, "__name__", target))
        to_sizes = not any(type(arg) is torch.dtype for arg in node.args)
        if is_whole and target == "view" and to_sizes and not node.kwargs:
            target = "reshape"  # it may lie otherwise

        def choose(source: fx.Node) -> fx.Node:
            operand = chosen[source] if source in chosen else self.get(source).node
            if not (is_whole and name in _GO_BY_STRIDES and meta.is_one_tensor(source)):
                return operand
            given = operand, lying_of(meta.value(source))
            new = self.create(source, "call_function", tiles.laid, given, {}, None)
            return new.node

        args = fx.node.map_arg(node.args, choose)
        kwargs = fx.node.map_arg(node.kwargs, choose)
        local = self.create(node, node.op, target, args, kwargs, axes)
        whole = is_whole and self.has_own_backward(node)
        if whole:
            check_written_views(node, self.program)
        meta.whole_gradients.set(local.node, self.here if whole else None)
        return local

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
            self._needs.append(Need(node, wanted, wraps))
        parts = local.held_parts
        shape, held = self.shape(node), self.held(node)
        source, owned = local.node, self.owned(shape, local.axes)
        given = self.inputs[node, self._form] if node.op == "placeholder" else None
        if given is not None and given.axes is not None:
            source, owned = given.node, self.owned(shape, given.axes)
            held = self.inputs.held(node, self._form, wanted)
            return self._part_of(source, shape, held, wanted, fill, owned, wraps, parts)
        fetched = self.halos.fetched.get((node.name, self._stage))
        if fetched and not wraps and not covers(held, wanted, shape):
            source = self._part_of(source, shape, held, fetched, 0.0, parts=parts)
            held = fetched
        if held not in (wanted, owned) and all(map(is_inside, wanted, held)):
            return self.cropped(source, shape, held, wanted, parts)
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
        shape = whole_shape(node)
        given = Layout(shape, self.owned(shape, None))
        held = local_sizes(local.flattened.shape, local.held_parts, self.place)
        return self._viewed(whole, given, local.flattened.sizes(held))

    def spread(self, node: fx.Node, axes: Axes | None) -> fx.Node:
        """Return the node that holds a value cut like this."""
        if axes is None or or_whole(axes) is None:
            return self.whole(node)
        return self.part(node, self.owned(self.shape(node), axes))

    def shared(self, node: fx.Node, parts: tuple[Part, ...]) -> Local:
        """Return a value of which shards have these parts; tiles cut it as before."""
        local = self.local(node)
        if local.parts == parts:
            return local
        if local.parts:
            held = self._beside(node, local, local.held_parts, gathers=True)
            local = replace(local, node=held, parts=())
        if parts:
            local = replace(local, parts=parts)
            held = self._beside(node, local, local.held_parts, gathers=False)
            local = replace(local, node=held)
        return local

    def shard(self, node: fx.Node, parts: tuple[Part, ...]) -> fx.Node:
        """Return the node of what a shard has of a value that no tiles cut."""
        local = self.local(node)
        if local.parts == parts:
            return local.node
        is_own = node.op != "placeholder" and not local.parts and not local.flattened
        if is_own and local.axes and all(part.outer == 1 for part in parts):
            shape = self.shape(node)
            wanted = refined((everything(shape),) * self.tiles, parts)  # all-to-all
            return self._part_of(local.node, shape, self.held(node), wanted, 0.0)
        with self.instead({node: Local(self.whole(node), None)}):
            return self.shared(node, parts).node

    def split_again(self, node: fx.Node, axes: Axes | None) -> Local:
        """Return a value cut as the trunk is, of which shards may have their parts."""
        local = self.local(node)
        parts = local.held_parts
        if not parts or axes is None or any(part.outer > 1 for part in parts):
            return Local(self.spread(node, axes), axes)
        shape = self.shape(node)
        held = refined((everything(shape),) * self.tiles, parts)  # all-to-all
        part = self._part_of(local.node, shape, held, self.owned(shape, axes), 0.0)
        return Local(part, axes)

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
        part = self._part_of(source, shape, held, wanted, 0.0, given)
        sizes = shape_of(boxes[self.place])
        if not gathers:
            sizes = local_sizes(sizes, parts, self.place)
        return self._viewed(part, Layout(shape, wanted), sizes)

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
        part = self._part_of(viewed, shape, flat, wanted, 0.0, parts=parts)
        return Local(part, axes, parts)

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
