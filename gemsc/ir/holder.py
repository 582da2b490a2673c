"""A graph together with the user's layers, parameters and buffers."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from gemsc.ir import meta

CONSTANTS = "_constants"  # the path of tensors that are neither parameter nor buffer
LOSS = "_loss"  # the path of a loss that is a module


class _Holder(fx.GraphModule):
    """A graph module that is never called: FX need not write its Python code.

    That would fail for modules and parameters named `class` or `a b`.
    """

    def recompile(self) -> Any:
        """Do nothing."""


def with_graph(module: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """Return a module with the same children and tensors, used or not, and a graph."""
    holder = _Holder(nn.Module(), fx.Graph())
    hold(holder, module)
    holder.graph = graph
    return holder


def hold(holder: nn.Module, module: nn.Module) -> None:
    """Give a holder the children and tensors of a module, and its mode."""
    holder._modules.update(module._modules)
    holder._parameters.update(module._parameters)
    holder._buffers.update(module._buffers)
    holder._non_persistent_buffers_set |= module._non_persistent_buffers_set
    holder.training = module.training


def attribute(module: nn.Module, path: str) -> Any:
    """Return a layer, a parameter or a buffer."""
    owner, _, name = path.rpartition(".")
    return getattr(module.get_submodule(owner), name)


def called_layer(node: fx.Node, module: nn.Module) -> nn.Module | None:
    """Return the layer that a node calls, if it does."""
    return module.get_submodule(str(node.target)) if node.op == "call_module" else None


def attributes_of(node: fx.Node) -> list[str]:
    """Return the paths of the layers, parameters and buffers that a node uses."""
    paths = [str(n.target) for n in node.all_input_nodes if n.op == "get_attr"]
    return [*paths, str(node.target)] if node.op == "call_module" else paths


def copied_graph(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Return a copy with all that is known of each node, and each node's copy."""
    copied = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    output = copied.output(copied.graph_copy(graph, mapping))
    meta.copy_meta(next(iter(graph.find_nodes(op="output"))), output)
    return copied, mapping


def put_layer(module: nn.Module, path: str, layer: nn.Module) -> None:
    """Put a layer at a path of a module, whose children stay as they are elsewhere."""
    *parents, name = path.split(".")
    for parent in parents:
        child = shallow_copy(module.get_submodule(parent))
        module._modules[parent] = child
        module = child
    module._modules[name] = layer


def shallow_copy(module: nn.Module) -> nn.Module:
    """Return a copy with the same children, parameters and buffers.

    `copy.copy` refuses modules with parametrizations.
    """
    kind = type(module)
    copied = kind.__new__(kind)
    copied.__dict__ |= {**vars(module), "_modules": dict(module._modules)}
    return copied
