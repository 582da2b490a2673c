"""Joins of branches: what their results travel in, and what every rank makes of them.

Side by side in one row; or, where the join adds them up, as a sum. On tiles a row is a
row of rows, one for each tile.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, groupby, pairwise
from math import prod

from torch import fx

from gemsc.base.boxes import Box, Interval, everything, shape_of, volume
from gemsc.ir import meta
from gemsc.ir.flow import has_random
from gemsc.ir.layout import Layout
from gemsc.messages.exchange import Exchange
from gemsc.passes.branches.fork_here import ForkHere, box_of, dtypes_of
from gemsc.passes.shards.lowering import lower_on_shards, trunk_axes
from gemsc.passes.spatial.cuts import Axes
from gemsc.passes.spatial.values import Local, annotate_part
from gemsc.runtime import tiles


class JoinHere(ForkHere):
    """The join of a fork on the rank at hand."""

    def join(self, node: fx.Node) -> Local | None:
        """Exchange what the branches give, and join it."""
        values = [s for s in node.all_input_nodes if self.low.is_in_branch(s)]
        values.sort(key=lambda value: self.ranks[value.name])
        given: dict[fx.Node, Local] = {}
        for _, group in groupby(sorted(values, key=self._form), self._form):
            given |= self._exchanged(node, tuple(group))
        with self.low.instead(given):
            return self.low.lower(node, lower_on_shards)

    def _form(self, value: fx.Node) -> tuple[object, ...]:
        """Return what values have in common that travel together."""
        return (
            meta.needs_gradient(value),
            dtypes_of(value),
            self._kept(value),
            str(self._axes(value)),
        )

    def _axes(self, value: fx.Node) -> Axes | None:
        """Return how the join takes a value: as tiles or a trunk cut it, or whole."""
        shards = self.low.shards
        assert shards is not None
        if self.low.pictures:
            return self.low.axes(value)
        if self.fork.join not in shards.split_dims:
            return None
        return trunk_axes(self.low, value)

    def _kept(self, value: fx.Node) -> tuple[int, ...]:
        """Return the sizes of the dimensions that stay when a value is packed."""
        axes = None if self.low.pictures else self._axes(value)
        shape = meta.spec(value).shape
        return shape[: axes.index(0) + 1] if axes is not None else ()

    def _exchanged(
        self, join: fx.Node, values: Sequence[fx.Node]
    ) -> dict[fx.Node, Local]:
        """Return the results of all branches: a row of columns, by their ranks.

        What other ranks have comes in one piece of the row. This rank's own results are
        there already, unless they stand in the middle.
        """
        low, first = self.low, values[0]
        kept = self._kept(first)
        axes = self._axes(first) if kept else None
        row = self._row(values, prod(kept))
        shape = (*kept, row.width)
        cut: Axes | None = (*axes[: len(kept)], None) if axes is not None else None
        ranks = range(low.tiles)
        held = tuple((*everything(kept), row.held(rank)) for rank in ranks)
        whole = low.owned(shape, cut)
        wanted = tuple((*whole[rank][:-1], row.wanted(rank)) for rank in ranks)
        exchange = low.exchange(shape, held, wanted)
        packed = self._sent(first, self._packed(values), exchange)
        arrived = row.inside(low.place)
        items = {v: self._computed_here(v) for v in values if v not in arrived}
        layouts = [self._wanted(value) for value in arrived]
        shapes = tuple(layout.local_shape(low.place) for layout in layouts)
        taken = low.add(join, tiles.unpack, (packed, shapes), ())
        fake = meta.value(first)
        with fake.fake_mode:
            meta.set_value(taken, tuple(map(fake.new_empty, shapes)))
        for number, (value, layout) in enumerate(zip(arrived, layouts, strict=True)):
            args = (taken, number)
            items[value] = low.add(
                value, operator.getitem, args, shapes[number], layout
            )
        return {value: Local(items[value], self._axes(value)) for value in values}

    def _row(self, values: Sequence[fx.Node], height: int) -> _Row:
        """Return the row of values of which each has so many rows."""
        members = [self.ranks[value.name] for value in values]
        boxes = [self._computed(value) for value in values]
        widths = [
            [volume(held[rank]) // height for held in boxes]
            for rank in range(0, self.low.tiles, self.count)
        ]
        return _Row.of(values, members, widths, self.count)

    def _computed(self, value: fx.Node) -> tuple[Box, ...]:
        """Return what each rank has of a branch's result if it computes the branch."""
        axes = self._axes(value) if self.low.pictures else None
        return self.low.owned(meta.spec(value).shape, axes)

    def _wanted(self, value: fx.Node) -> Layout:
        """Return what each rank wants of a branch's result."""
        shape = meta.spec(value).shape
        return Layout(shape, self.low.owned(shape, self._axes(value)))

    def _computed_here(self, value: fx.Node) -> fx.Node:
        """Return what the join wants of a value that this rank has computed.

        If all ranks draw random numbers, for a dropout of what they make of it, it lies
        in memory as it does where it arrives: they are drawn in that order.
        """
        low, wanted, held = self.low, self._wanted(value), self._computed(value)
        here = low.local(value).node
        if wanted.boxes != held:
            return low.cropped(here, wanted.shape, held, wanted.boxes)
        shared = (node for node in low.stage.nodes if not low.is_in_branch(node))
        if not has_random(shared):
            return here
        shape = tuple(meta.value(here).shape)
        return low.add(value, "contiguous", (here,), shape, meta.layout(here))

    def _packed(self, values: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
        """Return the values that this rank has computed."""
        return tuple(self.low.local(v).node for v in values if self.computes(v))

    def _sent(
        self, like: fx.Node, computed: tuple[fx.Node, ...], exchange: Exchange
    ) -> fx.Node:
        """Return what comes of an exchange of rows to which this rank gives its own."""
        low = self.low
        shape = shape_of(exchange.held[low.place])
        layout = Layout(exchange.shape, exchange.held)
        if computed:
            args = computed, shape
            row = low.add(like, tiles.pack, args, shape, layout, name=self.name)
        else:
            row = self.nothing(like, shape)
        return self._given(like, row, exchange)

    def _given(self, like: fx.Node, held: fx.Node, exchange: Exchange) -> fx.Node:
        low = self.low
        args = (low.here, self.tied(held, like), exchange)
        layout = Layout(exchange.shape, exchange.wanted)
        shape = layout.local_shape(low.place)
        return low.add(like, tiles.redistribute, args, shape, layout, name=self.name)

    def sum(self, node: fx.Node) -> Local:
        """Add up what this rank has, then what all have, then what all know."""
        low, shape = self.low, meta.spec(node).shape
        added = set(self.fork.added)
        among = [n for n in low.stage.nodes if n.name in added]
        terms = [s for n in among for s in n.all_input_nodes if s.name not in added]
        inside = [t for t in terms if low.is_in_branch(t)]
        others = [t for t in terms if not low.is_in_branch(t)]
        axes = self._axes_of_sum(node, inside, others)
        boxes = low.owned(shape, axes if low.pictures else None)
        members = {self.ranks[term.name] for term in inside}
        held = tuple(
            box if rank % self.count in members else box_of(shape, is_held=False)
            for rank, box in enumerate(boxes)
        )
        wanted = low.owned(shape, axes)
        rows = [prod(low.pictures) * size for size in shape[:1]]
        given, taken = self._apart(held, shape), self._apart(wanted, shape)
        exchange = low.exchange((*rows, *shape[1:]), given, taken, adds=True)
        addends, size = self._addends(inside, axes), shape_of(held[low.place])
        if addends:
            addend = reduce(lambda a, b: self._plus(node, a, b, size), addends)
        else:
            addend = self.nothing(node, size)
        total = self._given(node, addend, exchange)
        known = [self._known(term, axes) for term in others]
        size = shape_of(wanted[low.place])
        result = reduce(lambda a, b: self._plus(node, a, b, size), known, total)
        annotate_part(result, node, axes, low.grid, low.place)
        return Local(result, axes)

    def _apart(self, boxes: Sequence[Box], shape: tuple[int, ...]) -> tuple[Box, ...]:
        """Return the boxes of each tile below those of the one before.

        The ranks of one tile add up: what several tiles have counts on each of them.
        """
        shifted = []
        for rank, box in enumerate(boxes):
            start = rank // self.count * shape[0] if shape else 0
            first = [(a + start, b + start) for a, b in box[:1]]
            shifted.append((*first, *box[1:]))
        return tuple(shifted)

    def _axes_of_sum(
        self, node: fx.Node, inside: Sequence[fx.Node], others: Sequence[fx.Node]
    ) -> Axes | None:
        """Return how a sum is held: as tiles cut the first branch, if they can."""
        low = self.low
        if not low.pictures:
            return self._axes(node)
        if any(low.flattened(term) is not None for term in others):
            return None
        return next((low.axes(t) for t in inside if low.axes(t) is not None), None)

    def _addends(
        self, inside: Sequence[fx.Node], axes: Axes | None
    ) -> tuple[fx.Node, ...]:
        """Return the terms that this rank has computed, cut like this."""
        low = self.low
        if not low.pictures:
            return self._packed(inside)
        addends = []
        for term in inside:
            local = {term: low.local(term)}
            with low.on_member(self.ranks[term.name]), low.instead(local):
                addend = low.spread(term, axes)
            if self.computes(term):
                addends.append(addend)
        return tuple(addends)

    def _known(self, term: fx.Node, axes: Axes | None) -> fx.Node:
        """Return a term of a sum that all ranks have, cut like this."""
        low = self.low
        if not low.pictures or low.flattened(term) is not None:
            return low.spread(term, axes)
        with low.instead({term: low.shared(term, ())}):
            return low.spread(term, axes)

    def _plus(
        self, node: fx.Node, a: fx.Node, b: fx.Node, shape: tuple[int, ...]
    ) -> fx.Node:
        return self.low.add(node, operator.add, (a, b), shape)


@dataclass(frozen=True)
class _Row:
    """Values side by side, those of one rank after those of the one before.

    One tile's values stand after those of another: `columns` has a row for each tile,
    which `count` ranks share. `members` say which of them computes each value.
    """

    values: tuple[fx.Node, ...]
    members: tuple[int, ...]
    columns: tuple[tuple[Interval, ...], ...]
    count: int

    @classmethod
    def of(
        cls,
        values: Sequence[fx.Node],
        members: Sequence[int],
        widths: Sequence[Sequence[int]],
        count: int,
    ) -> _Row:
        """Return the row of values with these widths on each tile."""
        edges = [0, *accumulate(width for tile in widths for width in tile)]
        pairs, size = tuple(pairwise(edges)), len(values)
        columns = tuple(pairs[n : n + size] for n in range(0, len(pairs), size))
        return cls(tuple(values), tuple(members), columns, count)

    @property
    def width(self) -> int:
        """The number of columns."""
        return self.columns[-1][-1][1]

    def held(self, rank: int) -> Interval:
        """Return the columns that a rank computes."""
        return self._hull(rank, lambda member: member == rank % self.count)

    def wanted(self, rank: int) -> Interval:
        """Return the columns that a rank gets: from the first to the last of others."""
        mine = rank % self.count
        if {*self.members} == {mine}:
            return self.held(rank)
        return self._hull(rank, lambda member: member != mine)

    def _hull(self, rank: int, chosen: Callable[[int], bool]) -> Interval:
        columns = self.columns[rank // self.count]
        spans = [c for c, m in zip(columns, self.members, strict=True) if chosen(m)]
        return (spans[0][0], spans[-1][1]) if spans else (0, 0)

    def inside(self, rank: int) -> list[fx.Node]:
        """Return the values that a rank gets."""
        first, last = self.wanted(rank)
        pairs = zip(self.values, self.columns[rank // self.count], strict=True)
        return [v for v, (a, b) in pairs if first <= a and b <= last]
