"""Values that any rank can make: of shapes, numbers and buffers that do not change.

Example, in a transformer: the causal mask, the sines and cosines of positions.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx, nn

from gemsc.base.rng import may_draw
from gemsc.ir import meta
from gemsc.ir.holder import attribute
from gemsc.ir.mutation import memory, mutated_inputs, mutated_state
from gemsc.ir.program import Program

_OF_TORCH = ("torch", "_operator", "builtins")


def constant_nodes(
    program: Program, changing: Collection[str] = ()
) -> frozenset[fx.Node]:
    """Return the nodes that compute the same, wherever and whenever they run.

    Their values depend on no input, parameter or random number, and on no memory that
    any node writes to; `changing` are further buffers that do change.
    """
    module = program.module
    written = set(changing) | changing_tensors(program)
    touched = {
        key
        for node in program.compute_nodes
        for source in mutated_inputs(node, module)
        for key in memory(source)
    }
    constants: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.op == "get_attr":
            name = str(node.target)
            is_same = program.aliases.get(name, name) not in written
            tensor = attribute(module, name)
            is_buffer = isinstance(tensor, torch.Tensor) and not isinstance(
                tensor, nn.Parameter
            )
            if is_same and is_buffer and touched.isdisjoint(memory(node)):
                constants.add(node)
        elif (
            _is_of_torch(node)
            and constants.issuperset(node.all_input_nodes)
            and touched.isdisjoint(memory(node))
            and _stays(node)
        ):
            constants.add(node)
    return frozenset(node for node in constants if node.op != "get_attr")


def changing_tensors(program: Program) -> set[str]:
    """Return the buffers and parameters that forward changes, or may change."""
    module, names = program.module, list[str]()
    for node in program.compute_nodes:
        names += mutated_state(node, module)
        if node.op == "call_module":
            buffers = module.get_submodule(str(node.target)).named_buffers()
            names += [f"{node.target}.{name}" for name, _ in buffers]
    return {program.aliases.get(name, name) for name in names}


def _is_of_torch(node: fx.Node) -> bool:
    """Whether a node is a call of PyTorch's, or of an operator, on tensors."""
    if node.op == "call_method":
        return True
    target: Any = node.target
    owner = str(getattr(target, "__module__", None) or "").partition(".")[0]
    return node.op == "call_function" and owner in _OF_TORCH


def _stays(node: fx.Node) -> bool:
    """Whether a call gives the same each time, and no gradient flows through it."""
    name = str(getattr(node.target, "__name__", node.target))
    return not (
        meta.facts(node).random
        or may_draw(name)
        or "empty" in name  # whatever was there before
        or meta.glue(node) is not None
        or any(tensor.requires_grad for tensor in meta.tensors(node))
    )
