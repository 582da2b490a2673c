"""Rules: which dimensions of an operation are the same, are summed, or stay whole."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from gemsc.ir import meta
from gemsc.ir.mutation import elements, mutated_inputs
from gemsc.ir.opaque import has_own_backward
from gemsc.ir.operators.calls import ALONG, Call, call_of, numbered
from gemsc.ir.operators.table import operands_of, operator_of
from gemsc.ir.program import Program
from gemsc.passes.shards.equations import Roles, solve
from gemsc.passes.shards.factors import Dims, fixed, freeze, fresh, regroup, take
from gemsc.passes.spatial.classify import Probe

Lookup = Callable[[fx.Node | str], Dims]  # dimensions of a value, or of a parameter


def roles_of(
    program: Program,
    probe: Probe,
    node: fx.Node,
    dims: Lookup,
    takers: Collection[str],
) -> tuple[Call, Roles]:
    """Return what a node computes, and the roles of its dimensions.

    By the letters `takers` of a product a rank takes its part of what is whole.
    """
    call, reason = call_of(node, program.module), reason_at(node)
    value = meta.value(node)
    shape = tuple(value.shape) if isinstance(value, Tensor) else ()
    if meta.glue(node) is not None or has_own_backward(node, program.module):
        return call, _unknown(call, dims, f"{reason} is not looked into")
    equation = operator_of(call).equation_of(call)
    if equation is not None and isinstance(value, Tensor):
        operands, sizes = operands_of(call, equation), equation.sizes
        is_product = operator_of(call).does == "product"
        roles = _solved(
            equation.text, operands, dims, shape, reason, sizes, is_product, takers
        )
        for dim in roles.letters.values() if equation.whole else ():
            freeze(dim, f"{reason}: {equation.whole}")
        return call, roles
    rule = OTHERS.get(call.kind)
    known = rule(call, dims, reason) if rule is not None else None
    if known is None and not call.kind:
        known = _by_operators(probe, node, dims, shape, reason, takers)
    if known and known.taken and mutated_inputs(node, program.module):
        known = None  # what it writes would be a copy
    return call, known or _unknown(call, dims, f"no rule for {reason}")


def _solved(
    text: str,
    operands: Sequence[fx.Node | str | None],
    dims: Lookup,
    shape: tuple[int, ...],
    reason: str,
    sizes: Mapping[str, int] | None = None,
    is_product: bool = False,
    takers: Collection[str] = (),
) -> Roles:
    """Solve an equation of values and parameters; of whole values parts are taken."""
    given = [None if operand is None else dims(operand) for operand in operands]
    values, parameters = [], []
    for number, operand in enumerate(operands):
        if isinstance(operand, fx.Node) and operand.op != "get_attr":
            values += [number] * (operands.count(operand) == 1)
        elif operand is not None and is_product:
            parameters.append(number)
    roles = solve(text, given, shape, reason, sizes, values, parameters, takers)
    roles.taken = {operands[number]: taken for number, taken in roles.taken.items()}
    return roles


def reason_at(node: fx.Node) -> str:
    """Return what a node calls, and the user's line."""
    at = meta.location(node)
    name = getattr(node.target, "__name__", str(node.target))
    return f"{name} at {at.short}" if at is not None else name


# --------------------------------------------------------- by their arguments


def _along(call: Call, dims: Lookup, reason: str) -> Roles | None:
    """Let all dimensions be the same but those along which it works."""
    given, source = call.get("dim"), dims(call.input)
    places = numbered(given, len(source))
    if places is None or len(tensor_inputs(call.node)) > 1:
        return None
    for place in places:
        freeze(source[place], reason)
    return _kept(call.node, source, places)


def _reduction(call: Call, dims: Lookup, reason: str) -> Roles | None:
    """Sum over some dimensions: all of them where none is given."""
    source = dims(call.input)
    given = call.get("dim")
    places = set(range(len(source))) if given is None else numbered(given, len(source))
    if places is None:
        return None
    roles = _kept(call.node, source, places)
    roles.summed = {str(place) for place in places}
    return roles


def _loss(call: Call, dims: Lookup, reason: str) -> Roles | None:
    """Compare element by element, and sum over all of them."""
    tensors = tensor_inputs(call.node)
    shape = tuple(meta.value(call.node).shape)
    if call.get("weight") is not None or call.get("pos_weight") is not None:
        return None
    result = "*d" if call.get("reduction", "mean") == "none" else ""
    text = f"{', '.join(['*d+'] * len(tensors))} -> {result}"
    roles = solve(text, [dims(node) for node in tensors], shape, reason)
    if result:
        roles.summed = set()
    return roles


