"""Prove the schedule of a program: see gemsc.schedules.check for what is proved."""

from __future__ import annotations

from gemsc.ir import meta
from gemsc.ir.flow import flow, owned_tensors, reductions
from gemsc.ir.program import Program
from gemsc.schedules import Task, Timeline
from gemsc.schedules.check import Channel, Reduction, Report, check

__all__ = ["prove"]


def prove(program: Program, task: Task, timeline: Timeline) -> Report:
    """Check each rank's actions against the program's transfers.

    What is sent is taken from the transfers, what is received from the edges of the
    graph that cross stages, so that one is checked against the other.

    Raises:
        InternalError: the schedule is wrong; names stage, micro-batch and user's line.
    """
    transfers = program.transfers or ()
    count = 1 + max((t.index for t in transfers), default=0)
    channels = []
    for replica in range(len(task.placement)):
        for transfer in transfers:
            tag = 2 * (replica * count + transfer.index)
            ends = (transfer.source, transfer.dest)
            signature = tuple(str(meta.spec(value)) for value in transfer.values)
            channels.append(Channel(tag, *ends, replica=replica, signature=signature))
            back = tuple(
                str(meta.spec(value))
                for value in transfer.values
                if meta.needs_gradient(value)
            )
            if back:
                channels.append(
                    Channel(
                        tag + 1, *ends[::-1], gradient=True, replica=replica,
                        signature=back,
                    )
                )  # fmt: skip
    return check(
        timeline.orders,
        channels,
        task.placement,
        task.micro_batches,
        saved_bytes=[stage.saved_bytes for stage in task.stages],
        resident_bytes=[stage.resident_bytes for stage in task.stages],
        memory_cap=task.memory_cap,
        has_backward=task.has_backward,
        reductions=_reductions(program, task),
        user_lines=lambda stage: _lines(program, stage),
    )


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
