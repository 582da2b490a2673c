"""Which calls change a tensor in place."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.nn import functional

__all__ = ["FUNCTIONAL", "call_mutates", "mutated_inputs"]

FUNCTIONAL: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ifloordiv: operator.floordiv,
    operator.imod: operator.mod,
    operator.ipow: operator.pow,
    operator.imatmul: operator.matmul,
    operator.iand: operator.and_,
    operator.ior: operator.or_,
    operator.ixor: operator.xor,
    operator.ilshift: operator.lshift,
    operator.irshift: operator.rshift,
}
"""Operators that change their first operand, and the same without the change."""

# Where they take the running statistics and the flag that they update them.
_STATISTICS = ("running_mean", "running_var")
_NORMS: dict[Any, tuple[str, ...]] = {
    functional.batch_norm: ("input", *_STATISTICS, "weight", "bias", "training"),
    functional.instance_norm: (
        *("input", *_STATISTICS, "weight", "bias"),
        "use_input_stats",
    ),
    torch.ops.aten.batch_norm.default: (
        *("input", "weight", "bias", *_STATISTICS),
        "training",
    ),
    torch.ops.aten.instance_norm.default: (
        *("input", "weight", "bias", *_STATISTICS),
        "use_input_stats",
    ),
}
# They end with an underscore but leave the elements as they are.
_HARMLESS = frozenset({"requires_grad_", "retain_grad_"})


def mutated_inputs(node: fx.Node, module: torch.nn.Module) -> tuple[fx.Node, ...]:
    """Return the nodes whose values a node changes in place."""
    if node.op == "call_module":
        layer = module.get_submodule(str(node.target))
        changed = getattr(layer, "inplace", False) is True
        return _nodes(_first(node)) if changed else ()
    if node.op not in ("call_function", "call_method"):
        return ()
    if node.target in _NORMS:
        return _running_statistics(node)
    if isinstance(node.target, torch._ops.OpOverload):
        return _written(node, node.target)
    if node.kwargs.get("out") is not None:
        return _nodes(node.kwargs["out"])
    changed = call_mutates(node.op, node.target, node.kwargs)
    return _nodes(_first(node)) if changed else ()


def call_mutates(op: str, target: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call changes its first argument (or `out=`) in place."""
    if op not in ("call_function", "call_method"):
        return False
    if kwargs.get("inplace") is True or kwargs.get("out") is not None:
        return True
    if isinstance(target, torch._ops.OpOverload):
        return bool(target._schema.is_mutable)
    if target is operator.setitem or target in FUNCTIONAL:
        return True
    name = target if op == "call_method" else getattr(target, "__name__", "")
    return name.endswith("_") and not name.endswith("__") and name not in _HARMLESS


def _first(node: fx.Node) -> Any:
    return node.args[0] if node.args else next(iter(node.kwargs.values()), None)


def _nodes(value: Any) -> tuple[fx.Node, ...]:
    found: list[fx.Node] = []
    fx.node.map_arg(value, found.append)
    return tuple(found)


def _written(node: fx.Node, target: torch._ops.OpOverload) -> tuple[fx.Node, ...]:
    found: list[fx.Node] = []
    for index, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            by_name = node.kwargs.get(argument.name)
            given = node.args[index] if index < len(node.args) else by_name
            found.extend(_nodes(given))
    return tuple(found)


def _running_statistics(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the statistics that a normalization updates."""
    names = _NORMS[node.target]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if not given.get(names[-1], node.target is functional.instance_norm):
        return ()
    return _nodes(tuple(given.get(name) for name in _STATISTICS))
