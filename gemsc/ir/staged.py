"""Copies of a graph that keep what is known of it: blocks, stages, barriers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from gemsc.ir import meta
from gemsc.ir.holder import with_graph
from gemsc.ir.program import Program

__all__ = ["copy_graph", "keep_stages"]


def copy_graph(program: Program) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Return a copy of the graph, and for each node its copy."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        mapping[node] = graph.node_copy(node, mapping.__getitem__)
        meta.copy_meta(node, mapping[node])
    return graph, mapping


def keep_stages(
    program: Program,
    graph: fx.Graph,
    mapping: Mapping[fx.Node, fx.Node],
    added: Mapping[int, tuple[fx.Node, ...]] | None = None,
) -> Program:
    """Return the program on another graph, with its blocks and stages.

    `mapping` leads from the nodes that are kept to the new ones; `added` are new nodes
    at the end of a stage.
    """
    new = program.with_module(with_graph(program.module, graph))
    added = added or {}
    blocks, stages = [], []
    for stage in program.require_stages():
        own = []
        for block in stage.blocks:
            nodes = tuple(mapping[node] for node in block.nodes if node in mapping)
            if block is stage.blocks[-1]:
                nodes += added.get(stage.index, ())
            own.append(replace(block, nodes=nodes))
        blocks += own
        stages.append(replace(stage, blocks=tuple(own)))
    barriers = tuple(
        replace(barrier, node=mapping[barrier.node])
        for barrier in program.barriers
        if barrier.node in mapping
    )
    return replace(
        new,
        blocks=tuple(blocks),
        stages=tuple(stages),
        placement=program.placement,
        barriers=barriers,
    )
