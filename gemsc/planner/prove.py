"""Prove the schedule of a program: see gemsc.schedules.check for what is proved."""

from __future__ import annotations

from gemsc.ir import meta
from gemsc.ir.flow import flow, message_tag, owned_tensors, reductions
from gemsc.ir.program import Program
from gemsc.planner.tiles import most_bytes
from gemsc.schedules import Action, Kind, Task, Timeline
from gemsc.schedules.check import Channel, Reduction, Report, check

__all__ = ["prove"]


def prove(
    program: Program, evaluation: Program, task: Task, timeline: Timeline
) -> Report:
    """Check each rank's actions in training, then in evaluation.

    A grid of ranks counts as one: its ranks go in step. Of split stages the programs
    are those of the first tile.

    Returns:
        The figures of training (of evaluation if there is no loss).

    Raises:
        InternalError: the schedule is wrong; names stage, micro-batch and user's line.
    """
    both = (program, evaluation)
    total = sum(task.micro_batches)
    report = check(
        _evaluation_orders(task, total),
        _channels(evaluation, both, replicas=1),
        task.placement[:1],
        (total,),
        has_backward=False,
        user_lines=lambda stage: _lines(evaluation, stage),
    )
    if not task.has_backward:
        return report
    return check(
        timeline.orders,
        _channels(program, both, replicas=len(task.placement)),
        task.placement,
        task.micro_batches,
        saved_bytes=[stage.saved_bytes for stage in task.stages],
        transient_bytes=[stage.transient_bytes for stage in task.stages],
        first_transient_bytes=[s.first_transient_bytes for s in task.stages],
        gradient_bytes=[stage.gradient_bytes for stage in task.stages],
        resident_bytes=[stage.resident_bytes for stage in task.stages],
        waiting_bytes=[stage.kept_for_weights for stage in task.stages],
        waiting_gradient_bytes=[s.waiting_gradient_bytes for s in task.stages],
        head_starts=[stage.head_start for stage in task.stages],
        workspace_bytes=task.workspace_bytes,
        memory_cap=task.memory_cap,
        split_backward=timeline.splits_backward,
        reductions=_reductions(program, task),
        user_lines=lambda stage: _lines(program, stage),
    )


def _evaluation_orders(task: Task, total: int) -> list[list[Action]]:
    """Return what evaluation does: micro-batch by micro-batch, in the first replica."""
    row = task.placement[0]
    return [
        [
            Action(Kind.FORWARD, stage, m)
            for m in range(total)
            for stage, where in enumerate(row)
            if where == rank
        ]
        for rank in range(task.num_ranks)
    ]


def _channels(
    program: Program, both: tuple[Program, Program], *, replicas: int
) -> list[Channel]:
    channels = []
    for replica in range(replicas):
        for transfer in program.transfers or ():
            tag = message_tag(replica, transfer.index, *both)
            ends = (transfer.source, transfer.dest)
            there = tuple(str(meta.spec(value)) for value in transfer.values)
            back = tuple(
                str(meta.spec(value))
                for value in transfer.values
                if meta.needs_gradient(value)
            )
            size = most_bytes(program, transfer)
            channels.append(
                Channel(tag, *ends, replica=replica, signature=there, num_bytes=size)
            )
            if back and program is both[0]:
                channels.append(
                    Channel(
                        tag + 1, *ends[::-1], gradient=True, replica=replica,
                        signature=back, num_bytes=size,
                    )
                )  # fmt: skip
    return channels


def _reductions(program: Program, task: Task) -> list[Reduction]:
    found = []
    for name, stages in reductions(program, owned_tensors(program)).items():
        pairs = tuple((r, s) for r in range(len(task.placement)) for s in stages)
        ranks = frozenset(task.placement[replica][stage] for replica, stage in pairs)
        if len(ranks) > 1:
            found.append(Reduction(name, ranks, pairs))
    return found


def _lines(program: Program, stage: int) -> str:
    nodes = flow(program, stage, with_outputs=False).nodes
    places = [place for place in map(meta.location, nodes) if place is not None]
    return f"{places[0]} to {places[-1]}" if places else "no line of the user's"
