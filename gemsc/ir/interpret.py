"""Run the nodes of a graph one by one, under the modes of the user's forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import fx

from gemsc.ir.holder import attribute
from gemsc.ir.meta import Region, region, whole_gradients
from gemsc.runtime.tiles import own_numbers, with_whole_gradients

NodeContext = Callable[[fx.Node], AbstractContextManager[Any]]


def run_nodes(
    nodes: Iterable[fx.Node],
    values: dict[fx.Node, Any],
    module: torch.nn.Module,
    *,
    observe: NodeContext = lambda node: nullcontext(),
) -> None:
    """Run `nodes` in order and put what each computes into `values`.

    `values` must hold the placeholders; `module` holds layers, parameters and buffers
    under the graph's names. `observe(node)` is entered around each computation.
    """
    for node in nodes:
        if node.op in ("placeholder", "output"):
            continue
        with observe(node):
            values[node] = run_node(node, values, module)


def run_node(node: fx.Node, values: dict[fx.Node, Any], module: torch.nn.Module) -> Any:
    """Compute one node from the values of its inputs."""
    if node.op == "get_attr":
        return attribute(module, str(node.target))
    args = fx.node.map_arg(node.args, values.__getitem__)
    kwargs = fx.node.map_arg(node.kwargs, values.__getitem__)
    with _modes(node):
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        function: Any = node.target
        if node.op == "call_module":
            function = module.get_submodule(str(node.target))
        if (grid := whole_gradients(node)) is not None:
            return with_whole_gradients(grid, function, *args, **kwargs)
        return function(*args, **kwargs)


def _modes(node: fx.Node) -> AbstractContextManager[Any]:
    modes = region(node)
    if modes == Region():
        return nullcontext()
    stack = ExitStack()
    if not modes.grad:
        stack.enter_context(torch.no_grad())
    if modes.autocast is not None:
        device, dtype = modes.autocast
        stack.enter_context(torch.autocast(device, dtype=dtype))
    if modes.draw is not None:
        stack.enter_context(own_numbers(modes.draw))
    return stack
