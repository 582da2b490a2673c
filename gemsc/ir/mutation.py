"""What calls do with their operands: what they change in place, what they read."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from gemsc.ir import meta
from gemsc.ir.holder import called_layer
from gemsc.ir.operators.calls import Call, call_of
from gemsc.ir.operators.table import operator_of
from gemsc.ir.program import Program

_NAMES = "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift"
_OPERATORS: dict[Any, Any] = {
    getattr(operator, f"i{name.strip('_')}"): getattr(operator, name)
    for name in _NAMES.split()
}
# Without the change they draw other random numbers, or their backward rounds in
# another way (the one in place computes from the result).
_NO_TWIN = frozenset(
    {"bernoulli", "random", "cauchy", "exponential", "geometric"}
    | {"elu", "celu", "selu", "rrelu"}
    | {"embedding", "embedding_bag"}  # of their weights
)
NO_TWIN_LAYERS = (torch.nn.ELU, torch.nn.CELU, torch.nn.SELU, torch.nn.RReLU)
_ATEN = torch.ops.aten
_ALIKE: dict[Any, Any] = {
    _ATEN.batch_norm.default: torch.batch_norm,
    _ATEN.instance_norm.default: torch.instance_norm,
}
_EMBEDDING_LAYERS = (torch.nn.Embedding, torch.nn.EmbeddingBag)
# methods that take no more of another value than its shape, and what takes sizes
SIZED = {"view_as": "view", "reshape_as": "reshape", "expand_as": "expand"}
# of all but their first operand these take the dtype and the device
_CONVERTING = frozenset({"to", "type_as"})
# and these, of the first
_NEW = frozenset({"new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"})
# They end with an underscore but leave the elements as they are; the last two are
# `&` and `|`, whose names are no words of Python.
_HARMLESS = frozenset({"requires_grad_", "retain_grad_", "and_", "or_"})


def mutated_inputs(node: fx.Node, module: torch.nn.Module) -> tuple[fx.Node, ...]:
    """Return the nodes whose values a node changes in place."""
    if node.op == "call_module":
        layer = module.get_submodule(str(node.target))
        changed = getattr(layer, "inplace", False) is True
        return _nodes(_first(node)) if changed else ()
    if node.op not in ("call_function", "call_method"):
        return ()
    call = functional_call(node, module)
    writes = operator_of(call).writes
    if writes is not None and (written := writes(call)):
        return _nodes(tuple(call.get(name) for name in written))
    if isinstance(node.target, torch._ops.OpOverload):
        return _written(node, node.target)
    if node.kwargs.get("out") is not None:
        return _nodes(node.kwargs["out"])
    return written_operands(node)


def written_operands(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return what a call changes in place, as far as is known without its module."""
    owner = getattr(node.target, "__self__", None)  # what is made of it has its meta
    if isinstance(owner, type) and (places := meta.writes(node)):
        given: dict[Any, Any] = {**dict(enumerate(node.args)), **node.kwargs}
        return _nodes(tuple(given[place] for place in places))
    changed = call_mutates(node.op, node.target, node.kwargs)
    return _nodes(_first(node)) if changed else ()


def source_in(known: Set[fx.Node], node: fx.Node) -> fx.Node:
    """Return the node in `known` whose value this one gives back, else the node.

    As `table.to(x)` may do, which writes nothing.
    """
    source: fx.Node | None = node
    while source is not None and source not in known:
        given, written = meta.value(source), written_operands(source)
        same = (n for n in source.all_input_nodes if meta.value(n) is given)
        source = next((n for n in same if n not in written), None)
    return source or node


def functional_call(node: fx.Node, module: nn.Module) -> Call:
    """Return what a node computes, also where it is torch's operator of a function."""
    return call_of(node, module, _ALIKE.get(node.target))


def changed_by_layer(node: fx.Node, module: torch.nn.Module) -> tuple[str, ...]:
    """Return the parameters that a layer of torch changes whenever it is called."""
    layer = called_layer(node, module)
    renormalizes = isinstance(layer, _EMBEDDING_LAYERS) and layer.max_norm is not None
    return (f"{node.target}.weight",) if renormalizes else ()


