"""What the tests of the schedules share: random tasks, and what their ranks do."""

from __future__ import annotations

import random
from collections.abc import Sequence

from gemsc.schedules import (
    Action,
    Edge,
    Kind,
    Schedule,
    StageCost,
    Task,
    Timeline,
    place,
)
from gemsc.schedules.action import splits_backward
from gemsc.schedules.check import prove
from gemsc.schedules.rank_step import AllReduce, End, Message, RankStep, Run, Step

Orders = Sequence[Sequence[Action]]


def ranks_of(task: Task, orders: Orders) -> list[RankStep]:
    """Return what ranks with these orders do: what a stage gives is sent at once.

    Each edge has a tag for each replica, and one for its gradients. Gradients are added
    up at the end.
    """
    runs = {
        (kind, replica, stage): run_of(task, kind, replica, stage)
        for kind in Kind
        for replica in range(len(task.placement))
        for stage in range(len(task.stages))
    }
    sums = [
        AllReduce(f"stage{stage}", places)
        for stage in reversed(range(len(task.stages)))
        if len(places := tuple(sorted({row[stage] for row in task.placement}))) > 1
    ]
    split = splits_backward(orders)
    ranks = []
    for rank, order in enumerate(orders):
        own = [each for each in sums if rank in each.ranks]
        ends: list[Step] = [*own, End.REDUCED, End.UPDATED]
        steps = (*order, *(ends if task.has_backward else ()))
        ranks.append(RankStep(rank, runs, steps, (rank,), split))
    return ranks


def run_of(task: Task, kind: Kind, replica: int, stage: int) -> Run:
    """Return what one stage sends and receives for each micro-batch."""

    row = task.placement[replica]
    back = kind is Kind.BACKWARD
    taken, given = [], []
    for index, e in enumerate(task.edges if kind is not Kind.WEIGHT else ()):
        tag = 2 * (replica * len(task.edges) + index) + back
        source, dest = (e.dest, e.source) if back else (e.source, e.dest)
        if stage == dest and (e.gradient or not back):
            taken.append(Message(row[source], tag, ("x",)))
        if stage == source and (e.gradient or not back):
            given.append(Message(row[dest], tag, ("x",)))
    return Run(tuple(taken), tuple(given))


def shared_by(task: Task) -> dict[str, tuple[int, ...]]:
    """Return whose parameters are whose: each stage has its own."""
    return {f"stage{stage}": (stage,) for stage in range(len(task.stages))}


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


def proved(task: Task, timeline: Timeline) -> None:
    """Prove a schedule; the proof's own figures are those of the timeline."""
    ranks = ranks_of(task, timeline.orders)
    report = prove(ranks, task, shared=shared_by(task))
    assert report.peak_bytes == timeline.peak_bytes
    assert report.peak_live == timeline.peak_live
