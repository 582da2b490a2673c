"""What differs between two runs of a model: again, in another dtype, for other draws.

`random.random() < self.layerdrop` is False for all draws where layerdrop is 0: it
decides nothing. Where the answer depends on the draw, an error says so.
"""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partialmethod
from itertools import product, zip_longest
from typing import Any

import numpy as np
import torch
from torch import fx

from gemsc.base.dtypes import is_real, within
from gemsc.errors import GemscError, SourceLocation
from gemsc.frontend.eager import KEEP_WEIGHTS
from gemsc.frontend.writer import GraphWriter, fixed_nodes, overwritten
from gemsc.ir import meta
from gemsc.ir.holder import CONSTANTS
from gemsc.ir.meta import Dtypes, TypedNumber


def check_same(first: GraphWriter, second: GraphWriter, training: bool) -> None:
    """Refuse a forward that does something else when it is called again.

    Where it kept values of its first call, such as a table, the second does not compute
    them again: then what is fixed is compared where it is used.
    """
    known: dict[object, int] = {}
    names: dict[fx.Node, str] = {}
    runs: list[list[tuple[object, fx.Node]]] = []
    for writer in (first, second):
        kept = second.kept
        fixed = fixed_nodes(writer.graph, training) if kept else set()
        names |= {node: names[source] for node, source in writer.kept.items()}
        runs.append(list(_signature(writer.graph, fixed, known, names)))
    for (a, node), (b, _) in zip(*runs, strict=False):  # both end with the output
        if a != b:
            _reject_difference(meta.location(node))
    constants = first.constants
    for name, value in second.constants.items():
        if not torch.equal(value, constants[name]):
            _reject_difference(None)


def reject_changes_by_eval(graph: fx.Graph) -> None:
    """Refuse an `eval()` that writes to a weight: no `train()` would undo that."""
    for node, change in overwritten(graph).items():
        raise GemscError(
            f"eval() changes {node.target}, which training goes on with",
            at=meta.location(change),
            help=KEEP_WEIGHTS,
        )


def _signature(
    graph: fx.Graph,
    fixed: set[fx.Node],
    known: dict[object, int],
    names: dict[fx.Node, str],
) -> Iterator[tuple[object, fx.Node]]:
    """Yield what each node does, but the fixed ones; name them all."""
    count = 0
    for node in graph.nodes:
        if node in names:
            continue
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: names[n])
        what = (node.op, node.target, repr(arguments), meta.region(node))
        if node in fixed and _is_all(node):
            names[node] = names[node.args[0]]
            continue
        if node in fixed:
            names[node] = f"fixed {known.setdefault(what, len(known))}"
            continue
        names[node] = f"value {count}"
        count += 1
        yield what, node


def _is_all(node: fx.Node) -> bool:
    """Whether a node takes all of a table, as `table[..., -size:]` of one as long."""
    parts: Any = node.args[1] if node.target is operator.getitem else None
    parts = parts if isinstance(parts, tuple) else (parts,)
    is_cut = all(isinstance(part, slice) or part is ... for part in parts)
    if not is_cut or not meta.is_one_tensor(node):
        return False
    return meta.spec(node).shape == meta.spec(node.all_input_nodes[0]).shape


def _reject_difference(at: SourceLocation | None) -> None:
    raise GemscError(
        "forward is not deterministic: it behaves differently when it is called again",
        at=at,
        help="avoid Python's random and attributes that forward changes",
    )


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
        meta.dtypes.set(node, marks)
        node.args, node.kwargs = args, kwargs


def reject_rounded(root: fx.GraphModule, other: fx.GraphModule) -> None:
    """Raise if a constant of `root` is rounded: `other` has it in a wider dtype.

    torch.export makes constants of `torch.tensor([0.1])` and `x.new_tensor([0.1])`.
    """
    for node in root.graph.find_nodes(op="get_attr"):
        if str(node.target).startswith(CONSTANTS):
            mine, wide = map(operator.attrgetter(str(node.target)), (root, other))
            if not torch.equal(mine.to(wide.dtype), wide):
                kept = f"torch.export keeps a tensor of numbers in {mine.dtype}"
                raise GemscError(kept, at=meta.location(node))


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


class AnyDraw(float):
    """One number of those that may be drawn, from `low` to `high`, both of them too.

    Sums and products with numbers (`random.uniform`) are such numbers again.
    """

    LOW, HIGH = 0.0, 1 - 2**-53  # of random.random

    low: float
    high: float

    @classmethod
    def of(cls, value: float, *ends: float) -> AnyDraw:
        """Return a number that may be anything between these ends."""
        made = cls(value)
        made.low, made.high = min(ends), max(ends)
        return made

    def _with(self, operation: Callable[[float, float], float], other: Any) -> Any:
        if isinstance(other, AnyDraw) or not isinstance(other, int | float):
            return NotImplemented
        ends = (operation(self.low, other), operation(self.high, other))
        return self.of(operation(float(self), other), *ends)

    __add__: Any = partialmethod(_with, operator.add)
    __sub__: Any = partialmethod(_with, operator.sub)
    __mul__: Any = partialmethod(_with, operator.mul)
    __truediv__: Any = partialmethod(_with, operator.truediv)
    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Any:
        return self * -1

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def _decides(self, *_: Any) -> Any:
        raise GemscError("a draw decides something")

    __int__ = __trunc__ = __floor__ = __ceil__ = __round__ = _decides
    __pow__ = __rpow__ = __mod__ = __rmod__ = __abs__ = __rtruediv__ = _decides
    __floordiv__ = __rfloordiv__ = __divmod__ = __rdivmod__ = _decides

    def _asks(self, question: Callable[[float, float], bool], other: float) -> bool:
        """Return the answer to a comparison, if it is one for all that may be drawn."""
        ends = product((self.low, self.high), _ends(other))
        answers = {question(*pair) for pair in ends}
        if len(answers) > 1:
            raise GemscError("a draw decides something")
        return answers.pop()

    __lt__: Any = partialmethod(_asks, operator.lt)
    __le__: Any = partialmethod(_asks, operator.le)
    __gt__: Any = partialmethod(_asks, operator.gt)
    __ge__: Any = partialmethod(_asks, operator.ge)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, int | float):
            return False
        low, high = _ends(other)
        if self.high >= low and self.low <= high:
            raise GemscError("a draw decides something")
        return False

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        return self != 0.0

    def __hash__(self) -> int:
        return super().__hash__()


def _ends(number: float) -> tuple[float, float]:
    if isinstance(number, AnyDraw):
        return number.low, number.high
    return number, number


@contextmanager
def drawn(numbers: tuple[float, ...]) -> Iterator[None]:
    """Let `random.random` and what Python computes of it draw these, in turn."""
    # an end: a loop may draw until it likes what it gets
    turns = itertools.islice(itertools.cycle(numbers), 10_000)
    before: Any = random.random
    generator = before.__self__
    ends = AnyDraw.LOW, AnyDraw.HIGH
    random.random = generator.random = lambda: AnyDraw.of(next(turns), *ends)
    try:
        yield
    finally:
        random.random = before
        del generator.random


def other_generators() -> tuple[object, ...]:
    """Return what can be compared of the generators of Python and NumPy."""
    numpy_state = np.random.get_state(legacy=True)
    return random.getstate(), *(
        part.tobytes() if isinstance(part, np.ndarray) else part for part in numpy_state
    )
