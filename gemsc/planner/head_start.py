"""A head start for gradients: the last backward of a step sends before it is done.

    rank 0   .       .       0B3 --           rank 0   .      0B3 --
    rank 1   1B3 inputs and  ^                rank 1   1B3    ^ weights
                  weights ---'                         inputs-'

A rank that has nothing left to do but to wait for these gradients begins earlier by the
time of the weight gradients (the cheap part of Qi et al. 2023, "Zero Bubble Pipeline
Parallelism"; `zb-h1` does it for all micro-batches). With one micro-batch in a step all
ranks wait so, one after the other. What weight gradients need stays a little longer, so
it is done only as far as that does not raise the peak of the fullest rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import fx

from gemsc.ir import meta
from gemsc.ir.opaque import opaque_of
from gemsc.ir.program import Program, Stage
from gemsc.planner.activations import activations
from gemsc.planner.memory import stage_weights
from gemsc.schedules import Action, HeadStart, Kind, Task, Timeline, replay

__all__ = ["HeadStarts", "with_head_starts"]

LEVELS = 8


@dataclass
class HeadStarts:
    """What the last backward of each stage of a program can have."""

    program: Program
    known: dict[int, dict[int, HeadStart]] = field(default_factory=dict)

    def of(self, stage: int, level: int) -> HeadStart | None:
        """Return it with so many eighths of the layers, those nearest to the inputs.

        These come last in the backward: less is held besides than of others.
        """
        if level not in self.known:
            self.known[level] = self._find(level)
        return self.known[level].get(stage)

    def _find(self, level: int) -> dict[int, HeadStart]:
        chosen = {
            stage.index: _first(stage, level)
            for stage in self.program.require_stages()
            if _may(self.program, stage)
        }
        waiting = {node for nodes in chosen.values() for node in nodes}
        saved = activations(self.program, waiting=waiting)
        weights = stage_weights(self.program)
        found = {}
        for index, nodes in chosen.items():
            kept = saved[index]
            left = kept.waiting - kept.kept  # when only weight gradients are to be done
            facts = [meta.facts(node) for node in nodes]
            if nodes:
                found[index] = HeadStart(
                    sum(each.weight_seconds for each in facts),
                    max(kept.transient, left),
                    max(kept.first_transient, left + weights[index].gradients),
                    sum(each.num_weighted for each in facts),
                )
        return found


def _may(program: Program, stage: Stage) -> bool:
    """Whether the planner knows what waits.

    Stages on tiles go in step; what recomputed or offloaded blocks keep is theirs; what
    a module does that is not looked into is its own.
    """
    placement = program.placement
    assert placement is not None
    return (
        not placement.grid(stage.index)
        and not program.segments_of(stage.index)
        and not any(
            opaque_of(program.module.get_submodule(str(node.target)))
            for node in stage.nodes
            if node.op == "call_module"
        )
    )


def _first(stage: Stage, level: int) -> list[fx.Node]:
    """Return so many eighths of a stage's weighted nodes, from its inputs on."""
    nodes = [node for node in stage.nodes if meta.facts(node).num_weighted]
    return nodes[: len(nodes) * level // LEVELS]


def with_head_starts(
    task: Task, timeline: Timeline, possible: HeadStarts
) -> tuple[Task, Timeline]:
    """Give a head start to stages for whose gradients an idle rank waits.

    With fewer layers, or not, where it would make a rank the fullest. The order of
    actions stays.
    """
    if not task.has_backward or timeline.splits_backward:
        return task, timeline
    limit = max(*timeline.peak_bytes, task.memory_cap or 0)
    level = dict.fromkeys(range(len(task.stages)), LEVELS)
    while level := {s: eighths for s, eighths in level.items() if eighths}:
        stages = [
            replace(stage, head_start=possible.of(index, level.get(index, 0)))
            for index, stage in enumerate(task.stages)
        ]
        faster = replace(task, stages=tuple(stages))
        found = replay(faster, timeline.orders)
        used = _used(faster, found)
        full = {
            stage
            for rank, peak in enumerate(found.peak_bytes)
            for _, stage in task.lanes[rank]
            if peak > limit
        }
        if not full and used == level.keys():
            return faster, found
        level = {s: level[s] - (s in full) for s in used}
    return task, timeline


def _used(task: Task, timeline: Timeline) -> set[int]:
    """Return the stages before whose last backward's end another one has begun."""
    times = {timed.action: timed for rank in timeline.ranks for timed in rank}
    found = set()
    for replica, (ranks, count) in enumerate(
        zip(task.placement, task.micro_batches, strict=True)
    ):
        for edge in task.edges:
            if edge.gradient and ranks[edge.source] != ranks[edge.dest]:
                waits, sends = (
                    times[Action(Kind.BACKWARD, stage, count - 1, replica)]
                    for stage in (edge.source, edge.dest)
                )
                if waits.start < sends.end + edge.seconds:
                    found.add(edge.dest)
    return found
