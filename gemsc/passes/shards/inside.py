"""One operation inside a region: what a rank takes of its inputs, and gives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from gemsc.base.parts import Part
from gemsc.ir import meta
from gemsc.ir.holder import called_layer
from gemsc.ir.mutation import elements
from gemsc.ir.operators.calls import Call
from gemsc.passes.shards.analysis import Analysis, cut_parts
from gemsc.passes.shards.factors import Dims, Factor
from gemsc.passes.spatial.cuts import Axes
from gemsc.passes.spatial.lowering import Lowering
from gemsc.passes.spatial.values import Local


@dataclass(frozen=True)
class Inside:
    """A node that knows a factor that is cut, on the rank at hand."""

    low: Lowering
    analysis: Analysis
    factor: Factor
    node: fx.Node

    @property
    def call(self) -> Call:
        """What the node computes."""
        return self.analysis.calls[self.node]

    @property
    def layer(self) -> nn.Module | None:
        """The layer that the node calls, if it does."""
        return called_layer(self.node, self.analysis.program.module)

    @property
    def is_summed(self) -> bool:
        """Whether each rank computes an addend of the result."""
        return self.analysis.is_summed(self.node, self.factor)

    def letter(self, letter: str) -> bool:
        """Whether the factor is in the dimension with this letter."""
        return letter in self.analysis.roots(self.node)[self.factor]

    def parts(self, source: fx.Node | None = None) -> tuple[Part, ...]:
        """Return what each rank has of an input, of the result without; () if all."""
        of = source or self.node
        if not meta.is_one_tensor(of):
            return ()
        return self.cut(self.analysis.dims_at(self.node, of))

    def cut(self, dims: Dims) -> tuple[Part, ...]:
        """Return what each rank has of these dimensions, () if all."""
        assert self.low.shards is not None
        count = self.low.shards.count
        return self.low.by_rank(cut_parts(dims, self.factor, count))

    @property
    def part(self) -> Part:
        """What this rank has of the result."""
        return self.parts()[self.low.place]

    def input(self, source: fx.Node) -> fx.Node:
        """Return the node of this rank's part of an input, or of all of it."""
        if not meta.is_one_tensor(source):
            return self.low.get(source).node
        if source.op == "get_attr":
            return self.parameter(str(source.target))
        if source not in elements(self.node):
            return self.low.local(source).node  # of any part, the dtype is the same
        parts = self.parts(source)
        return self.low.shard(source, parts) if parts else self.low.whole(source)

    def tensor(self, name: str) -> fx.Node | None:
        """Return the node of a layer's or a function's tensor; None if not given."""
        if self.call.layer is None:
            given = self.call.get(name)
            return None if given is None else self.input(given)
        if getattr(self.call.layer, name) is None:
            return None
        return self.parameter(f"{self.node.target}.{name}")

    def parameter(self, path: str) -> fx.Node:
        """Return the node of this rank's part of a parameter, or of all of it."""
        parts = self.cut(self.analysis.dims(path))
        return self.low.parameter(self.node, path, parts)

    def placed(self, source: fx.Node) -> Local:
        """Return a value of which shards have their parts, as tiles have cut it."""
        if source.op == "get_attr":
            path = str(source.target)
            parts = self.cut(self.analysis.dims(path))
            return Local(self.parameter(path), None, parts)
        if not meta.is_one_tensor(source):
            return self.low.local(source)
        return self.low.shared(source, self.parts(source))

    @property
    def local_call(self) -> Call:
        """The call with the number of groups that this rank has."""
        call = self.call
        counts = {n: call.get(n) for n in ("groups", "num_groups")}
        if not self.letter("g") or not any(counts.values()):
            return call
        part = self.parts(call.input)[self.low.place]
        rows = part.rows[1] - part.rows[0]
        scaled = {n: count * rows // part.units for n, count in counts.items() if count}
        groups = scaled if call.layer is None else {}
        return replace(call, arguments=call.arguments | scaled, groups=groups)

    def create(self, op: str, target: Any, args: Any, kwargs: Any) -> Local:
        """Add a node of this rank's part of the result."""
        parts, partial = self.parts(), self.is_summed
        make = self.low.create
        return make(
            self.node, op, target, args, kwargs, None, parts=parts, partial=partial
        )

    def added_up(self, addend: fx.Node, axes: Axes | None = None) -> Local:
        """Return the sum over the shards, of all or of this rank's part of the trunk.

        `axes` say how tiles cut it.
        """
        split = self.low.split_axes(self.node)
        if split is None:
            return self.low.all_reduce(self.node, addend, axes, self.low.beside)
        return self.low.reduce_scatter(self.node, addend, split)
