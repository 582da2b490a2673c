"""Branches on the rank at hand: what they begin with, and who computes which node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from gemsc.base.boxes import Box, everything
from gemsc.base.parts import Part
from gemsc.errors import GemscError, InternalError
from gemsc.ir import meta
from gemsc.ir.layout import Layout
from gemsc.ir.mutation import elements
from gemsc.ir.shards import Fork
from gemsc.passes.spatial.lowering import Lowering
from gemsc.passes.spatial.rules.lower_call import lower_call
from gemsc.passes.spatial.values import Local, whole_shape
from gemsc.runtime import tiles


@dataclass(frozen=True)
class ForkHere:
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
        meta.whole_gradients.set(local.node, None)
        if meta.is_one_tensor(node):
            shape = meta.spec(node).shape
            held = (box_of(shape, rank == low.place) for rank in range(low.tiles))
            meta.layout.set(local.node, Layout(shape, tuple(held)))
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
            if meta.is_one_tensor(source) and source.op != "get_attr":
                given[source] = before = low.local(source)
                if source in entering:
                    axes = before.axes if before.flattened is None else None
                    given[source] = Local(entering[source], axes, alone(source))
        with low.on_member(rank), low.instead(given), low.sharing(alone, addend=False):
            local = low.lower(node, lower_call)
            assert local is not None
        return local

    def _alone(self, value: fx.Node, rank: int) -> tuple[Part, ...]:
        """Return what each rank has of a value that one rank of each tile has."""
        shape, nothing = whole_shape(value), Part.nothing(whole_shape(value))
        count = range(self.count)
        return self.low.by_rank(
            tuple(Part(shape) if index == rank else nothing for index in count)
        )

    def _entering(self, source: fx.Node) -> fx.Node:
        """Return a value from outside, as a whole on the ranks that need it."""
        low = self.low
        if not meta.is_one_tensor(source):
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
        users = {self.ranks[n.name] for n in self.nodes if n in source.users}
        shape = low.shape(source)
        return low.part(source, [box_of(shape, t in users) for t in range(low.tiles)])

    def _unused(self, like: fx.Node) -> list[fx.Node]:
        """Return what only other ranks' branches use, and yet this rank needs.

        Exchanges may lead to it, whose backward is that of all ranks, if it is part of
        the backward of `like`; or a message, which all ranks of the stage receive.
        """
        sources = (source for node in self.nodes for source in node.all_input_nodes)
        unused = [s for s in dict.fromkeys(sources) if self._is_unused(s)]
        stage, learns = set(self.low.stage.nodes), meta.needs_gradient
        return [
            self._entering(source)
            for source in unused
            if (learns(like) if learns(source) else source not in stage)
        ]

    def _is_unused(self, source: fx.Node) -> bool:
        """Whether a value is from outside, and only other ranks' branches use it.

        A branch does not use a value that learns if it gives it no gradient.
        """
        if source.op in ("get_attr", "placeholder") or self.low.is_in_branch(source):
            return False
        if not meta.is_one_tensor(source):
            return False
        users = (node for node in self.nodes if node in source.users)
        mine = [node for node in users if self.computes(node)]
        if not meta.needs_gradient(source):
            return not mine
        return not any(_gives_gradient(node, source) for node in mine)

    def nothing(self, like: fx.Node, shape: tuple[int, ...]) -> fx.Node:
        """Return the node of no elements, of the dtype of a value."""
        low = self.low
        source, of = self._present(like)
        settings: dict[str, Any] = {}
        if dtypes_of(like) != dtypes_of(source):
            settings["dtype"] = meta.spec(like).dtype
        if not meta.needs_gradient(like):
            settings["learns"] = False
        args = of, shape
        node = low.add(like, tiles.nothing, args, shape, name=self.name, **settings)
        stays = meta.dtypes(like).value
        meta.dtypes.set(node, meta.Dtypes(stays, constants=stays))
        return node

    def _present(self, like: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Return a tensor that there is on this rank before the join, and its node.

        It is of the dtype of `like` if the branches take one of it. A parameter of
        theirs may be on the rank of one of them alone.
        """
        low = self.low
        taken = [s for s in self._taken(self.nodes) if s.op != "get_attr"]
        if taken:
            best = min(taken, key=lambda source: dtypes_of(source) != dtypes_of(like))
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
            if meta.is_one_tensor(source) and not self.low.is_in_branch(source):
                yield source

    def tied(self, value: fx.Node, like: fx.Node) -> fx.Node:
        """Return a value whose backward is that of what arrived in vain, too."""
        unused = self._unused(like)
        if not unused:
            return value
        shape = tuple(meta.value(value).shape)
        layout = meta.layout(value)
        args = (value, tuple(unused))
        return self.low.add(like, tiles.tied, args, shape, layout, name=self.name)


def box_of(shape: tuple[int, ...], is_held: bool) -> Box:
    """Return the box of all of a value, or of nothing."""
    return everything(shape) if is_held else ((0, 0),) * len(shape)


def _gives_gradient(user: fx.Node, source: fx.Node) -> bool:
    """Whether a gradient flows back to a value: `type_as` reads its dtype alone."""
    return meta.needs_gradient(user) and source in elements(user)


def dtypes_of(node: fx.Node) -> tuple[str, bool]:
    """Return a value's dtype, and whether a model in another dtype has it, too."""
    return str(meta.spec(node).dtype), meta.dtypes(node).value
