"""Rules: which dimensions of an operation are the same, are summed, or stay whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from gemsc.ir import meta
from gemsc.ir.mutation import elements
from gemsc.ir.opaque import has_own_backward
from gemsc.ir.program import Program
from gemsc.nn import FrozenBatchNorm
from gemsc.passes.shards.equations import Roles, solve
from gemsc.passes.shards.factors import Dim, Dims, fixed, freeze, fresh, regroup, take
from gemsc.passes.spatial.calls import ALONG, Call, call_of
from gemsc.passes.spatial.classify import Probe

__all__ = ["Lookup", "reason_at", "roles_of"]

Lookup = Callable[[fx.Node | str], Dims]  # dimensions of a value, or of a parameter


@dataclass(frozen=True)
class Equation:
    """An equation, and its operands' names among a call's arguments and parameters.

    `sizes` are those of the letters of products. What `whole` says why is not cut.
    """

    text: str
    operands: tuple[str, ...] = ("input", "weight", "bias")
    sizes: Mapping[str, int] = field(default_factory=dict)
    whole: str = ""


def roles_of(
    program: Program, probe: Probe, node: fx.Node, dims: Lookup
) -> tuple[Call, Roles]:
    """Return what a node computes, and the roles of its dimensions."""
    call, reason = call_of(node, program.module), reason_at(node)
    value = meta.value(node)
    shape = tuple(value.shape) if isinstance(value, Tensor) else ()
    if meta.glue(node) is not None or has_own_backward(node, program.module):
        return call, _unknown(call, dims, f"{reason} is not looked into")
    equation = EQUATIONS[call.kind](call) if call.kind in EQUATIONS else None
    if equation is not None and isinstance(value, Tensor):
        operands = [_operand(call, name, dims) for name in equation.operands]
        roles = solve(equation.text, operands, shape, reason, equation.sizes)
        for dim in roles.letters.values() if equation.whole else ():
            freeze(dim, f"{reason}: {equation.whole}")
        return call, roles
    rule = OTHERS.get(call.kind)
    found = rule(call, dims, reason) if rule is not None else None
    if found is None and not call.kind:
        found = _by_operators(probe, node, dims, shape, reason)
    return call, found or _unknown(call, dims, f"no rule for {reason}")


def reason_at(node: fx.Node) -> str:
    """Return what a node calls, and the user's line."""
    at = meta.location(node)
    name = getattr(node.target, "__name__", str(node.target))
    return f"{name} at {at.short}" if at is not None else name


def _operand(call: Call, name: str, dims: Lookup) -> Dims | None:
    """Return the dimensions of an argument or a layer's tensor, None if not given."""
    given = call.arguments.get(name)
    if name.startswith("operand"):
        given = call.node.args[1 + int(name.removeprefix("operand"))]
    if isinstance(given, fx.Node):
        return dims(given) if isinstance(meta.value(given), Tensor) else None
    if isinstance(getattr(call.layer, name, None), Tensor):
        return dims(f"{call.node.target}.{name}")
    return None


# ------------------------------------------------------------- by equations


def _convolution(call: Call) -> Equation | None:
    differs = call.get("padding_mode", "zeros") != "zeros"
    if meta.value(call.input).dim() != call.rank + 2:
        return None
    return Equation(
        "n (g c+) *x!, (g o) c *k!, (g o) -> n (g o) *y",
        sizes={"g": int(call.get("groups", 1))},
        whole="only zeros are padded in parts" if differs else "",
    )


def _transposed(call: Call) -> Equation | None:
    if meta.value(call.input).dim() != call.rank + 2:
        return None
    text = "n (g c+) *x!, (g c) o *k!, (g o) -> n (g o) *y"
    return Equation(text, sizes={"g": int(call.get("groups", 1))})


_STATISTICS = ("input", "running_mean", "running_var", "weight", "bias")


def _batch_norm(call: Call) -> Equation:
    return Equation("n! c *x!, c, c, c, c -> n c *x", _STATISTICS)


def _frozen_batch_norm(call: Call) -> Equation | None:
    if not isinstance(call.layer, FrozenBatchNorm):
        return None
    return Equation("n c *x, c, c, c, c -> n c *x", _STATISTICS)


def _group_norm(call: Call) -> Equation:
    text = "n (g c!) *x!, (g c), (g c) -> n (g c) *x"
    return Equation(text, sizes={"g": int(call["num_groups"])})