def _cat(call: Call, dims: Lookup, reason: str) -> Roles | None:
    """Join along a dimension that stays whole; the others are the same."""
    tensors = list(call["tensors"])
    if not all(isinstance(tensor, fx.Node) for tensor in tensors):
        return None
    shape = tuple(meta.value(call.node).shape)
    place = int(call.get("dim", 0)) % len(shape)
    stacks = call.kind == "stack"
    names = [f"d{number}" for number in range(len(shape) - stacks)]
    operands = []
    for tensor in tensors:
        if not stacks and meta.value(tensor).dim() < len(shape):
            continue  # PyTorch lets torch.tensor([]) be joined with anything
        operand = list(dims(tensor))
        if not stacks:
            freeze(operand[place], reason)
            operand.pop(place)
        operands.append(operand)
    kept = names if stacks else [n for n in names if n != f"d{place}"]
    text = ", ".join([" ".join(kept)] * len(operands))
    sizes = tuple(size for number, size in enumerate(shape) if number != place)
    roles = solve(f"{text} -> {' '.join(kept)}", operands, sizes, reason)
    roles.result.insert(place, fixed(shape[place], reason))
    return roles


def _equal_parts(call: Call, dims: Lookup, reason: str) -> Roles | None:
    """Take equal parts of a dimension: it is that many times what is left."""
    source = dims(call.input)
    values = [v for v in meta.value(call.node) if isinstance(v, Tensor)]
    place = int(call.get("dim", 0)) % len(source)
    sizes = {v.shape[place] for v in values} if call.kind != "unbind" else {1}
    if len(sizes) > 1 or call.node.kwargs.keys() - {"dim"}:
        return None
    count = len(values)
    parts, inner = take(source[place], count, reason)
    freeze(parts, reason)
    part_dims = [*source[:place], inner, *source[place + 1 :]]
    if call.kind == "unbind":
        part_dims.pop(place)
    roles = _roles(source)
    roles.results = [part_dims] * count
    return roles


def _gated(call: Call, dims: Lookup, reason: str) -> Roles | None:
    """Split a dimension into halves, of which one is the other's gate."""
    source = dims(call.input)
    place = int(call.get("dim", -1)) % len(source)
    halves, inner = take(source[place], 2, reason)
    freeze(halves, reason)
    roles = _roles(source)
    roles.result = [*source[:place], inner, *source[place + 1 :]]
    return roles


def _repeat_interleave(call: Call, dims: Lookup, reason: str) -> Roles | None:
    """Repeat each element of a dimension: it is the outer factor of the result's."""
    source, repeats, given = dims(call.input), call.get("repeats"), call.get("dim")
    if not isinstance(repeats, int) or given is None:
        return None
    place = int(given) % len(source)
    roles = _roles(source)
    longer = [*source[place], *fixed(repeats, reason)]
    roles.result = [*source[:place], longer, *source[place + 1 :]]
    return roles


def _repeated(call: Call, dims: Lookup, reason: str) -> Roles | None:
    """Repeat whole dimensions: how often is the outer factor of the result's."""
    given = call.node.args[1:]
    if len(given) == 1 and isinstance(given[0], tuple | list):
        given = tuple(given[0])
    input_dims = dims(call.input)
    if call.node.kwargs or len(given) < len(input_dims):
        return None
    numbers = [number for number in given if isinstance(number, int)]
    if len(numbers) < len(given):
        return None
    source: Dims = [*[[]] * (len(given) - len(input_dims)), *input_dims]
    times: Dims = [fresh(number) for number in numbers]
    roles = _roles(input_dims)
    roles.letters |= {f"times{n}": dim for n, dim in enumerate(times) if dim}
    roles.result = [[*n, *dim] for n, dim in zip(times, source, strict=True)]
    return roles


OTHERS: dict[str, Callable[[Call, Lookup, str], Roles | None]] = {
    **dict.fromkeys((*ALONG, "softmax", "log_softmax"), _along),
    **dict.fromkeys(("amax", "amin", "max", "min", "var", "std"), _along),
    "mean": _reduction,
    "sum": _reduction,
    "loss": _loss,
    "cat": _cat,
    "stack": _cat,
    "chunk": _equal_parts,
    "split": _equal_parts,
    "unbind": _equal_parts,
    "glu": _gated,
    "repeat_interleave": _repeat_interleave,
    "repeat": _repeated,
}


