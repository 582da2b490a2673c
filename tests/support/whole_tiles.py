"""Split stages as simply as can be: every tile computes all of every value."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from gemsc.base.boxes import everything
from gemsc.base.grid_shape import GridShape
from gemsc.ir import meta
from gemsc.ir.holder import with_graph
from gemsc.ir.layout import Layout
from gemsc.ir.program import Program
from gemsc.ir.shape_grid import ShapeGrid
from gemsc.messages.exchange import Exchange
from gemsc.passes.base import Pass
from gemsc.runtime.tiles import redistribute

__all__ = ["WholeTiles"]


@dataclass(frozen=True)
class WholeTiles(Pass):
    """What `SplitTiles` gives if no operation can be split."""

    grids: tuple[GridShape, ...]
    tile: int = 0
    training: bool = True
    rings: bool = False

    def apply(self, program: Program) -> Program:
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        stage_of = {n: s.index for s in program.require_stages() for n in s.nodes}
        joins: dict[tuple[fx.Node, int | None], fx.Node] = {}
        lists: list[list[fx.Node]] = [[] for _ in program.require_stages()]
        for node in program.graph.nodes:
            stage = stage_of.get(node)
            for source in node.all_input_nodes if stage is not None else ():
                origin = stage_of.get(source, stage)
                crosses = self.grids[origin] != self.grids[stage]
                if crosses and (source, stage) not in joins:
                    exchange = self._exchange(source, origin, stage)
                    grid = ShapeGrid(self.tile, len(exchange.wanted))
                    join = graph.call_function(
                        redistribute, (grid, mapping[source], exchange)
                    )
                    meta.copy_meta(source, join)
                    self._spread(join, stage)
                    joins[source, stage] = join
                    lists[stage].append(join)
            arrived = {n: joins.get((n, stage), mapping[n]) for n in mapping}
            mapping[node] = graph.node_copy(node, arrived.__getitem__)
            meta.copy_meta(node, mapping[node])
            if stage is not None:
                lists[stage].append(mapping[node])
                self._spread(mapping[node], stage)
        new = program.with_module(with_graph(program.module, graph))
        stages, blocks = [], []
        for stage_, nodes in zip(program.require_stages(), lists, strict=True):
            block = replace(stage_.blocks[0], index=stage_.index, nodes=tuple(nodes))
            blocks.append(block)
            stages.append(replace(stage_, blocks=(block,)))
        return replace(
            new,
            blocks=tuple(blocks),
            stages=tuple(stages),
            placement=program.placement,
        )

    def _spread(self, node: fx.Node, stage: int) -> None:
        if self.grids[stage] and len(meta.tensors(node)) == 1:
            shape = meta.spec(node).shape
            meta.layout.set(
                node, Layout(shape, (everything(shape),) * self.grids[stage].size)
            )

    def _exchange(self, node: fx.Node, source: int, dest: int) -> Exchange:
        shape = meta.spec(node).shape
        box = tuple((0, size) for size in shape)
        counts = self.grids[source].size, self.grids[dest].size
        held, wanted = ((box,) * count for count in counts)
        return Exchange(0, shape, held, wanted, arrives=True)
