"""Lower a stage whose ranks share branches: each rank has the nodes of its own.

What a branch begins with is there as a whole; a trunk that is split is gathered. What
the branches give is exchanged at once, right before their join: side by side in one
row, or, where the join adds them up, as a sum:

    %row = pack((%a, %c), (6144,))                # on the rank that has a and c
    %row_1 = redistribute(grid, %row, ...)        # what others have: b
    %row_2 = unpack(%row_1, ...)

A rank without a branch gives nothing, and takes part in all exchanges: in backward as
well, since what it gives needs a gradient.

On tiles, one of the ranks that share a tile computes its part of the branch; halos go
from tile to tile among those that compute the same branch. A row is then a row of rows,
one for each tile.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, groupby, pairwise
from math import prod
from typing import Any

from torch import Tensor, fx

from gemsc.base.boxes import Box, Interval, everything, shape_of, volume
from gemsc.base.parts import Part
from gemsc.errors import GemscError, InternalError
from gemsc.ir import meta
from gemsc.ir.layout import Layout
from gemsc.ir.mutation import elements
from gemsc.ir.shards import Fork
from gemsc.messages.exchange import Exchange
from gemsc.passes.shards.lowering import lower_on_shards, trunk_axes
from gemsc.passes.spatial.cuts import Axes
from gemsc.passes.spatial.lowering import Lowering
from gemsc.passes.spatial.rules import lower_call
from gemsc.passes.spatial.values import Local, annotate_part, whole_shape
from gemsc.runtime import tiles


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
        """Who computes which node, of the ranks that share a tile."""
        assert self.low.shards is not None
        return self.low.shards.rank_of

    def computes(self, node: fx.Node) -> bool:
        """Whether the rank at hand computes a node of a branch."""
        return self.ranks[node.name] == self.low.member

    @property
    def count(self) -> int:
        """How many ranks share a tile."""
        assert self.low.shards is not None
        return self.low.shards.count

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
        if low.pictures:
            return self._on_tiles(node, given)
        if not self.computes(node):
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

    def _on_tiles(self, node: fx.Node, entering: dict[fx.Node, fx.Node]) -> Local:
        """Compute a tile's part of a node on the rank that has its branch."""
        low, rank = self.low, self.ranks[node.name]
        if meta.glue(node) is not None:  # in evaluation: a branch of training has none
            raise GemscError(
                f"'{meta.layer(node)}' changes in place what tiles share, in a branch",
                at=meta.location(node),
                help=f"keep it whole: --whole {meta.layer(node)}",
            )

        def alone(value: fx.Node) -> tuple[Part, ...]:
            return self._alone(value, rank)

        given: dict[fx.Node, Local] = {}
        for source in node.all_input_nodes:
            if isinstance(meta.value(source), Tensor) and source.op != "get_attr":
                given[source] = before = low.local(source)
                if source in entering:
                    axes = before.axes if before.flattened is None else None
                    given[source] = Local(entering[source], axes, alone(source))
        with low.on_member(rank), low.instead(given), low.sharing(alone, addend=False):
            local = low.lower(node, lower_call)
            assert local is not None
            if meta.facts(node).random and local.node.target == node.target:
                meta.set_draw(local.node, low.draw(node))
        return local

    def _alone(self, value: fx.Node, rank: int) -> tuple[Part, ...]:
        """Return what each rank has of a value that one rank of each tile has."""
        shape, nothing = whole_shape(value), Part.nothing(whole_shape(value))
        count = range(self.count)
        return self.low.by_rank(
            tuple(Part(shape) if each == rank else nothing for each in count)
        )

    def _entering(self, source: fx.Node) -> fx.Node:
        """Return a value from outside, as a whole on the ranks that need it."""
        low = self.low
        if not isinstance(meta.value(source), Tensor):
            return low.get(source).node
        local = low.local(source)
        if low.flattened(source) is not None:
            return low.whole(source)
        if low.pictures:
            return low.shared(source, ()).node
        if local.parts:
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
        mine = [node for node in users if self.computes(node)]
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
        elsewhere = {n for n, rank in low.shards.placed if rank != low.member}
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

    def _row(self, values: Sequence[fx.Node], height: int) -> _Row:
        """Return the row of values of which each has so many rows."""
        members = [self.ranks[value.name] for value in values]
        boxes = [self._computed(value) for value in values]
        widths = [
            [volume(each[rank]) // height for each in boxes]
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

    def _own(self, value: fx.Node) -> fx.Node:
        """Return what the join wants of a value that this rank has computed."""
        here, wanted = self.low.local(value).node, self._wanted(value)
        held = self._computed(value)
        if wanted.boxes == held:
            return here
        return self.low.cropped(here, wanted.shape, held, wanted.boxes)

    def _packed(self, values: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
        """Return the values that this rank has computed."""
        return tuple(self.low.local(v).node for v in values if self.computes(v))

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
        inside = [t for t in terms if low.is_in_branch(t)]
        others = [t for t in terms if not low.is_in_branch(t)]
        axes = self._axes_of_sum(node, inside, others)
        boxes = low.owned(shape, axes if low.pictures else None)
        members = {self.ranks[term.name] for term in inside}
        held = tuple(
            box if rank % self.count in members else _box(shape, is_held=False)
            for rank, box in enumerate(boxes)
        )
        wanted = low.owned(shape, axes)
        rows = [prod(low.pictures) * size for size in shape[:1]]
        given, taken = self._apart(held, shape), self._apart(wanted, shape)
        exchange = low.exchange((*rows, *shape[1:]), given, taken, adds=True)
        own, size = self._addends(inside, axes), shape_of(held[low.place])
        if own:
            addend = reduce(lambda a, b: self._plus(node, a, b, size), own)
        else:
            addend = self._nothing(node, size)
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
        found = []
        for rank, box in enumerate(boxes):
            start = rank // self.count * shape[0] if shape else 0
            first = [(a + start, b + start) for a, b in box[:1]]
            found.append((*first, *box[1:]))
        return tuple(found)

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
        found = []
        for term in inside:
            own = {term: low.local(term)}
            with low.on_member(self.ranks[term.name]), low.instead(own):
                each = low.spread(term, axes)
            if self.computes(term):
                found.append(each)
        return tuple(found)

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
        found = [c for c, m in zip(columns, self.members, strict=True) if chosen(m)]
        return (found[0][0], found[-1][1]) if found else (0, 0)

    def inside(self, rank: int) -> list[fx.Node]:
        """Return the values that a rank gets."""
        first, last = self.wanted(rank)
        pairs = zip(self.values, self.columns[rank // self.count], strict=True)
        return [v for v, (a, b) in pairs if first <= a and b <= last]
