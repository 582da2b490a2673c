"""What follows the backward of a step: sums of gradients over ranks, and the update.

The sum of a stage's gradients starts when its last backward is done everywhere. A rank
runs its sums one after the other, and they hide behind what it still computes. Where
ranks share the update, they bring together at the end what each has updated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from gemsc.costs.collectives import Sum, allreduce, reduce_scatter
from gemsc.costs.hardware import Device, Hardware, Network
from gemsc.ir.program import Program
from gemsc.schedules import Task, Timeline

__all__ = ["after_backward", "ends_of_sums", "gradient_sums", "update_seconds"]

# Bytes read and written for each byte of gradients: packed for the sum and unpacked;
# in the update of SGD with momentum (weight, gradient, momentum; weight, momentum).
PACKING = 4
UPDATE = 5


def after_backward(
    program: Program, task: Task, timeline: Timeline, copies: int, hardware: Hardware
) -> float:
    """Return the seconds from the last backward of a step to its end."""
    placement = program.placement
    assert placement is not None
    if not task.has_backward:
        return 0.0
    stages = program.require_stages()
    sizes = [stage.gradient_bytes for stage in task.stages]
    places = [
        {rank for row in placement.ranks for rank in row[stage.index]}
        for stage in stages
    ]
    sums = gradient_sums(
        hardware.network,
        places,
        sizes,
        placement.num_ranks,
        copies,
        shares_update=program.updated is not None,
    )
    ends = ends_of_sums(task, [timeline], sums, sizes, hardware.device)
    done = max(
        max((*(timed.end for timed in actions), ends[rank]), default=0.0)
        + update_seconds(task, rank, sizes, sums, hardware.device)
        for rank, actions in enumerate(timeline.ranks)
    )
    return done - timeline.makespan


def gradient_sums(
    network: Network,
    places: Sequence[Collection[int]],
    num_bytes: Sequence[int],
    num_ranks: int,
    copies: int,
    *,
    shares_update: bool = False,
) -> dict[int, Sum]:
    """Return the sum of each stage whose gradients several ranks hold.

    For each stage, `places` has the ranks of the first copy that hold it, `num_bytes`
    its gradients; each copy has `num_ranks` ranks. If it `shares_update`, each rank
    gets its part of the sum.
    """
    shared = {
        stage: [
            copy * num_ranks + place for copy in range(copies) for place in sorted(own)
        ]
        for stage, own in enumerate(places)
        if copies * len(own) > 1 and num_bytes[stage]
    }
    sizes = [num_bytes[stage] for stage in shared]
    find = reduce_scatter if shares_update else allreduce
    found = find(network, list(shared.values()), sizes)
    return dict(zip(shared, found, strict=True))


def ends_of_sums(
    task: Task,
    timelines: Sequence[Timeline],
    sums: Mapping[int, Sum],
    num_bytes: Sequence[int],
    device: Device,
) -> list[float]:
    """Return, for each rank of a copy, when its last sum is done."""
    ready = dict.fromkeys(sums, 0.0)
    for timeline in timelines:
        for actions in timeline.ranks:
            for timed in actions:
                stage = timed.action.stage
                if stage in ready:
                    ready[stage] = max(ready[stage], timed.end)
    free = [0.0] * task.num_ranks
    for stage in sorted(sums, key=ready.__getitem__):
        places = {row[stage] for row in task.placement}
        start = max(ready[stage], *(free[place] for place in places))
        packing = PACKING * num_bytes[stage] / device.memory_bandwidth
        for place in places:
            free[place] = start + packing + sums[stage].seconds
    return free


def update_seconds(
    task: Task,
    rank: int,
    num_bytes: Sequence[int],
    sums: Mapping[int, Sum],
    device: Device,
) -> float:
    """Return the seconds in which a rank updates the weights of its stages.

    With those in which it gets what other ranks have updated.
    """
    total = 0.0
    for stage in {stage for _, stage in task.lanes[rank]}:
        one = sums.get(stage)
        shared = one.updaters if one is not None else 1
        total += UPDATE * num_bytes[stage] / shared / device.memory_bandwidth
        total += one.gather if one is not None else 0.0
    return total
