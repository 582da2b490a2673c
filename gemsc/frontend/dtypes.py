"""Find what of a graph changes when the model runs in another floating-point type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import fx

from gemsc.base.dtypes import is_real, within
from gemsc.errors import GemscError
from gemsc.ir import meta
from gemsc.ir.meta import Dtypes, TypedNumber


class _DifferentError(Exception):
    """The two graphs differ in more than dtypes."""


def mark_dtypes(graph: fx.Graph, other: fx.Graph, dtype: torch.dtype) -> None:
    """Mark in `graph` what stays the same in `other`, traced with the model in `dtype`.

    A dtype that differs came from a tensor (`x.to(y.dtype)`); one that is the same was
    written by the user (`x.float()`). A number that differs was taken from a dtype
    (`torch.finfo(x.dtype).eps`) and becomes a `TypedNumber`. What follows a cast that
    does nothing here (`x.float()`, which is x) and something there uses what it uses
    there.

    Raises:
        GemscError: the model computes something else in `dtype`; nothing is marked.
    """
    mine, theirs = list(graph.nodes), list(other.nodes)
    index = {n: i for nodes in (mine, theirs) for i, n in enumerate(nodes)}
    pair = _Pair(mine, theirs, index, dtype)
    found = []
    for node, like in zip_longest(mine, theirs):
        try:
            found.append((node, *pair.compare(node, like)))
        except _DifferentError:
            raise GemscError(
                f"forward behaves differently in {str(dtype).removeprefix('torch.')}",
                at=meta.location(node or like),
            ) from None
    for node, marks, (args, kwargs) in found:
        meta.set_dtypes(node, marks)
        node.args, node.kwargs = args, kwargs


@dataclass(frozen=True)
class _Pair:
    """Two graphs, the second in `dtype`, and the index of each node in its own."""

    mine: list[fx.Node]
    theirs: list[fx.Node]
    index: dict[fx.Node, int]
    dtype: torch.dtype

    def compare(
        self, mine: fx.Node | None, theirs: fx.Node | None
    ) -> tuple[Dtypes, Any]:
        """Return what stays the same of a node, and its arguments."""
        if mine is None or theirs is None:
            raise _DifferentError
        if (mine.op, mine.target) != (theirs.op, theirs.target):
            raise _DifferentError
        if meta.region(mine) != meta.region(theirs):
            raise _DifferentError
        given: list[Any] = []
        fx.node.map_aggregate((theirs.args, theirs.kwargs), given.append)
        rest = iter(given)
        constants: list[bool] = []

        def merge(value: Any) -> Any:
            like = next(rest, None)
            if isinstance(value, torch.dtype) and is_real(value):
                constants.append(value == like)
            return self._merged(value, like)

        args = fx.node.map_aggregate((mine.args, mine.kwargs), merge)
        if next(rest, None) is not None:
            raise _DifferentError
        return Dtypes(self._value_stays(mine, theirs), all(constants)), args

    def _merged(self, mine: Any, theirs: Any) -> Any:
        """Return what stands in the graph for one argument in both."""
        if isinstance(mine, fx.Node) and isinstance(theirs, fx.Node):
            return self._source(mine, theirs)
        if type(mine) is type(theirs) and repr(mine) == repr(theirs):
            return mine
        if type(mine) is float and type(theirs) is float:
            return TypedNumber(mine, theirs)
        if isinstance(mine, torch.dtype) and theirs == within(mine, self.dtype):
            return mine
        raise _DifferentError

    def _source(self, mine: fx.Node, theirs: fx.Node) -> fx.Node:
        i, j = self.index[mine], self.index[theirs]
        if i == j:
            return mine
        if meta.value(mine) is meta.value(self.mine[j]):
            return self.mine[j]
        if meta.value(theirs) is meta.value(self.theirs[i]):
            return mine
        raise _DifferentError

    def _value_stays(self, mine: fx.Node, theirs: fx.Node) -> bool:
        """Return whether the dtype of a node's tensors is the same in both."""
        if mine.op == "output":
            return False
        stays = False
        for a, b in zip_longest(_specs(mine), _specs(theirs)):
            if a is None or b is None or a[0] != b[0]:
                raise _DifferentError
            if b[1] not in (a[1], within(a[1], self.dtype)):
                raise _DifferentError
            stays |= a[1] == b[1] and is_real(a[1])
        return stays


def _specs(node: fx.Node) -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
    for tensor in meta.tensors(node):
        yield tuple(tensor.shape), tensor.dtype
