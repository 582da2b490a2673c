"""Inputs of a lowered graph: each grid takes its own part, with the halo it needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import fx, nn

from gemsc.base.boxes import Box, everything, hull, intersection
from gemsc.base.grid_shape import ALONE, GridShape
from gemsc.ir import meta
from gemsc.ir.halos import Wide
from gemsc.ir.operators.calls import call_of
from gemsc.ir.operators.table import operator_of
from gemsc.ir.program import GraphInput, Program
from gemsc.passes.spatial.classify import Probe
from gemsc.passes.spatial.cuts import Axes, fits
from gemsc.passes.spatial.values import (
    Local,
    annotate_part,
    held_boxes,
    last_axes,
    whole_shape,
)

Key = tuple[fx.Node, GridShape]  # a placeholder, the grid that uses it


class Placeholders:
    """The placeholders: one for each input of the program and each grid that uses it.

    `wide` are inputs that come with more than their own tile; a lowering without finds
    out what is wanted of them (`wide_inputs`).
    """

    def __init__(
        self,
        program: Program,
        grids: tuple[GridShape, ...],
        tile: int,
        wide: Wide,
        probe: Probe,
    ) -> None:
        self._program = program
        self._probe = probe
        self._grids = grids
        self._tile = tile
        self._wide = wide
        self._wishes: dict[Key, list[tuple[Box, ...]]] = {}
        self._locals: dict[Key, Local] = {}
        self._items = {item.name: item for item in program.inputs}
        given = [node for node in program.graph.nodes if node.op == "placeholder"]
        images, others = images_among(given, program.module)
        self._others = set(others) if images else set()
        self._stage_of = program.stage_of

    def __getitem__(self, key: Key) -> Local:
        return self._locals[key]

    def any_of(self, node: fx.Node) -> fx.Node:
        """Return a placeholder for an input that the model returns as it is."""
        return next(v.node for (n, _), v in self._locals.items() if n is node)

    def is_wide(self, node: fx.Node, grid: GridShape) -> bool:
        """Whether an input comes with more than the tile's own part."""
        return self._given(node, grid) is not None

    def _given(self, node: fx.Node, grid: GridShape) -> tuple[Box, ...] | None:
        return self._wide.get((self._items[node.name].path, grid))

    def held(
        self, node: fx.Node, grid: GridShape, wanted: tuple[Box, ...]
    ) -> tuple[Box, ...]:
        """Return what the tiles have of an input; remember what they want of it."""
        self._wishes.setdefault((node, grid), []).append(wanted)
        owned = held_boxes(whole_shape(node), self._locals[node, grid].axes, grid.axes)
        return self._given(node, grid) or owned

    def add_to(self, graph: fx.Graph) -> tuple[GraphInput, ...]:
        """Add a placeholder for each input and each grid that uses it."""
        result = []
        for node in self._program.graph.nodes:
            if node.op != "placeholder":
                continue
            stages = {self._stage_of[u] for u in node.users if u in self._stage_of}
            grids = dict.fromkeys(self._grids[index] for index in sorted(stages))
            for grid in grids or {ALONE: None}:
                axes = self._image_axes(node, grid)
                new = graph.placeholder(node.name)
                wide = self._given(node, grid)  # with the halo that its users want
                annotate_part(new, node, axes, grid.axes, self._tile, wide)
                self._locals[node, grid] = Local(new, axes)
                item = self._items[node.name]
                spec = replace(item.spec, shape=tuple(meta.value(new).shape))
                result.append(replace(item, name=new.name, spec=spec))
        return tuple(result)

    def wide_inputs(self) -> Wide:
        """Return what each input that is cut should hold, so that nothing is sent."""
        result: Wide = {}
        for (node, grid), wishes in self._wishes.items():
            shape = whole_shape(node)
            owned = held_boxes(shape, self._locals[node, grid].axes, grid.axes)
            image = everything(shape)
            boxes = tuple(
                hull(mine, *(intersection(wish[tile], image) for wish in wishes))
                for tile, mine in enumerate(owned)
            )
            if boxes != owned:
                result[self._items[node.name].path, grid] = boxes
        return result

    def _image_axes(self, node: fx.Node, grid: GridShape) -> Axes | None:
        """Return how an input is cut: images and masks, not labels or sequences."""
        if not grid.tiles or node in self._others:
            return None
        shape = whole_shape(node)
        num_axes = len(grid.tiles)
        axes = last_axes(len(shape), grid.tiles)
        if axes is None:
            return None
        images = self._images(num_axes)
        if len(shape) == num_axes + 2:
            if shape[1:-1] in self._channels_last(num_axes):
                axes = (axes[0], *axes[2:], None)
        elif len(shape) != num_axes + 1 or shape[1:] not in images:
            return None
        return axes if fits(shape, axes, grid.axes) else None

    def _images(self, dims: int) -> set[tuple[int, ...]]:
        """Return the rows, columns, ... of all images."""
        return {
            whole_shape(node)[2:] for node in self._of_rank(dims + 2)
        } | self._channels_last(dims)

    def _channels_last(self, dims: int) -> set[tuple[int, ...]]:
        """Return those of images that forward first gives PyTorch's order of axes."""
        order = (0, dims + 1, *range(1, dims + 1))
        return {
            whole_shape(node)[1:-1]
            for node in self._of_rank(dims + 2)
            if self._is_permuted(node, order)
        }

    def _of_rank(self, rank: int) -> list[fx.Node]:
        nodes = self._program.graph.nodes
        return [
            n
            for n in nodes
            if n.op == "placeholder"
            and len(whole_shape(n)) == rank
            and n not in self._others
        ]

    def _is_permuted(self, node: fx.Node, order: tuple[int, ...]) -> bool:
        """Whether all that is done to a value is elementwise, and then this permute."""
        return bool(node.users) and all(
            user.args[1:] in (order, (order,))
            if user.target in ("permute", torch.permute)
            else self._probe.is_pointwise(user) and self._is_permuted(user, order)
            for user in node.users
        )


def images_among(
    inputs: list[fx.Node], module: nn.Module
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the inputs that are images, and those that are none.

    The first meet a window of a rank that their dimensions have room for; the others
    meet products alone, as a text that a U-Net is told: of [batch, tokens, features],
    it has as many dimensions as a signal. Of the rest, as masks, the sizes decide.
    """
    images, others = [], []
    for node in inputs:
        met = set(_met(node, module))
        if any(len(whole_shape(node)) >= rank + 2 for rank in met if rank):
            images.append(node)
        elif met:
            others.append(node)
    return images, others


def _met(start: fx.Node, module: nn.Module) -> Iterator[int]:
    """Give the ranks of the windows that move over a value, and 0 for each product.

    It is followed through all that leaves it where it is.
    """
    waiting, seen = [start], {start}
    while waiting:
        node = waiting.pop()
        for user in node.users:
            call = call_of(user, module)
            does = operator_of(call).does
            if does == "window":
                moved = call.get("input"), call.get("indices")
                yield call.rank if node in moved else 0
            elif does == "resize":
                yield len(whole_shape(node)) - 2
            elif does == "product" or _is_layer(call.kind, call.layer):
                yield 0
            elif does != "reduction" and user not in seen:
                seen.add(user)
                waiting.append(user)


def _is_layer(kind: str, layer: nn.Module | None) -> bool:
    """Return whether a layer with weights of its own may move elements."""
    return not kind and layer is not None and any(True for _ in layer.parameters())
