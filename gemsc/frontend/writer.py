"""Write FX nodes for tensors known by identity, and make the module of the graph."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from gemsc.base.nests import Path, named_tuple, storage_of, tensor_leaves
from gemsc.base.rng import SEEDED, may_draw
from gemsc.errors import GemscError
from gemsc.frontend.closures import HELP_OF_LOSS
from gemsc.frontend.eager import transformed
from gemsc.frontend.fake_copy import FakeCopy
from gemsc.frontend.targets import TargetCall
from gemsc.frontend.user_code import UserLine
from gemsc.frontend.values import PLAIN
from gemsc.ir import meta
from gemsc.ir.holder import CONSTANTS, LOSS, hold, with_graph
from gemsc.ir.layers import NORM_STATISTICS
from gemsc.ir.meta import Region
from gemsc.ir.mutation import source_in, written_operands

_LITERALS = (*PLAIN, torch.layout, torch.memory_format, type(...), range, type)


class GraphWriter:
    """A graph that grows while the model runs.

    A tensor that was changed in place belongs to the node that changed it last.
    `line` is where the user's code stands, `module_path` which module is running;
    `earlier` is the writer of an earlier run on the same copy of the model; `kept` maps
    nodes for what forward kept from that run to the nodes there.
    """

    def __init__(self, copied: FakeCopy, earlier: GraphWriter | None = None) -> None:
        self.graph = fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self.kept: dict[fx.Node, fx.Node] = {}
        self.line: UserLine | None = None
        self.module_path = ""
        self.on_node: Callable[[fx.Node], None] = lambda node: None
        self._copied = copied
        self._earlier = earlier
        self._nodes: dict[int, fx.Node] = {}
        self._parts: dict[int, tuple[fx.Node, Path, object]] = {}
        self._values: list[object] = []  # an id must not be used twice

    def placeholder(self, name: str, value: torch.Tensor) -> fx.Node:
        """Add an input."""
        node = self.graph.placeholder(_identifier(name))
        self._finish(node, value)
        return node

    def call(self, call: TargetCall, result: Any) -> fx.Node:
        """Add a node for a call and remember what it gave."""
        op, target, args, kwargs = call
        node_args = self._argument(args)
        node_kwargs = {key: self._argument(value) for key, value in kwargs.items()}
        name = self._node_name(call)
        node = self.graph.create_node(op, target, node_args, node_kwargs, name=name)
        self._finish(node, result)
        return node

    def assign_buffer(self, name: str, old: torch.Tensor, new: torch.Tensor) -> None:
        """Add `buffer.copy_(new)` for a buffer that forward replaced."""
        source = self.node_of(new)
        for node in self.graph.find_nodes(op="get_attr", target=name):
            if _backward_reads(node, old):
                self._read_a_copy(node)
        target = self._get_attr(name, old)
        old.constant = None  # type: ignore[attr-defined]  # it differs at each step
        node = self.graph.call_method("copy_", (target, source))
        self._finish(node, old, replace(_region(), grad=False))
        meta.location.set(node, meta.location(source))  # no line runs any more

    def _read_a_copy(self, buffer: fx.Node) -> None:
        """Let what reads a buffer read a copy, which stays as it was for backward."""
        with self.graph.inserting_after(buffer):
            clone = self.graph.call_method("clone", (buffer,))
        buffer.replace_all_uses_with(clone, lambda user: user is not clone)
        meta.copy_meta(buffer, clone)

    def value_of(self, tensor: torch.Tensor) -> fx.Node:
        """Return the node of an output, a copy of what is in a parameter or buffer."""
        node = self.node_of(tensor)
        buffers = map(storage_of, self._copied.model.buffers())
        if node.op != "get_attr" and storage_of(tensor) not in buffers:
            return node
        changes, (*_, last) = overwritten(self.graph).values(), self.graph.nodes
        with self.graph.inserting_after(node if node in changes else last):
            return self.call(("call_method", "clone", (tensor,), {}), tensor.clone())

    def output(self, loss: torch.Tensor | None, outputs: list[fx.Node]) -> None:
        """End the graph."""
        loss_node = None if loss is None else self.node_of(loss)
        self.graph.output((loss_node, tuple(outputs)))

    def alias(self, result: torch.Tensor, source: torch.Tensor) -> None:
        """Remember that `result` is the value of `source`."""
        self._nodes[id(result)] = self.node_of(source)
        self._values.append(result)

    def keep_value(self, node: fx.Node, value: torch.Tensor) -> None:
        """Give a node a value that later in-place calls do not touch."""
        if meta.is_one_tensor(node):
            self._values.append(value)
            meta.set_value(node, value)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has a node already."""
        return id(tensor) in self._nodes or id(tensor) in self._parts

    def finds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is of the model, or was recorded."""
        return self.knows(tensor) or id(tensor) in self._copied.tensors

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """Return the node whose value this tensor is; adds parameters and constants."""
        key = id(tensor)
        if key in self._nodes:
            return self._nodes[key]
        if key in self._parts:
            return self._part(tensor)
        if key in self._copied.tensors:
            name = self._copied.tensors[key]
            if tensor.requires_grad and not isinstance(tensor, FakeTensor):
                raise GemscError(
                    f"this takes '{name}' of the model from outside of it: in a copy, "
                    "on which gemsc works, it is the same",
                    help=HELP_OF_LOSS,
                )
            return self._get_attr(name, tensor)
        return self._constant(tensor)

    def _finish(self, node: fx.Node, value: Any, region: Region | None = None) -> None:
        meta.set_traced(
            node,
            value=value,
            location=self.line.location if self.line else None,
            module_path=self.module_path,
            region=region or _region(),
        )
        self._values.append(value)
        target = self.line.target if self.line else None
        for path, tensor in tensor_leaves(value):
            self._nodes.pop(id(tensor), None)
            self._parts.pop(id(tensor), None)
            if path:
                self._parts[id(tensor)] = (node, path, target)
            else:
                self._nodes[id(tensor)] = node
        self.on_node(node)

    def _part(self, tensor: torch.Tensor) -> fx.Node:
        """Return the node of one tensor of a tuple, made where the tuple was made."""
        node, path, target = self._parts.pop(id(tensor))
        value = meta.value(node)
        for key in path:
            take: Any = operator.getitem
            if dataclasses.is_dataclass(value) and not isinstance(value, Mapping):
                take = getattr
            value = take(value, key)
            target = _part_name(target, key)
            node = self._taken(node, take, key, value, target)
        self._nodes[id(tensor)] = node
        return node

    def _taken(
        self, node: fx.Node, take: Any, key: Any, value: Any, target: object
    ) -> fx.Node:
        made = [u for u in node.users if u.target is take and u.args[0] is node]
        for user in made:
            if user.args[1] == key:
                return user
        name = target if isinstance(target, str) else None
        name = key if name is None and take is getattr else name
        with self.graph.inserting_after(made[-1] if made else node):
            item = self.graph.create_node("call_function", take, (node, key), name=name)
        meta.copy_meta(node, item)
        meta.set_value(item, value)
        return item

    def _get_attr(self, name: str, tensor: torch.Tensor) -> fx.Node:
        node = self.graph.create_node("get_attr", name)
        self._finish(node, tensor, Region())
        return node

    def _constant(self, tensor: torch.Tensor) -> fx.Node:
        name = "constant"
        if id(tensor) in self._copied.constants:
            name, real = self._copied.constants[id(tensor)]
        elif not isinstance(tensor, FakeTensor):
            real = tensor
        elif tensor.constant is not None:
            real = tensor.constant
        else:
            return self._kept_value(tensor)
        name = self._constant_name(_identifier(name), real)
        self.constants[name] = real
        return self._get_attr(f"{CONSTANTS}.{name}", tensor)

    def _constant_name(self, base: str, real: torch.Tensor) -> str:
        name, number = base, 0
        while name in self.constants and self.constants[name] is not real:
            number += 1
            name = f"{base}_{number}"
        return name

    def _kept_value(self, tensor: torch.Tensor) -> fx.Node:
        """Return a node for what forward computed in the earlier run and kept."""
        earlier = self._earlier
        if earlier is None or not earlier.knows(tensor):
            if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                raise transformed()
            raise GemscError(
                "forward uses a tensor whose origin gemsc cannot see",
                help="compute it without torch.func, or keep it with register_buffer",
            )
        fixed = fixed_nodes(earlier.graph, self._copied.model.training)
        source = source_in(fixed, earlier.node_of(tensor))
        if source not in fixed:
            raise GemscError(
                "forward uses a tensor that an earlier call of forward made",
                help="keep it with register_buffer, or pass it as an input",
            )
        node = self._get_attr(f"{CONSTANTS}.{source.name}", tensor)
        self.kept[node] = source
        return node

    def _argument(self, value: Any) -> Any:
        """Return what stands in the graph for an argument."""
        if isinstance(value, torch.Tensor):
            return self.node_of(value)
        if isinstance(value, torch.Size):
            return tuple(int(size) for size in value)
        if isinstance(value, (tuple, list)):
            items = [self._argument(item) for item in value]
            return items if isinstance(value, list) else named_tuple(value, items)
        if isinstance(value, dict):
            return {key: self._argument(item) for key, item in value.items()}
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return slice(*(self._argument(part) for part in parts))
        return self._plain_argument(value)

    def _plain_argument(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            with unset_fake_temporarily():
                return self._constant(torch.from_numpy(value.copy()))
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, _LITERALS):
            return value
        raise GemscError(
            f"an argument of type {type(value).__name__} cannot be part of a graph",
            help=f"leave it out: {SEEDED}"
            if isinstance(value, torch.Generator)
            else "pass tensors, numbers and strings to torch functions (what a "
            "checkpoint is given can be called as it is: see --recompute)",
        )

    def _node_name(self, call: TargetCall) -> str | None:
        op, target, args, _ = call
        if self.line and isinstance(self.line.target, str):
            return self.line.target
        if op == "call_module":
            return _identifier(str(target))
        if target is getattr:
            return _identifier(str(args[1]))
        owner = getattr(target, "__self__", None)
        if isinstance(owner, type):  # a custom autograd function
            return _identifier(owner.__name__.lower())
        name = target if op == "call_method" else getattr(target, "__name__", "")
        return _identifier(str(name).split(".")[0].strip("_")) or None


def _region() -> Region:
    """Return the modes that are on now."""
    autocast = None
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            autocast = (device, torch.get_autocast_dtype(device))
            break
    return Region(grad=torch.is_grad_enabled(), autocast=autocast)


def fixed_nodes(graph: fx.Graph, training: bool) -> set[fx.Node]:
    """Return the nodes whose values are the same at every call.

    They depend on no input or random number, in training on no weight that may change.
    """
    fixed = _unchanged_buffers(graph)
    changed: set[int | None] = set()  # memory into which another value was written
    for node in graph.nodes:
        inputs = node.all_input_nodes
        same = all(i in fixed and _memory(i) not in changed for i in inputs)
        if node in fixed or (same and not _varies(node, training)):
            fixed.add(node)
        else:
            changed |= {_memory(source) for source in written_operands(node)}
    return {node for node in fixed if _memory(node) not in changed}


def _unchanged_buffers(graph: fx.Graph) -> set[fx.Node]:
    """Return the buffers that forward reads, but does not write to or give a layer."""
    written = overwritten(graph)
    layers = tuple(f"{call.target}." for call in graph.find_nodes(op="call_module"))
    return {
        node
        for node in graph.find_nodes(op="get_attr")
        if not isinstance(meta.value(node), nn.Parameter)
        and node not in written
        and not str(node.target).startswith(layers)
        and str(node.target).rpartition(".")[2] not in NORM_STATISTICS
    }


def overwritten(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return the parameters and buffers that are written to, each with what does it."""
    writes = {
        _memory(source): node
        for node in graph.nodes
        for source in written_operands(node)
    }
    held = graph.find_nodes(op="get_attr")
    return {node: writes[_memory(node)] for node in held if _memory(node) in writes}