def _last_normalized(call: Call) -> Equation:
    shape = call["normalized_shape"]
    count = 1 if isinstance(shape, int) else len(tuple(shape))
    last = " ".join(f"h{place}!" for place in range(count))
    return Equation(f"*b {last}, {last}, {last} -> *b {last}")


def _matmul(call: Call) -> Equation:
    names = ("input", "mat2" if "mat2" in call.arguments else "other")
    left, right = (meta.value(call[name]).dim() for name in names)
    first = "*b m k+" if left > 1 else "k+"
    second = "*b k n" if right > 1 else "k"
    rest = ("m " if left > 1 else "") + ("n" if right > 1 else "")
    batch = "*b " if max(left, right) > 1 else ""
    return Equation(f"{first}, {second} -> {batch}{rest}", names)


def _addmm(call: Call) -> Equation:
    scaled = call.get("beta", 1) != 1 or call.get("alpha", 1) != 1
    names = ("mat1", "mat2", "input")
    if "batch1" in call.arguments:
        names = ("batch1", "batch2", "input")
    k = "k!" if scaled else "k+"
    text = f"*b m {k}, *b k n, *b m n -> *b m n"
    if meta.value(call["input"]).dim() == 1:
        text = f"m {k}, k n, n -> m n"
    return Equation(text, names)


def _attention(call: Call) -> Equation:
    names = ("query", "key", "value", "attn_mask")
    if not call.get("enable_gqa", False):
        return Equation("*b q d!, *b k! d, *b k e, *b q k -> *b q e", names)
    heads = int(meta.value(call["key"]).shape[-3])
    mask = call.arguments.get("attn_mask")
    lower = isinstance(mask, fx.Node) and meta.value(mask).dim() == 2
    heads_of = "" if lower else "*b (h r) "
    text = f"*b (h r) q d!, *b h k! d, *b h k e, {heads_of}q k -> *b (h r) q e"
    return Equation(text, names, {"h": heads})


def _embedding(call: Call) -> Equation:
    whole = call.get("max_norm") is not None or any(
        call.get(name, False) for name in ("sparse", "scale_grad_by_freq")
    )
    reason = "it looks at all words" if whole else ""
    return Equation("*b, v+ h -> *b h", ("input", "weight"), whole=reason)


def _cross_entropy(call: Call) -> Equation:
    target = meta.value(call["target"])
    names = ("input", "target")
    if target.is_floating_point() or meta.value(call.input).dim() < 2:
        return Equation("*x!, *y! -> ", names)
    result = "n *x" if call.get("reduction", "mean") == "none" else ""
    return Equation(f"n c *x, n *x -> {result}", names)


def _einsum(call: Call) -> Equation | None:
    text = call.node.args[0]
    if not isinstance(text, str) or "->" not in text:
        return None
    left, right = text.replace(" ", "").split("->")
    summed = set(left) - set(right) - set(",.")

    def spaced(side: str) -> str:
        words = re.findall(r"\.\.\.|\w", side)
        marked = [f"{w}+" if w in summed else w for w in words]
        return " ".join("*B" if word == "..." else word for word in marked)

    sides = left.split(",")
    diagonal = any(len(set(side)) < len(side.replace("...", ".")) for side in sides)
    return Equation(
        f"{', '.join(map(spaced, sides))} -> {spaced(right)}",
        tuple(f"operand{place}" for place in range(len(sides))),
        whole="it takes a diagonal" if diagonal else "",
    )


def _pooling(call: Call) -> Equation | None:
    batched = call.detail == "" or meta.value(call.input).dim() == call.rank + 2
    return Equation("n c *x! -> n c *y", ("input",)) if batched else None


EQUATIONS: dict[str, Callable[[Call], Equation | None]] = {
    "linear": lambda call: Equation("*b i+, o i, o -> *b o"),
    "conv": _convolution,
    "conv_transpose": _transposed,
    "batch_norm": _batch_norm,
    "channels": _frozen_batch_norm,
    "group_norm": _group_norm,
    "layer_norm": _last_normalized,
    "rms_norm": _last_normalized,
    "matmul": _matmul,
    "addmm": _addmm,
    "einsum": _einsum,
    "attention": _attention,
    "embedding": _embedding,
    "cross_entropy": _cross_entropy,
    "dropout": lambda call: Equation("*d -> *d", ("input",)),
    **dict.fromkeys(("max_pool", "avg_pool", "adaptive_avg_pool"), _pooling),
    "interpolate": _pooling,
}


