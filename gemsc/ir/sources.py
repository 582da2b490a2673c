"""What a graph's results are computed from: inputs, parameters, constants, draws.

Two graphs that compute one function have the same. What only lends its shape or dtype
(`other` in `x.expand_as(other)`) is no source: a graph that took the one for the other
has lost a source, although all its shapes are right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import fx, nn

from gemsc.errors import InternalError
from gemsc.ir import meta
from gemsc.ir.holder import attribute
from gemsc.ir.mutation import mutated_inputs
from gemsc.ir.program import Program
from gemsc.runtime import tiles

__all__ = ["data_operands", "lost_nothing", "sources"]

# Of these only the first operand gives elements.
_ONE_OPERAND = frozenset(
    {"expand_as", "view_as", "reshape_as", "type_as", "to", "type"}
)
# Of these none does.
_NO_OPERAND = frozenset(
    {"zeros_like", "ones_like", "empty_like", "rand_like", "randn_like", "randint_like"}
    | {"new_zeros", "new_ones", "new_empty", "new_empty_strided"}
)
# Of these all but the first do.
_NOT_THE_FIRST = frozenset({"full_like", "new_full", "new_tensor"})
_EXCHANGES = frozenset({tiles.redistribute, tiles.all_reduce})


def data_operands(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the operands of which a call takes elements, not only shape or dtype."""
    operands = tuple(node.all_input_nodes)
    if node.op not in ("call_function", "call_method"):
        return operands
    target: Any = node.target
    name = str(target if node.op == "call_method" else getattr(target, "__name__", ""))
    name = name.partition(".")[0]  # of an overload
    if name in _NO_OPERAND:
        return ()
    first = node.args[0] if node.args else next(iter(node.kwargs.values()), None)
    if name in _ONE_OPERAND:
        return tuple(n for n in operands if n is first)
    if name in _NOT_THE_FIRST:
        return tuple(n for n in operands if n is not first)
    return operands


def sources(program: Program) -> dict[str, fx.Node]:
    """Return what loss and outputs are computed from, each with a node that takes it.

    What a rank gives to others counts as a result.
    """
    writes = _writes(program)
    seen: set[fx.Node] = set()
    waiting = [*_results(program)]
    found: dict[str, fx.Node] = {}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        found |= dict.fromkeys(_own(program, node), node)
        waiting += data_operands(node)
        waiting += writes.get(meta.glue(node), ())
    return found


def lost_nothing(before: Program, after: Iterable[Program]) -> None:
    """See that what results are computed from is the same in `after` all together.

    Raises:
        InternalError: a source has no way to a result any more.
    """
    kept: set[str] = set()
    for program in after:
        kept |= sources(program).keys()
    for name, node in sources(before).items():
        if name not in kept:
            takes = [user for user in node.users if node in data_operands(user)]
            is_held = node.op in ("placeholder", "get_attr")
            at = meta.location(takes[0] if is_held and takes else node)
            where = f"{at}: " if at else ""
            raise InternalError(
                f"{where}wrong program: {name} is part of what the model computes, "
                "but not of what the ranks do"
            )


def _results(program: Program) -> Iterator[fx.Node]:
    yield from program.output.all_input_nodes
    for node in program.graph.nodes:
        if node.target in _EXCHANGES and not node.users:
            yield node


def _writes(program: Program) -> dict[int | None, list[fx.Node]]:
    """Return the writes of each group of nodes that share a memory: all read them."""
    groups: dict[int | None, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if meta.glue(node) is not None and mutated_inputs(node, program.module):
            groups.setdefault(meta.glue(node), []).append(node)
    return groups


def _own(program: Program, node: fx.Node) -> Iterator[str]:
    """Yield the sources that a node takes by itself."""
    if node.op == "placeholder":
        item = next(item for item in program.inputs if item.name == node.name)
        yield f"input {'.'.join(map(str, item.path))}"
    elif node.op == "get_attr":
        found = attribute(program.module, str(node.target))
        if not isinstance(found, nn.Module):
            yield _tensor(program, str(node.target))
    if node.op in ("get_attr", "call_module"):
        layer = attribute(program.module, str(node.target))
        if isinstance(layer, nn.Module):
            prefix = str(node.target)
            for name, _ in layer.named_parameters(prefix, remove_duplicate=False):
                yield _tensor(program, name)
    if meta.facts(node).random:
        yield f"the random numbers of {meta.layer(node) or meta.location(node)}"


def _tensor(program: Program, name: str) -> str:
    return f"'{program.aliases.get(name, name)}'"