def _varies(node: fx.Node, training: bool) -> bool:
    """Return whether a node gives something new at each call by itself."""
    name = str(getattr(node.target, "__name__", node.target))
    if node.op == "get_attr":
        return training and not name.startswith(CONSTANTS)
    if node.op == "call_module" or may_draw(name):
        return True
    return node.op in ("placeholder", "output")


def _memory(node: fx.Node) -> int | None:
    value = meta.value(node)
    return storage_of(value) if isinstance(value, torch.Tensor) else None


def _part_name(target: object, key: str | int) -> object:
    if isinstance(target, tuple) and isinstance(key, int) and key < len(target):
        return target[key]
    return None


def _backward_reads(node: fx.Node, buffer: torch.Tensor) -> bool:
    """Return whether backward may need the value of a node: of a buffer or its view."""
    for user in node.users:
        tensors = [tensor for _, tensor in tensor_leaves(meta.value(user))]
        if any(tensor.requires_grad for tensor in tensors):
            return True
        if any(t._base is buffer for t in tensors) and _backward_reads(user, buffer):
            return True
    return False


def _identifier(name: str) -> str:
    text = "".join(c if c.isalnum() and c.isascii() else "_" for c in name)
    return f"_{text}" if text[:1].isdigit() else text


def make_root(
    model: nn.Module, loss: Any, constants: dict[str, torch.Tensor]
) -> tuple[fx.GraphModule, dict[str, str]]:
    """Return a graph module that holds the user's modules, and the aliases in it.

    Raises:
        GemscError: a submodule or parameter of the model has a name of FX's own.
    """
    root = with_graph(nn.Module(), fx.Graph())
    names = [*model._modules, *model._parameters, *model._buffers]
    for attribute in names:
        taken = attribute in vars(root) or hasattr(type(root), attribute)
        if taken or attribute in (LOSS, CONSTANTS):
            raise GemscError(
                f"the model has an attribute with the reserved name {attribute}",
                help=f"call it {attribute}_ or the like; or let a module of yours hold "
                "the model: self.net = Net()",
            )
    hold(root, model)
    if isinstance(loss, nn.Module):
        root.add_module(LOSS, loss)
    if constants:
        holder = nn.Module()
        for constant, value in constants.items():
            holder.register_buffer(constant, value.detach(), persistent=False)
        root.add_module(CONSTANTS, holder)
    return root, _aliases(root)


