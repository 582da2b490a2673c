"""Lower a stage whose ranks share branches: each rank has the nodes of its own.

What a branch begins with is there as a whole; a trunk that is split is gathered. What
the branches give is exchanged at once, right before their join: side by side in one
row, or, where the join adds them up, as a sum:

    %row = pack((%a, %c), (6144,))                # on the rank that has a and c
    %row_1 = redistribute(grid, %row, ...)        # what others have: b
    %row_2 = unpack(%row_1, ...)

A rank without a branch gives nothing, and takes part in all exchanges: in backward as
well, since what it gives needs a gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, groupby, pairwise
from math import prod
from typing import Any

from torch import Tensor, fx

from gemsc.base.boxes import Box, Interval, everything, shape_of
from gemsc.errors import InternalError
from gemsc.ir import meta
from gemsc.ir.layout import Layout
from gemsc.ir.mutation import elements
from gemsc.ir.shards import Fork
from gemsc.messages.exchange import Exchange
from gemsc.passes.shards.lowering import lower_on_shards, trunk_axes
from gemsc.passes.spatial.cuts import Axes
from gemsc.passes.spatial.lowering import Lowering
from gemsc.passes.spatial.values import Local, annotate_part
from gemsc.runtime import tiles

__all__ = ["lower_node"]


def lower_node(low: Lowering, node: fx.Node) -> Local | None:
    """Lower a node: of a branch, of a join, or of what is between them.

    None for what this rank does not compute.

    Raises:
        Refused: its inputs must be gathered.
    """
    fork = low.shards.fork_of.get(node.name) if low.shards is not None else None
    if fork is None:
        return lower_on_shards(low, node)
    at = _At(low, fork)
    if low.is_in_branch(node):
        return at.branch(node)
    if node.name == fork.join:
        return at.sum(node) if fork.added else at.join(node)
    return None  # an addition before the last: the rank adds up all at once


@dataclass(frozen=True)
class _At:
    """A fork on the rank at hand."""

    low: Lowering
    fork: Fork

    @property
    def ranks(self) -> dict[str, int]:
        """Who computes which node."""
        assert self.low.shards is not None
        return self.low.shards.rank_of

    @property
    def name(self) -> str:
        """How what travels at the join is called, after the user's module."""
        words = reversed(self.fork.name.split("."))
        return next((word for word in words if word.isidentifier()), self.fork.join)

    @property
    def nodes(self) -> list[fx.Node]:
        """The nodes of all branches."""
        inside = {name for branch in self.fork.branches for name in branch.nodes}
        return [node for node in self.low.stage.nodes if node.name in inside]

    # ---------------------------------------------------------- what goes in

    def branch(self, node: fx.Node) -> Local | None:
        """Compute a node as one process does; on the other ranks it is not there."""
        low = self.low
        given = {
            source: self._entering(source)
            for source in node.all_input_nodes
            if source.op != "get_attr" and not low.is_in_branch(source)
        }
        if self.ranks[node.name] != low.place:
            return None
        local = low.copy(node, inputs=given)
        meta.set_whole_gradients(local.node, None)
        if isinstance(meta.value(node), Tensor):
            shape = meta.spec(node).shape
            held = (_box(shape, rank == low.place) for rank in range(low.tiles))
            meta.set_layout(local.node, Layout(shape, tuple(held)))
        if meta.facts(node).random:
            meta.set_draw(local.node, low.draw(node))
        return local

    def _entering(self, source: fx.Node) -> fx.Node:
        """Return a value from outside, as a whole on the ranks that need it."""
        low = self.low
        if not isinstance(meta.value(source), Tensor):
            return low.get(source).node
        local = low.local(source)
        if local.parts or low.flattened(source) is not None:
            return low.whole(source)
        if local.axes is None:
            return local.node
        users = self._users(source)
        shape = low.shape(source)
        return low.part(source, [_box(shape, t in users) for t in range(low.tiles)])

    def _users(self, source: fx.Node) -> set[int]:
        return {self.ranks[node.name] for node in self.nodes if node in source.users}

    def _unused(self, like: fx.Node) -> list[fx.Node]:
        """Return what only other ranks' branches use, and yet this rank needs.

        Exchanges may lead to it, whose backward is that of all ranks, if it is part of
        the backward of `like`; or a message, which all ranks of the stage receive.
        """
        sources = (source for node in self.nodes for source in node.all_input_nodes)
        found = [s for s in dict.fromkeys(sources) if self._is_unused(s)]
        stage = set(self.low.stage.nodes)
        return [
            self._entering(source)
            for source in found
            if (_learns(like) if _learns(source) else source not in stage)
        ]

    def _is_unused(self, source: fx.Node) -> bool:
        """Whether a value is from outside, and only other ranks' branches use it.

        A branch does not use a value that learns if it gives it no gradient.
        """
        if source.op in ("get_attr", "placeholder") or self.low.is_in_branch(source):
            return False
        if not isinstance(meta.value(source), Tensor):
            return False
        users = (node for node in self.nodes if node in source.users)
        mine = [node for node in users if self.ranks[node.name] == self.low.place]
        if not _learns(source):
            return not mine
        return not any(_gives_gradient(node, source) for node in mine)

    def _nothing(self, like: fx.Node, shape: tuple[int, ...]) -> fx.Node:
        """Return the node of no elements, of the dtype of a value."""
        low = self.low
        source, of = self._present(like)
        settings: dict[str, Any] = {}
        if _dtypes(like) != _dtypes(source):
            settings["dtype"] = meta.spec(like).dtype
        if not _learns(like):
            settings["learns"] = False
        args = of, shape
        node = low.add(like, tiles.nothing, args, shape, name=self.name, **settings)
        stays = meta.dtypes(like).value
        meta.set_dtypes(node, meta.Dtypes(stays, constants=stays))
        return node

    def _present(self, like: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Return a tensor that there is on this rank before the join, and its node.

        It is of the dtype of `like` if the branches take one of it. A parameter of
        theirs may be on the rank of one of them alone.
        """
        low = self.low
        taken = [s for s in self._taken(self.nodes) if s.op != "get_attr"]
        if taken:
            best = min(taken, key=lambda source: _dtypes(source) != _dtypes(like))
            return best, self._entering(best)
        nodes = low.stage.nodes
        before = nodes[: [node.name for node in nodes].index(self.fork.join)]
        assert low.shards is not None
        elsewhere = {n for n, rank in low.shards.placed if rank != low.place}
        for source in sorted(self._taken(before), key=lambda s: s.op == "get_attr"):
            if source.op != "get_attr" or str(source.target) not in elsewhere:
                return source, low.local(source).node
        raise InternalError(f"there is nothing before {self.fork.join}")

    def _taken(self, nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
        """Yield the tensors from outside of branches that some nodes take."""
        for source in (source for node in nodes for source in node.all_input_nodes):
            is_tensor = isinstance(meta.value(source), Tensor)
            if is_tensor and not self.low.is_in_branch(source):
                yield source

    def _tied(self, value: fx.Node, like: fx.Node) -> fx.Node:
        """Return a value whose backward is that of what arrived in vain, too."""
        unused = self._unused(like)
        if not unused:
            return value
        shape = tuple(meta.value(value).shape)
        layout = meta.layout(value)
        args = (value, tuple(unused))
        return self.low.add(like, tiles.tied, args, shape, layout, name=self.name)

    # --------------------------------------------------------- what comes out

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
        return _learns(value), _dtypes(value), self._kept(value), str(self._axes(value))

    def _axes(self, value: fx.Node) -> Axes | None:
        """Return how the join takes a value: split as the trunk is, or whole."""
        shards = self.low.shards
        assert shards is not None
        if self.fork.join not in shards.split_dims:
            return None
        return trunk_axes(self.low, value)

    def _kept(self, value: fx.Node) -> tuple[int, ...]:
        """Return the sizes of the dimensions that stay when a value is packed."""
        axes = self._axes(value)
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
        kept, axes = self._kept(first), self._axes(first)
        row = _Row.of(values, [self.ranks[v.name] for v in values], prod(kept))
        shape = (*kept, row.width)
        cut: Axes | None = (*axes[: len(kept)], None) if axes is not None else None
        ranks = range(low.tiles)
        held = tuple((*everything(kept), row.held(rank)) for rank in ranks)
        whole = low.owned(shape, cut)
        wanted = tuple((*whole[rank][:-1], row.wanted(rank)) for rank in ranks)
        exchange = low.exchange(shape, held, wanted)
        packed = self._sent(first, self._packed(values), exchange)
        arrived = row.inside(row.wanted(low.place))
        items = {v: self._own(v) for v in values if v not in arrived}
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

    def _wanted(self, value: fx.Node) -> Layout:
        """Return what each rank wants of a branch's result."""
        shape = meta.spec(value).shape
        return Layout(shape, self.low.owned(shape, self._axes(value)))

    def _own(self, value: fx.Node) -> fx.Node:
        """Return what the join wants of a value that this rank has computed."""
        here, wanted = self.low.local(value).node, self._wanted(value)
        held = (everything(wanted.shape),) * self.low.tiles
        if wanted.boxes == held:
            return here
        return self.low.cropped(here, wanted.shape, held, wanted.boxes)

    def _packed(self, values: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
        """Return the values that this rank has computed."""
        here = self.low.place
        mine = (value for value in values if self.ranks[value.name] == here)
        return tuple(self.low.local(value).node for value in mine)

    def _sent(
        self, like: fx.Node, own: tuple[fx.Node, ...], exchange: Exchange
    ) -> fx.Node:
        """Return what comes of an exchange of rows to which this rank gives its own."""
        low = self.low
        shape = shape_of(exchange.held[low.place])
        layout = Layout(exchange.shape, exchange.held)
        if own:
            args = own, shape
            row = low.add(like, tiles.pack, args, shape, layout, name=self.name)
        else:
            row = self._nothing(like, shape)
        return self._given(like, row, exchange)

    def _given(self, like: fx.Node, held: fx.Node, exchange: Exchange) -> fx.Node:
        low = self.low
        args = (low.here, self._tied(held, like), exchange)
        layout = Layout(exchange.shape, exchange.wanted)
        shape = layout.local_shape(low.place)
        return low.add(like, tiles.redistribute, args, shape, layout, name=self.name)

    def sum(self, node: fx.Node) -> Local:
        """Add up what this rank has, then what all have, then what all know."""
        low, shape = self.low, meta.spec(node).shape
        added = set(self.fork.added)
        among = [n for n in low.stage.nodes if n.name in added]
        terms = [s for n in among for s in n.all_input_nodes if s.name not in added]
        mine = [t for t in terms if low.is_in_branch(t)]
        ranks = {self.ranks[term.name] for term in mine}
        held = tuple(_box(shape, rank in ranks) for rank in range(low.tiles))
        axes = self._axes(node)
        exchange = low.exchange(shape, held, low.owned(shape, axes), adds=True)
        own = self._packed(mine)
        if own:
            addend = reduce(lambda a, b: self._plus(node, a, b, shape), own)
        else:
            addend = self._nothing(node, shape_of(held[low.place]))
        total = self._given(node, addend, exchange)
        known = [low.spread(t, axes) for t in terms if not low.is_in_branch(t)]
        size = shape_of(exchange.wanted[low.place])
        result = reduce(lambda a, b: self._plus(node, a, b, size), known, total)
        annotate_part(result, node, axes, low.grid, low.place)
        return Local(result, axes)

    def _plus(
        self, node: fx.Node, a: fx.Node, b: fx.Node, shape: tuple[int, ...]
    ) -> fx.Node:
        return self.low.add(node, operator.add, (a, b), shape)


def _box(shape: tuple[int, ...], is_held: bool) -> Box:
    """Return the box of all of a value, or of nothing."""
    return everything(shape) if is_held else ((0, 0),) * len(shape)


def _gives_gradient(user: fx.Node, source: fx.Node) -> bool:
    """Whether a gradient flows back to a value: `type_as` reads its dtype alone."""
    return _learns(user) and source in elements(user)


def _dtypes(node: fx.Node) -> tuple[str, bool]:
    """Return a value's dtype, and whether a model in another dtype has it, too."""
    return str(meta.spec(node).dtype), meta.dtypes(node).value


def _learns(node: fx.Node) -> bool:
    return meta.needs_gradient(node)


@dataclass(frozen=True)
class _Row:
    """Values side by side, those of one rank after those of the one before."""

    values: tuple[fx.Node, ...]
    ranks: tuple[int, ...]
    columns: tuple[Interval, ...]

    @classmethod
    def of(cls, values: Sequence[fx.Node], ranks: Sequence[int], rows: int) -> _Row:
        """Return the row of values, of which each has so many rows."""
        widths = (meta.spec(value).num_elements // rows for value in values)
        edges = [0, *accumulate(widths)]
        return cls(tuple(values), tuple(ranks), tuple(pairwise(edges)))

    @property
    def width(self) -> int:
        """The number of columns."""
        return self.columns[-1][1]

    def held(self, rank: int) -> Interval:
        """Return the columns that a rank computes."""
        return self._hull(r == rank for r in self.ranks)

    def wanted(self, rank: int) -> Interval:
        """Return the columns that a rank gets: from the first to the last of others."""
        if {*self.ranks} == {rank}:
            return self.held(rank)
        return self._hull(r != rank for r in self.ranks)

    def _hull(self, chosen: Iterable[bool]) -> Interval:
        found = [c for c, is_in in zip(self.columns, chosen, strict=True) if is_in]
        return (found[0][0], found[-1][1]) if found else (0, 0)

    def inside(self, part: Interval) -> list[fx.Node]:
        """Return the values in some columns."""
        pairs = zip(self.values, self.columns, strict=True)
        return [v for v, (a, b) in pairs if part[0] <= a and b <= part[1]]
