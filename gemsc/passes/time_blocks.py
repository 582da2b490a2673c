"""Time blocks: put measured seconds in the place of predicted ones.

Example, a block of two nodes predicted at 2 + 1 ms and measured at 4.5 ms:
    %conv 2 ms  %relu 1 ms        # before
    %conv 3 ms  %relu 1.5 ms      # after: its nodes share what the block takes
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from gemsc.base.dtypes import CHANNELS_LAST, format_of
from gemsc.base.units import show_seconds
from gemsc.costs.profile import BlockTimes, Progress, time_nodes
from gemsc.ir import meta
from gemsc.ir.holder import copied_graph
from gemsc.ir.program import Block, Program
from gemsc.ir.staged import moved
from gemsc.passes.base import Pass

WORTH_IT = 0.1  # of the blocks' seconds: another option is named that saves as much


@dataclass(frozen=True, eq=False)
class TimeBlocks(Pass):
    """Run each block on real tensors, forward and backward (`compile --profile`)."""

    requires = ("facts", "blocks")

    inputs: Any = field(default=(), repr=False)
    target: Any = field(default=None, repr=False)
    device: torch.device | None = None
    rounds: int = 5
    progress: Progress = field(default=lambda name, share: None, repr=False)

    def apply(self, program: Program) -> Program:
        """Return the program with measured seconds on the nodes (of a copied graph)."""
        blocks, times = program.blocks or (), self._times(program)
        notes = self._faster_format(program, sum(map(_seconds, times)))
        graph, copies = copied_graph(program.graph)
        for block, measured in zip(blocks, times, strict=True):
            _share(block, measured, copies)
        timed = moved(program, graph, copies)
        return replace(timed, notes=(*program.notes, *notes))

    def _times(self, program: Program, **how: Any) -> list[BlockTimes]:
        given = program, program.blocks or (), self.inputs, self.target
        how = {"rounds": self.rounds, "progress": self.progress, **how}
        return time_nodes(*given, device=self.device, **how)

    def _faster_format(self, program: Program, seconds: float) -> list[str]:
        """Say what weights in `channels_last` would save, if that is worth it."""
        weights = [p for p in program.module.parameters() if p.dim() in CHANNELS_LAST]
        formats = {format_of(weight) for weight in weights}
        if formats != {torch.contiguous_format}:
            return []
        last = sum(map(_seconds, self._times(program, memory_format="channels_last")))
        if last > (1 - WORTH_IT) * seconds:
            return []
        return [
            f"with --memory-format channels_last the blocks take {show_seconds(last)} "
            f"where they take {show_seconds(seconds)}"
        ]


def _seconds(times: BlockTimes) -> float:
    return times.forward + times.backward


def _share(block: Block, times: BlockTimes, copies: dict[fx.Node, fx.Node]) -> None:
    """Give each node its part of the block's seconds, in proportion to predictions."""
    whole_forward = block.total("forward_seconds")
    whole_backward = block.total("backward_seconds")
    for node in block.nodes:
        facts = meta.facts(node)
        even = 1 / len(block.nodes)
        forward = facts.forward_seconds / whole_forward if whole_forward else even
        backward = facts.backward_seconds / whole_backward if whole_backward else even
        meta.facts.set(
            copies[node],
            replace(
                facts,
                forward_launches=0.0,
                backward_launches=0.0,
                forward_seconds=times.forward * forward,
                backward_seconds=times.backward * backward,
            ),
        )
