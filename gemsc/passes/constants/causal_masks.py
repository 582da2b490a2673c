"""Causal masks: attention that is given the causal mask is told so instead.

Example:
    mask = triu(ones(t, t), 1) == 0                                # before
    y = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    y = scaled_dot_product_attention(q, k, v, is_causal=True)      # after
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from gemsc.ir import meta
from gemsc.ir.constants import constant_nodes
from gemsc.ir.holder import copied_graph, with_graph
from gemsc.ir.interpret import run_node
from gemsc.ir.operators.calls import call_of
from gemsc.ir.program import Program
from gemsc.passes.base import Pass

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class CausalMasks(Pass):
    """Give attention `is_causal=True` in place of a mask that says the same.

    Kernels then leave out half of the work, and no mask is made, sent or kept. Some
    libraries do so themselves when they run, but not when they are traced: transformers
    sees no values then, and takes it that samples may be packed.

    A mask that numbers and shapes decide is computed here, on the CPU, and compared;
    one that depends on buffers, which can be loaded, or has a value in its making of
    more than `most_bytes`, stays.
    """

    most_bytes: int = 256 * 2**20

    def apply(self, program: Program) -> Program:
        """Return the program, on another graph where any mask goes."""
        masks: dict[fx.Node, fx.Node] = {}
        for node in program.compute_nodes:
            call = call_of(node, program.module)
            if call.kind == "attention" and not call.get("is_causal", False):
                mask = call.get("attn_mask")
                if isinstance(mask, fx.Node) and _fits(mask, call["query"]):
                    masks[node] = mask
        if not masks:
            return program
        constant = constant_nodes(program)
        order = [node for node in program.compute_nodes if node in constant]
        is_causal = {m: self._is_causal(program, m, order) for m in {*masks.values()}}
        calls = [node for node, mask in masks.items() if is_causal[mask]]
        if not calls:
            return program
        graph, copies = copied_graph(program.graph)
        for node in calls:
            _tell(copies[node], program)
        for node in reversed(order):
            if not copies[node].users:
                graph.erase_node(copies[node])
        return program.with_module(with_graph(program.module, graph))

    def _is_causal(
        self, program: Program, mask: fx.Node, order: Sequence[fx.Node]
    ) -> bool:
        """Whether a mask lets each of n queries see as many of n keys as stand before.

        `order` are the nodes of constants.
        """
        made, inside = [], {mask}
        for node in reversed(order):
            if node in inside:
                made.append(node)
                inside.update(node.all_input_nodes)
        if not made or any(node.op == "get_attr" for node in inside):
            return False
        if any(self._is_too_large(node) for node in made):
            return False
        values: dict[fx.Node, Any] = {}
        last = {source: node for node in made[::-1] for source in node.all_input_nodes}
        with torch.no_grad():
            for node in reversed(made):
                values[node] = run_node(node, values, program.module)
                for source in node.all_input_nodes:
                    if last.get(source) is node:
                        del values[source]
        return _says_causal(values[mask])

    def _is_too_large(self, node: fx.Node) -> bool:
        leaves = pytree.tree_leaves((node.args, node.kwargs, meta.value(node)))
        sizes = [t.numel() * t.element_size() for t in leaves if isinstance(t, Tensor)]
        devices = {d for d in leaves if isinstance(d, torch.device)}
        return max(sizes, default=0) > self.most_bytes or not devices <= {_CPU}


def _fits(mask: fx.Node, query: fx.Node) -> bool:
    """Whether a mask adds no samples or heads to those of the queries."""
    given, wanted = (meta.spec(node).shape[:-2] for node in (mask, query))
    spread = zip(given[::-1], wanted[::-1], strict=False)
    return len(given) <= len(wanted) and all(n in (1, size) for n, size in spread)


def _says_causal(mask: object) -> bool:
    """Whether a mask, of booleans or of what is added to scores, is the causal one."""
    if not isinstance(mask, Tensor) or mask.dim() < 2 or not mask.numel():
        return False
    queries, keys = mask.shape[-2:]
    if queries != keys or queries < 2:  # one may stand for all
        return False
    seen = torch.ones(queries, keys, dtype=torch.bool).tril().expand_as(mask)
    if mask.dtype == torch.bool:
        return mask.equal(seen)
    if not mask.is_floating_point():
        return False
    least = torch.finfo(mask.dtype).min
    return (mask == 0).equal(seen) and bool((mask <= least)[~seen].all())


def _tell(node: fx.Node, program: Program) -> None:
    """Let a call of attention be told that it is causal."""
    call = call_of(node, program.module)
    names = ("dropout_p", "scale", "enable_gqa")
    given = {name: call.get(name, None) for name in names}
    kept = {name: value for name, value in given.items() if value is not None}
    node.args = tuple(call.get(name) for name in ("query", "key", "value"))
    node.kwargs = {**kept, "is_causal": True}