# --------------------------------------------------- by what PyTorch itself tells

FILLED = frozenset({torch.zeros, torch.ones, torch.full})  # with one number


def _by_operators(
    probe: Probe,
    node: fx.Node,
    dims: Lookup,
    shape: tuple[int, ...],
    reason: str,
    takers: Collection[str],
) -> Roles | None:
    """Take what is element by element, or a view, for what it is."""
    tensors = tensor_inputs(node)
    if not meta.is_one_tensor(node):
        return None
    if node.target in FILLED:
        new = [fresh(size) for size in shape]
        return Roles({str(place): dim for place, dim in enumerate(new)}, result=new)
    if not tensors:
        return None
    if probe.is_pointwise(node):
        text = f"{', '.join(['*d'] * len(tensors))} -> *d"
        return _solved(text, tensors, dims, shape, reason)
    if is_lookup(node):
        text = "n! *d, *e -> *e *d"
        return _solved(text, tensors, dims, shape, reason, takers=takers)
    return _view(probe, node, dims, shape, reason) if len(tensors) == 1 else None


def _view(
    probe: Probe, node: fx.Node, dims: Lookup, shape: tuple[int, ...], reason: str
) -> Roles | None:
    """Take a view for what it is: the same factors, in other groups or places."""
    tensors = tensor_inputs(node)
    source = dims(tensors[0])
    if probe.is_reshape(node) and _same_dtype(node, tensors[0]):
        roles = _roles(source)
        roles.result = regroup(source, shape, reason)
        return roles
    kept = probe.kept_dims(node, tensors[0])
    if kept is None:
        return None
    for place, dim in enumerate(source):
        if place not in kept:
            freeze(dim, reason)
    roles = _roles(source)
    back = {there: here for here, there in kept.items()}
    roles.result = [
        source[back[place]] if place in back else fixed(size, reason)
        for place, size in enumerate(shape)
    ]
    return roles


def is_lookup(node: fx.Node) -> bool:
    """Whether a node takes rows of a value by their numbers: `rows[numbers]`."""
    if node.target is not operator.getitem or len(tensor_inputs(node)) != 2:
        return False
    numbers = node.args[1]
    return isinstance(numbers, fx.Node) and meta.value(numbers).dtype == torch.int64


def _same_dtype(a: fx.Node, b: fx.Node) -> bool:
    """Whether two values have one dtype: `view` can also read memory in another."""
    return bool(meta.value(a).dtype == meta.value(b).dtype)


def _unknown(call: Call, dims: Lookup, reason: str) -> Roles:
    """Let all that goes in and comes out be whole, and a layer's tensors."""
    node, roles, layer = call.node, Roles(), call.layer
    taken = list(map(dims, tensor_inputs(node)))
    if layer is not None:
        taken += [
            dims(f"{node.target}.{name}") for name in dict(layer.named_parameters())
        ]
    for number, source in enumerate(taken):
        for place, dim in enumerate(source):
            freeze(dim, reason)
            roles.letters[f"{number}.{place}"] = dim
    value = meta.value(node)
    if isinstance(value, Tensor):
        roles.result = [fixed(size, reason) for size in value.shape]
    elif isinstance(value, tuple | list):
        tensors = [v for v in value if isinstance(v, Tensor)]
        roles.results = [[fixed(n, reason) for n in t.shape] for t in tensors]
    return roles


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the tensors of which a node reads elements."""
    return [n for n in elements(node) if meta.is_one_tensor(n)]


def _roles(source: Dims) -> Roles:
    return Roles({str(place): dim for place, dim in enumerate(source)})


def _kept(node: fx.Node, source: Dims, changed: set[int]) -> Roles:
    """Return roles where some dimensions are gone, of size 1, or of another size."""
    roles = _roles(source)
    value: Any = meta.value(node)
    first = value if isinstance(value, Tensor) else value[0]
    if len(first.shape) == len(source):
        reason = reason_at(node)
        roles.result = [
            fixed(size, reason) if place in changed else dim
            for place, (dim, size) in enumerate(zip(source, first.shape, strict=True))
        ]
    else:
        roles.result = [d for place, d in enumerate(source) if place not in changed]
    if not isinstance(value, Tensor):
        roles.results = [roles.result] * len(value)
    return roles