def name_constants(root: fx.GraphModule, known: dict[str, torch.Tensor]) -> None:
    """Give constants names that no other one has among those that are `known`.

    Graphs of one model share a place for them, and forward may use others in each.
    """
    holder: Any = root._modules.get(CONSTANTS, nn.Module())
    values, holder._buffers = holder._buffers, {}
    renamed: dict[str, str] = {}
    for name, value in values.items():
        new, number = name, 0
        while not _is_same(known.setdefault(new, value), value):
            number += 1
            new = f"{name}_{number}"
        holder._buffers[new] = value
        renamed[f"{CONSTANTS}.{name}"] = f"{CONSTANTS}.{new}"
    for node in root.graph.nodes:
        if node.op == "get_attr":
            node.target = renamed.get(str(node.target), node.target)


def share_constants(roots: Sequence[fx.GraphModule]) -> None:
    """Give each graph of a model the constants of all; names tell them apart."""
    holders = [root._modules.get(CONSTANTS) for root in roots]
    held = [dict(m.named_buffers()) if m is not None else {} for m in holders]
    for root, there in zip(roots, held, strict=True):
        lacking = {n: t for named in held for n, t in named.items() if n not in there}
        if lacking and not there:
            root.add_module(CONSTANTS, nn.Module())
        for name, tensor in lacking.items():
            root.get_submodule(CONSTANTS).register_buffer(
                name, tensor, persistent=False
            )


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = one.shape == other.shape and one.dtype == other.dtype
    return one is other or (alike and not one.is_meta and torch.equal(one, other))


def _aliases(root: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for named in (root.named_parameters, root.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            original = first.setdefault(id(tensor), name)
            if original != name:
                aliases[name] = original
    return aliases