# --------------------------------------------------------- by their arguments


def _along(call: Call, dims: Lookup, reason: str) -> Roles | None:
    """Let all dimensions be the same but those along which it works."""
    given, source = call.get("dim"), dims(call.input)
    places = _places(given, len(source))
    if places is None or len(_tensor_inputs(call.node)) > 1:
        return None
    for place in places:
        freeze(source[place], reason)
    return _kept(call.node, source, places)


def _reduction(call: Call, dims: Lookup, reason: str) -> Roles | None:
    """Sum over some dimensions: all of them where none is given."""
    source = dims(call.input)
    given = call.get("dim")
    places = set(range(len(source))) if given is None else _places(given, len(source))
    if places is None:
        return None
    roles = _kept(call.node, source, places)
    roles.summed = {str(place) for place in places}
    return roles


def _loss(call: Call, dims: Lookup, reason: str) -> Roles | None:
    """Compare element by element, and sum over all of them."""
    tensors = _tensor_inputs(call.node)
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
        own = list(dims(tensor))
        if not stacks:
            freeze(own[place], reason)
            own.pop(place)
        operands.append(own)
    kept = names if stacks else [n for n in names if n != f"d{place}"]
    text = ", ".join([" ".join(kept)] * len(operands))
    rest = tuple(size for number, size in enumerate(shape) if number != place)
    roles = solve(f"{text} -> {' '.join(kept)}", operands, rest, reason)
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
    parts, rest = take(source[place], count, reason)
    freeze(parts, reason)
    each = [*source[:place], rest, *source[place + 1 :]]
    if call.kind == "unbind":
        each.pop(place)
    roles = _roles(source)
    roles.results = [each] * count
    return roles


def _gated(call: Call, dims: Lookup, reason: str) -> Roles | None:
    """Split a dimension into halves, of which one is the other's gate."""
    source = dims(call.input)
    place = int(call.get("dim", -1)) % len(source)
    halves, rest = take(source[place], 2, reason)
    freeze(halves, reason)
    roles = _roles(source)
    roles.result = [*source[:place], rest, *source[place + 1 :]]
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
}


# --------------------------------------------------- by what PyTorch itself tells

FILLED = frozenset({torch.zeros, torch.ones, torch.full})  # with one number


def _by_operators(
    probe: Probe, node: fx.Node, dims: Lookup, shape: tuple[int, ...], reason: str
) -> Roles | None:
    """Take what is element by element, or a view, for what it is."""
    tensors = _tensor_inputs(node)
    if not isinstance(meta.value(node), Tensor):
        return None
    if node.target in FILLED:
        new = [fresh(size) for size in shape]
        return Roles({str(place): dim for place, dim in enumerate(new)}, result=new)
    if not tensors:
        return None
    if probe.is_pointwise(node):
        text = f"{', '.join(['*d'] * len(tensors))} -> *d"
        return solve(text, [dims(each) for each in tensors], shape, reason)
    if len(tensors) > 1:
        return None
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


def _same_dtype(a: fx.Node, b: fx.Node) -> bool:
    """Whether two values have one dtype: `view` can also read memory in another."""
    return bool(meta.value(a).dtype == meta.value(b).dtype)


def _unknown(call: Call, dims: Lookup, reason: str) -> Roles:
    """Let all that goes in and comes out be whole, and a layer's tensors."""
    node, roles, layer = call.node, Roles(), call.layer
    taken = [_all_dims(source, dims) for source in elements(node)]
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


def _places(given: Any, count: int) -> set[int] | None:
    """Return dimensions as numbers from the first; None for anything else."""
    numbers = given if isinstance(given, tuple | list) else [given]
    if not numbers or any(type(number) is not int for number in numbers):
        return None
    return {number % count for number in numbers}


def _all_dims(node: fx.Node, dims: Lookup) -> Sequence[Dim]:
    return dims(node) if isinstance(meta.value(node), Tensor) else ()


def _tensor_inputs(node: fx.Node) -> list[fx.Node]:
    return [n for n in elements(node) if isinstance(meta.value(n), Tensor)]


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