def mutated_state(node: fx.Node, module: torch.nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters and buffers that a node changes in place.

    It may do so through views of them. Left out are the buffers of layers of torch.
    """
    names = list(changed_by_layer(node, module))
    for source in mutated_inputs(node, module):
        owned = memory(source)
        way = [source]
        while way:
            current = way.pop()
            if current.op == "get_attr":
                names.append(str(current.target))
            way += [n for n in current.all_input_nodes if owned & memory(n)]
    return tuple(dict.fromkeys(names))


def read_statistics(node: fx.Node, program: Program) -> dict[str, str]:
    """Return the statistics that layers update, and that a node itself reads.

    They are given by the layers.
    """
    statistics: dict[str, str] = {}
    for source in node.all_input_nodes:
        path, _, name = str(source.target).rpartition(".")
        if source.op == "get_attr" and path not in program.frozen:
            layer = program.module.get_submodule(path)
            is_norm = isinstance(layer, nn.modules.batchnorm._NormBase)
            if is_norm and name in layer._buffers:
                calls = (n for n in program.graph.nodes if n.op == "call_module")
                if any(call.target == path for call in calls):
                    statistics[path] = f"{path}.{name}"
    return statistics


def elements(node: fx.Node) -> list[fx.Node]:
    """Return the inputs of which a node reads more than the dtype and the device.

    What it is to compute from a part of a value that comes first, or second, or is a
    parameter: all of that is about these.
    """
    name = str(getattr(node.target, "__name__", node.target))
    given = (*node.args, *node.kwargs.values())
    if node.op in ("call_method", "call_function") and name in _CONVERTING | _NEW:
        read = given[:1] if name in _CONVERTING else given[1:]
        return list(dict.fromkeys(_nodes(read)))
    return node.all_input_nodes


def functional_twin(node: fx.Node) -> tuple[Any, dict[str, Any]] | None:
    """Return target and keyword arguments of the same call without the change."""
    target: Any = node.target
    name = str(getattr(target, "__name__", target))
    if name.strip("_") in _NO_TWIN:
        return None
    kwargs = {key: v for key, v in node.kwargs.items() if key not in ("inplace", "out")}
    if len(kwargs) < len(node.kwargs):
        return target, kwargs
    if isinstance(target, torch._ops.OpOverload):
        twin = _aten_twin(target)
        return None if twin is None else (twin, kwargs)
    if target in _OPERATORS:
        return _OPERATORS[target], kwargs
    if node.op == "call_method":
        exists = name.endswith("_") and hasattr(torch.Tensor, name[:-1])
        return (name[:-1], kwargs) if exists else None
    for owner in (torch, functional):
        twin = getattr(owner, name.removesuffix("_"), None)
        if twin is not None and twin is not target:
            return twin, kwargs
    return None


def _aten_twin(target: torch._ops.OpOverload) -> Any:
    """Return aten.add.Tensor for aten.add_.Tensor."""
    space, _, name = target._schema.name.partition("::")
    if not name.endswith("_") or name.strip("_") in _NO_TWIN:
        return None
    packet = getattr(getattr(torch.ops, space), name[:-1], None)
    return getattr(packet, target._overloadname, None)


def call_mutates(op: str, target: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call changes its first argument (or `out=`) in place."""
    if op not in ("call_function", "call_method"):
        return False
    if kwargs.get("inplace") is True or kwargs.get("out") is not None:
        return True
    if isinstance(target, torch._ops.OpOverload):
        return bool(target._schema.is_mutable)
    if target is operator.setitem or target in _OPERATORS:
        return True
    name = target if op == "call_method" else getattr(target, "__name__", "")
    return name.endswith("_") and not name.endswith("__") and name not in _HARMLESS


def _first(node: fx.Node) -> Any:
    return node.args[0] if node.args else next(iter(node.kwargs.values()), None)


def memory(node: fx.Node) -> set[int]:
    """Return the storages that a node's value is in."""
    dense = (t for t in meta.tensors(node) if t.layout is torch.strided)
    return {tensor.untyped_storage()._cdata for tensor in dense}


def _nodes(value: Any) -> tuple[fx.Node, ...]:
    nodes: list[fx.Node] = []
    fx.node.map_arg(value, nodes.append)
    return tuple(nodes)


def _written(node: fx.Node, target: torch._ops.OpOverload) -> tuple[fx.Node, ...]:
    written: list[fx.Node] = []
    for index, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            by_name = node.kwargs.get(argument.name)
            given = node.args[index] if index < len(node.args) else by_name
            written.extend(_nodes(given))
    return tuple(written)
