"""A head start for gradients: the last backward of a step sends before it is done.

    rank 0   .       .       0B3 --           rank 0   .      0B3 --
    rank 1   1B3 inputs and  ^                rank 1   1B3    ^ weights
                  weights ---'                         inputs-'

A rank that has nothing left to do but to wait for these gradients begins earlier by the
time of the weight gradients (the cheap part of Qi et al. 2023, "Zero Bubble Pipeline
Parallelism"; `zb-h1` does it for all micro-batches). With one micro-batch in a step all
ranks wait so, one after the other. What weight gradients need stays a little longer, so
it is done only where that does not raise the peak of the fullest rank.
"""

from __future__ import annotations

from dataclasses import replace

from gemsc.ir import meta
from gemsc.ir.program import Program
from gemsc.planner.activations import activations
from gemsc.planner.memory import stage_weights
from gemsc.schedules import Action, HeadStart, Kind, Task, Timeline, replay

__all__ = ["HeadStarts", "head_starts", "with_head_starts"]

HeadStarts = dict[int, HeadStart]  # by stage


def head_starts(program: Program) -> HeadStarts:
    """Return what the last backward of each stage that may have one needs for it.

    Stages on tiles go in step, and what recomputed or offloaded blocks keep is theirs.
    """
    placement = program.placement
    assert placement is not None
    saved, weights = activations(program, split=True), stage_weights(program)
    found = {}
    for stage in program.require_stages():
        if placement.grid(stage.index) or program.segments_of(stage.index):
            continue
        if not any(meta.facts(node).waits for node in stage.nodes):
            continue
        kept = saved[stage.index]
        waiting = kept.waiting - kept.kept  # once all but weight gradients is done
        found[stage.index] = HeadStart(
            seconds=stage.total("weight_seconds"),
            transient_bytes=max(kept.transient, waiting),
            only_transient_bytes=max(
                kept.first_transient, waiting + weights[stage.index].gradients
            ),
        )
    return found


def with_head_starts(
    task: Task, timeline: Timeline, possible: HeadStarts
) -> tuple[Task, Timeline]:
    """Give a head start to stages for whose gradients an idle rank waits.

    Not to those whose rank would become the fullest by it. The order of actions stays.
    """
    if not task.has_backward or timeline.splits_backward:
        return task, timeline
    limit = max(*timeline.peak_bytes, task.memory_cap or 0)
    chosen = set(possible)
    while chosen:
        stages = [
            replace(stage, head_start=possible[index]) if index in chosen else stage
            for index, stage in enumerate(task.stages)
        ]
        faster = replace(task, stages=tuple(stages))
        found = replay(faster, timeline.orders)
        over = {rank for rank, peak in enumerate(found.peak_bytes) if peak > limit}
        useless = chosen - _used(faster, found)
        if not over and not useless:
            return faster, found
        chosen -= useless | {s for rank in over for _, s in task.lanes[rank]}
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
