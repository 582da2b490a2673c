"""What differs between two runs of a model, again or in another dtype, or cannot."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from gemsc.base.dtypes import is_real, within
from gemsc.base.plain_forward import plain_forward
from gemsc.errors import GemscError, SourceLocation
from gemsc.frontend.eager import KEEP_WEIGHTS
from gemsc.frontend.writer import GraphWriter, fixed_nodes, overwritten
from gemsc.ir import meta
from gemsc.ir.holder import CONSTANTS
from gemsc.ir.interpret import run_nodes
from gemsc.ir.meta import Dtypes, TypedNumber
from gemsc.ir.mutation import memory, source_in, written_operands


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


def fixed_numbers(writer: GraphWriter, tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the numbers of what is made of no input, weight or draw; else None."""
    if not writer.knows(tensor):
        return None
    node, graph = writer.node_of(tensor), writer.graph
    fixed, used, way = fixed_nodes(graph, training=True), {node}, [node]
    while way:
        current = way.pop()
        if current not in fixed or current.op == "get_attr":
            return None
        way += {*current.all_input_nodes} - used
        used |= {*current.all_input_nodes}
    written = {n for node in graph.nodes for n in written_operands(node)}
    if not {*chain(*map(memory, written))}.isdisjoint(chain(*map(memory, used))):
        return None
    values: dict[fx.Node, Any] = {}
    with unset_fake_temporarily():
        run_nodes((n for n in graph.nodes if n in used), values, nn.Module())
    return torch.as_tensor(values[node])


def runs_differ(*wrappers: Any) -> bool:
    """Whether two modules give something else for the same numbers and weights.

    `leaves` are what each takes, with paths.
    """
    results = []
    state = [_half(tensor) for tensor in _state(wrappers[-1])]
    try:
        for wrapper in wrappers:
            torch.manual_seed(0)
            with torch.no_grad():
                for tensor, value in zip(_state(wrapper), state, strict=True):
                    tensor.copy_(value)
            with plain_forward():
                outputs = wrapper(*(_half(tensor) for _, tensor in wrapper.leaves))
            results.append([tensor.detach().clone() for tensor in outputs])
    except Exception:  # numbers that the model refuses
        return False
    try:
        torch.testing.assert_close(*results, equal_nan=True)
    except AssertionError:
        return True
    return False


def _state(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _half(tensor: torch.Tensor) -> torch.Tensor:
    has_fractions = tensor.is_floating_point() or tensor.is_complex()
    new = tensor.detach() / 2 if has_fractions else tensor.detach().clone()
    return new.requires_grad_(tensor.requires_grad)


def reject_changes_by_eval(graph: fx.Graph) -> None:
    """Refuse an `eval()` that writes to a weight: no `train()` would undo that."""
    for node, change in overwritten(graph).items():
        raise GemscError(
            f"eval() changes {node.target}, which training goes on with",
            at=meta.location(change),
            help=KEEP_WEIGHTS,
        )


def trained_parameters(model: nn.Module) -> set[str]:
    """Return the names of those that get gradients."""
    named = model.named_parameters()
    return {name for name, parameter in named if parameter.requires_grad}


def reject_new_flags(graph: fx.Graph, before: set[str], after: set[str]) -> None:
    """Refuse a forward that freezes a parameter, or trains one that was frozen."""
    for name in sorted(before ^ after):
        places = graph.find_nodes(op="call_method", target="requires_grad_")
        lines = [meta.location(n) for n in places if n.args[0].target == name]
        raise GemscError(
            f"forward {'trains' if name in after else 'freezes'} '{name}'",
            at=lines[-1] if lines else None,
            help="call requires_grad_ in __init__, or trainer.freeze in a hook",
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
        if node in fixed:
            source = node.args[0] if _is_all(node) else source_in(names.keys(), node)
            made = f"fixed {known.setdefault(what, len(known))}"
            names[node] = made if source is node else names[source]
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
    changes = []
    for node, like in zip_longest(mine, theirs):
        try:
            changes.append((node, *pair.compare(node, like)))
        except _DifferentError:
            raise GemscError(
                f"forward behaves differently in {str(dtype).removeprefix('torch.')}",
                at=meta.location(node or like),
            ) from None
    for node, marks, (args, kwargs) in changes:
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
        remaining = iter(given)
        constants: list[bool] = []

        def merge(value: Any) -> Any:
            like = next(remaining, None)
            if isinstance(value, torch.dtype) and is_real(value):
                constants.append(value == like)
            return self._merged(value, like)

        args = fx.node.map_aggregate((mine.args, mine.kwargs), merge)
        if next(remaining, None) is not None:
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
