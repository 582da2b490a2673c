"""Other graphs of a program: in another order, or with its blocks and stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import fx

from gemsc.ir import meta
from gemsc.ir.holder import with_graph
from gemsc.ir.program import Block, Program

__all__ = ["in_order", "keep_stages", "same_stages"]


def in_order(
    program: Program, order: Iterable[fx.Node]
) -> tuple[Program, dict[fx.Node, fx.Node]]:
    """Return the program with its nodes that compute in this order, and their copies.

    Nothing is known of the new graph; its nodes know what the old ones did.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    passive = [n for n in program.graph.nodes if n.op in ("placeholder", "get_attr")]
    for node in (*passive, *order, program.output):
        copies[node] = graph.node_copy(node, copies.__getitem__)
        meta.copy_meta(node, copies[node])
    return program.with_module(with_graph(program.module, graph)), copies


def keep_stages(
    program: Program,
    graph: fx.Graph,
    mapping: Mapping[fx.Node, fx.Node],
) -> Program:
    """Return the program on another graph, with its blocks, stages and barriers.

    `mapping` leads from the program's nodes to those of the graph.
    """
    new = program.with_module(with_graph(program.module, graph))
    barriers = tuple(replace(b, node=mapping[b.node]) for b in program.barriers)
    return same_stages(program, replace(new, barriers=barriers), mapping)


def same_stages(
    program: Program, other: Program, mapping: Mapping[fx.Node, fx.Node]
) -> Program:
    """Return another program with the blocks, stages and so on of the first.

    Nodes that `mapping` does not have are gone.
    """

    def moved(block: Block) -> Block:
        nodes = tuple(mapping[node] for node in block.nodes if node in mapping)
        return replace(block, nodes=nodes)

    stages = tuple(
        replace(stage, blocks=tuple(map(moved, stage.blocks)))
        for stage in program.require_stages()
    )
    blocks = tuple(block for stage in stages for block in stage.blocks)
    return replace(
        other,
        blocks=blocks,
        stages=stages,
        placement=program.placement,
        segments=program.segments,
    )
