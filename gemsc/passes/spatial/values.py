"""Values and layers of a lowered graph: shapes, boxes and layouts on a grid."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn

from gemsc.base.boxes import Box, everything, intersection, is_inside, shape_of
from gemsc.base.dtypes import lying_of
from gemsc.base.parts import Part
from gemsc.errors import GemscError
from gemsc.ir import meta
from gemsc.ir.holder import put_layer, shallow_copy
from gemsc.ir.layout import Layout
from gemsc.ir.mutation import memory, mutated_inputs
from gemsc.ir.program import Program
from gemsc.passes.spatial.cuts import Axes, boxes

NOTHING: Box = ((0, 0),)
CUT_TWICE = "tiles and shards cut the same dimension"


class Refused(Exception):  # noqa: N818 - no error: the caller gathers instead
    """A rule cannot compute a node on tiles; says why, for the report."""


@dataclass(frozen=True, slots=True)
class Flattened:
    """How a value is held whose dimensions were flattened: still with all of them.

    `shape` is the whole value's as it is held; `groups` says for each dimension of the
    value how many of these it joins: (1, 3) for N x C x H x W that was flattened to
    N x F.
    """

    shape: tuple[int, ...]
    groups: tuple[int, ...]

    def parts(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        """Return what ranks have of it as it is held, of parts of the flat value.

        Raises:
            Refused: they are no units of one of the dimensions that were joined.
        """
        return tuple(map(self._part, parts))

    def _part(self, part: Part) -> Part:
        if part.is_alone:
            return Part(self.shape) if part.share else Part.nothing(self.shape)
        first = sum(self.groups[: part.dim])
        outer = part.outer
        for dim in range(first, first + self.groups[part.dim]):
            if self.shape[dim] % (outer * part.units) == 0:
                return Part(self.shape, dim, outer, part.units, part.rows)
            outer, remainder = divmod(outer, self.shape[dim])
            if remainder:
                break
        raise Refused("ranks have parts of it, and it is flattened")

    def sizes(self, held: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sizes of the flat value of which these are held."""
        stops = list(accumulate(self.groups))
        return tuple(
            prod(held[stop - count : stop])
            for stop, count in zip(stops, self.groups, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Local:
    """A value as the lowered graph has it.

    `axes` says which of its dimensions are cut; None: every tile holds all of it. Of a
    tuple of tensors, all have the same axes. `parts` are what each rank has of a value
    that is cut among shards, too: heads, features, channels or words; or that is in a
    branch, and one of the ranks that share a tile alone has it. Where it is held with
    the dimensions of before it was `flattened`, the axes are those of these.
    """

    node: fx.Node
    axes: Axes | None
    parts: tuple[Part, ...] = ()
    flattened: Flattened | None = None

    def __post_init__(self) -> None:
        """See that tiles and shards cut different dimensions."""
        if self.axes is None or not self.parts:
            return
        first = self.held_parts[0]
        if not first.is_alone and self.axes[first.dim] is not None:
            raise Refused(CUT_TWICE)

    @property
    def held_parts(self) -> tuple[Part, ...]:
        """The parts as they are held: with all dimensions."""
        return held_parts(self.parts, self.flattened)


def held_parts(
    parts: tuple[Part, ...], flattened: Flattened | None
) -> tuple[Part, ...]:
    """Return parts of a value as they are held where it was flattened."""
    return parts if flattened is None else flattened.parts(parts)


def whole_shape(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a whole value; () for what is no tensor."""
    fake = meta.value(node)
    return tuple(fake.shape) if isinstance(fake, Tensor) else ()


def held_boxes(
    shape: tuple[int, ...], axes: Axes | None, grid: tuple[int, ...]
) -> tuple[Box, ...]:
    """Return what each tile of a grid holds of a value."""
    if axes is None:
        return (everything(shape),) * prod(grid)
    return boxes(shape, axes, grid)


def last_axes(dims: int, grid: tuple[int, ...]) -> Axes | None:
    """Return the axes that cut the last dimensions, None if there are too few."""
    if dims < len(grid) or not grid:
        return None
    cuts = tuple(axis if parts > 1 else None for axis, parts in enumerate(grid))
    return (*(None,) * (dims - len(grid)), *cuts)


def unfolded(shape: tuple[int, ...], parts: tuple[Part, ...]) -> tuple[int, ...]:
    """Return the shape in which parts of a value are boxes; it is as it is without."""
    if not parts or parts[0].outer == 1:
        return shape
    dim, outer = parts[0].dim, parts[0].outer
    return (*shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :])


def refined(
    boxes: tuple[Box, ...], parts: tuple[Part, ...], *, cut: bool = True
) -> tuple[Box, ...]:
    """Return what ranks have of boxes whose other dimensions shards cut, unfolded.

    Without `cut` it is all that the boxes have. What one shard alone has, others have
    nothing of.

    Raises:
        Refused: tiles cut the same dimension.
    """
    if not parts or not boxes:
        return boxes
    held = []
    for box, part in zip(boxes, parts, strict=True):
        if part.is_alone:
            held.append(box if part.share or not cut else NOTHING * len(box))
            continue
        if box[part.dim] != (0, part.shape[part.dim]):
            raise Refused(CUT_TWICE)
        repeats = ((0, part.outer),) if part.outer > 1 else ()
        start, stop = part.rows if cut else (0, part.units)
        rows = start * part.inner, stop * part.inner
        held.append((*box[: part.dim], *repeats, rows, *box[part.dim + 1 :]))
    return tuple(held)


def covers(
    held: tuple[Box, ...], wanted: tuple[Box, ...], shape: tuple[int, ...]
) -> bool:
    """Whether every tile holds what it wants, as far as there is such."""
    image = everything(shape)
    return all(
        is_inside(intersection(want, image), have)
        for want, have in zip(wanted, held, strict=True)
    )


def annotate_part(
    new: fx.Node,
    old: fx.Node,
    axes: Axes | None,
    grid: tuple[int, ...],
    tile: int,
    wide: tuple[Box, ...] | None = None,
    shape: tuple[int, ...] | None = None,
    parts: tuple[Part, ...] = (),
) -> None:
    """Give a node the facts of the old one, with local shapes and a layout.

    `wide` is what the tiles compute of it, where that is more than they own; `shape`
    that in which it is held, where that is another one; `parts` what shards have of it.
    A layout cannot say units that repeat.
    """
    if not grid or not meta.is_one_tensor(old):
        describe(new, old, None, None if shape == whole_shape(old) else shape)
        return
    shape = whole_shape(old) if shape is None else shape
    owned, place = held_boxes(shape, axes, grid), tile % prod(grid)
    boxes = wide if wide is not None and axes is not None else owned
    layout = None
    if not parts or parts[0].outer == 1:
        given = refined(owned, parts) if boxes is not owned else ()
        layout = Layout(shape, refined(boxes, parts), given)
    sizes = local_sizes(shape_of(boxes[place]), parts, place)
    describe(new, old, layout, sizes)


def describe(
    new: fx.Node,
    old: fx.Node,
    layout: Layout | None,
    shape: tuple[int, ...] | None,
) -> None:
    """Give a node the facts of an old one, with a layout and, if given, a shape."""
    meta.copy_meta(old, new)
    meta.whole_gradients.set(new, None)
    meta.layout.set(new, layout)
    if shape is not None:
        fake = meta.value(old)
        form = lying_of(fake) if len(shape) == fake.dim() else torch.contiguous_format
        meta.whole_format.set(new, form)
        with fake.fake_mode:
            meta.set_value(new, fake.new_empty(shape))


def local_sizes(
    sizes: tuple[int, ...], parts: tuple[Part, ...], place: int
) -> tuple[int, ...]:
    """Return the sizes of what a rank has of a box of which shards have parts."""
    if not parts or parts[place].is_alone:
        return sizes
    dim, shape = parts[place].dim, parts[place].local_shape
    return (*sizes[:dim], shape[dim], *sizes[dim + 1 :])


class Layers:
    """The module of a lowered program: the user's own, which stays as it is."""

    def __init__(self, program: Program, lowered: nn.Module) -> None:
        self._old = program.module
        self._new = lowered
        self._replaced: list[tuple[str, nn.Module]] = []  # what was there before
        self._calls = Counter(
            str(n.target) for n in program.graph.nodes if n.op == "call_module"
        )

    def is_shared(self, path: str) -> bool:
        """Whether a layer is called more than once."""
        return self._calls[path] > 1

    @property
    def num_replaced(self) -> int:
        """How many layers were put in the place of others."""
        return len(self._replaced)

    def take_back(self, count: int) -> None:
        """Put back what was in the place of all but the first `count` layers."""
        while len(self._replaced) > count:
            put_layer(self._new, *self._replaced.pop())

    def change(self, node: fx.Node, changes: dict[str, Any]) -> None:
        """Put a copy with other settings, the same parameters, in a layer's place.

        Raises:
            Refused: the layer is called elsewhere too.
        """
        path = str(node.target)
        if self.is_shared(path):
            raise Refused("the layer is called more than once")
        layer = shallow_copy(self._old.get_submodule(path))
        for name, value in changes.items():
            setattr(layer, name, value)
        self._replaced.append((path, self._new.get_submodule(path)))
        put_layer(self._new, path, layer)


def check_written_views(node: fx.Node, program: Program) -> None:
    """Refuse a custom function on a grid that writes to what is used later.

    Around its call, gradients are added up over ranks (`tiles.with_whole_gradients`):
    those of views of what it has written to would go past it.

    Raises:
        GemscError: it does; names the function and the line.
    """
    place = {n: number for number, n in enumerate(program.graph.nodes)}
    sources = mutated_inputs(node, program.module)
    written = {key for n in sources if n.op != "get_attr" for key in memory(n)}
    for other in place:
        shares = place[other] < place[node] and not written.isdisjoint(memory(other))
        if shares and any(place[user] > place[node] for user in other.users):
            name = node.target.__self__.__name__  # type: ignore[union-attr]
            raise GemscError(
                f"{name}.forward changes its input in place, and several ranks share "
                f"this stage: '{other.name}', used later, has the same memory",
                at=meta.location(node),
                help=f"let {name}.forward compute a new value (x = x - 1 for x -= 1), "
                "and go on with what it returns",
            )
