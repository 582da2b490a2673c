"""What the tests of the schedules share: random tasks, and their channels."""

from __future__ import annotations

import random

from gemsc.schedules import Edge, Schedule, StageCost, Task, Timeline, place
from gemsc.schedules.check import check
from gemsc.schedules.messages import Channel, Reduction


def channels_of(task: Task) -> list[Channel]:
    """Return one channel for each edge and replica, another for its gradients."""
    channels: list[Channel] = []
    for replica in range(len(task.placement)):
        for e in task.edges:
            channels.append(
                Channel(
                    len(channels),
                    e.source,
                    e.dest,
                    False,
                    replica,
                    ("x",),
                    e.num_bytes,
                )
            )
            if e.gradient and task.has_backward:
                channels.append(
                    Channel(
                        len(channels),
                        e.dest,
                        e.source,
                        True,
                        replica,
                        ("x",),
                        e.num_bytes,
                    )
                )
    return channels


def reductions_of(task: Task) -> list[Reduction]:
    """Return a group for each stage that several replicas have."""
    replicas = range(len(task.placement))
    if len(replicas) == 1:
        return []
    return [
        Reduction(
            f"stage{stage}",
            frozenset(task.placement[replica][stage] for replica in replicas),
            tuple((replica, stage) for replica in replicas),
        )
        for stage in range(len(task.stages))
    ]


def equal_task(
    schedule: Schedule, num_ranks: int, num_micro_batches: int, *, chunks: int = 1
) -> Task:
    """Return equal stages, B = 2F, a rank's micro-batch taking 3 seconds."""
    stages = num_ranks * chunks
    cost = StageCost(1 / chunks, 2 / chunks, 1 / chunks)
    replicas = schedule.num_replicas
    return Task.chain(
        (cost,) * stages,
        (num_micro_batches // replicas,) * replicas,
        placement=place(schedule.placement, stages, num_ranks, replicas),
    )


def random_task(
    schedule: Schedule,
    seed: int,
    *,
    kind: str | None = None,
    has_backward: bool = True,
    capped: bool = False,
) -> Task:
    """Return uneven stages, skips over stages, any number of micro-batches."""
    rng = random.Random(seed)
    ranks = rng.choice([1, 2, 3, 4, 6])
    stages = ranks * rng.choice([1, 1, 2, 3])
    costs = tuple(
        StageCost(
            forward := rng.uniform(0.1, 2.0),
            forward * rng.uniform(1.0, 3.0),
            forward * rng.uniform(0.0, 1.0),
            rng.randint(0, 9),
            rng.randint(0, 5),
        )
        for _ in range(stages)
    )
    edges = tuple(
        Edge(a, b, rng.choice([0.0, 0.1, 1.0]), 8, rng.random() < 0.8)
        for a in range(stages)
        for b in range(a + 1, stages)
        if (b == a + 1 and rng.random() < 0.9) or rng.random() < 0.1
    )
    replicas = schedule.num_replicas
    placement = place(kind or schedule.placement, stages, ranks, replicas)
    micro_batches = tuple(rng.randint(1, 9) for _ in range(replicas))
    task = Task(costs, edges, placement, micro_batches, has_backward)
    if not capped:
        return task
    cap = least_memory(task) + rng.choice([0, 3, 20])
    return Task(costs, edges, placement, micro_batches, has_backward, cap)


def least_memory(task: Task) -> int:
    """Return the bytes that the fullest rank needs for one micro-batch."""
    return max(
        task.fixed_bytes(rank)
        + max(
            sum(task.stages[s].saved_bytes for r, s in lanes if r == replica)
            for replica in range(len(task.placement))
        )
        for rank, lanes in enumerate(task.lanes)
    )


def prove(task: Task, schedule: Schedule, timeline: Timeline) -> None:
    """Check a schedule; the checker's own figures are those of the timeline."""
    report = check(
        timeline.orders,
        channels_of(task),
        task.placement,
        task.micro_batches,
        saved_bytes=[stage.saved_bytes for stage in task.stages],
        transient_bytes=[stage.transient_bytes for stage in task.stages],
        first_transient_bytes=[s.first_transient_bytes for s in task.stages],
        gradient_bytes=[stage.gradient_bytes for stage in task.stages],
        resident_bytes=[stage.resident_bytes for stage in task.stages],
        head_starts=[stage.head_start for stage in task.stages],
        memory_cap=task.memory_cap,
        has_backward=task.has_backward,
        split_backward=schedule.policy.split_backward,
        reductions=reductions_of(task),
    )
    assert report.peak_bytes == timeline.peak_bytes
    assert report.peak_live == timeline.peak_live
