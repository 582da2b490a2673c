"""Other graphs with the blocks and stages of a program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from gemsc.ir.holder import with_graph
from gemsc.ir.program import Block, Program

__all__ = ["keep_stages", "same_stages"]


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
