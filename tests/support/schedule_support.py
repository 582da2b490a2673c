"""What the tests of the schedules share: random tasks, and what their ranks do."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from gemsc.schedules import (
    Action,
    Edge,
    Kind,
    Policy,
    Schedule,
    StageCost,
    Task,
    Timeline,
    place,
)
from gemsc.schedules.check import prove
from gemsc.schedules.rank_step import (
    AllReduce,
    End,
    Event,
    MessageEnd,
    RankStep,
    StageRun,
    Step,
    Turn,
    order_of,
)

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
    ranks = []
    for rank, order in enumerate(orders):
        rank_sums = [entry for entry in sums if rank in entry.ranks]
        ends: list[Step] = [*rank_sums, End.REDUCED, End.UPDATED]
        steps = (*order, *(ends if task.has_backward else ()))
        deferred = frozenset(a for a in order if a.kind is Kind.WEIGHT)
        ranks.append(RankStep(rank, runs, steps, (rank,), deferred))
    return ranks


def run_of(task: Task, kind: Kind, replica: int, stage: int) -> StageRun:
    """Return what one stage sends and receives for each micro-batch."""

    row = task.placement[replica]
    back = kind is Kind.BACKWARD
    taken, given = [], []
    for index, e in enumerate(task.edges if kind is not Kind.WEIGHT else ()):
        tag = 2 * (replica * len(task.edges) + index) + back
        source, dest = (e.dest, e.source) if back else (e.source, e.dest)
        if stage == dest and (e.gradient or not back):
            taken.append(MessageEnd(row[source], tag, ("x",)))
        if stage == source and (e.gradient or not back):
            given.append(MessageEnd(row[dest], tag, ("x",)))
    return StageRun(tuple(taken), tuple(given))


def in_order(ranks: Sequence[RankStep], task: Task) -> list[RankStep]:
    """Return the ranks with the order in which their communication begins."""
    orders = order_of(ranks)
    return [
        replace(rank, order=tuple(turn_of(rank, event) for event in order))
        for rank, order in zip(ranks, orders, strict=True)
    ]


def turn_of(rank: RankStep, event: Event) -> Turn:
    name, what = event
    if isinstance(what, AllReduce):
        return Turn(collective=what.group)
    assert isinstance(what, tuple)
    place, which = what
    if name == "together":
        return Turn(collective=(which.replica, which.stage))
    source, dest, tag = place
    if source == rank.rank:
        return Turn(sends=(MessageEnd(dest, tag),))
    return Turn(receives=(MessageEnd(source, tag),))


def shared_by(task: Task) -> dict[str, tuple[int, ...]]:
    """Return whose parameters are whose: each stage has its own."""
    return {f"stage{stage}": (stage,) for stage in range(len(task.stages))}


def chain_of(
    stages: Sequence[StageCost],
    micro_batches: Sequence[int],
    *,
    placement: Sequence[Sequence[int]] | None = None,
    seconds: float = 0.0,
    skips: Sequence[Edge] = (),
    has_backward: bool = True,
    memory_cap: int | None = None,
) -> Task:
    """Return the task of a row of stages, by default each on a rank of its own."""
    links = [Edge(s, s + 1, seconds) for s in range(len(stages) - 1)]
    ranks = placement or [range(len(stages))] * len(micro_batches)
    return Task(
        tuple(stages),
        (*links, *skips),
        tuple(tuple(replica) for replica in ranks),
        tuple(micro_batches),
        has_backward,
        memory_cap,
    )


def equal_task(
    schedule: Schedule, num_ranks: int, num_micro_batches: int, *, chunks: int = 1
) -> Task:
    """Return equal stages, B = 2F, a rank's micro-batch taking 3 seconds."""
    stages = num_ranks * chunks
    cost = StageCost(1 / chunks, 2 / chunks, 1 / chunks)
    replicas = schedule.num_replicas
    return chain_of(
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
            saved := rng.randint(0, 9),
            rng.randint(0, 5),
            waiting_bytes=saved,
            split_transient_bytes=(more := rng.randint(0, 20)),
            first_split_transient_bytes=more,
            working_bytes=(most := rng.randint(0, 9)),
            first_working_bytes=most,
            split_working_bytes=most,
            first_split_working_bytes=most,
            weight_working_bytes=rng.randint(0, 4),
        )
        for _ in range(stages)
    )
    edges = tuple(
        Edge(a, b, rng.choice([0.0, 0.1, 1.0]), 8, rng.random() < 0.8, 8, 8)
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
    cap = least_memory(task, schedule.policy) + rng.choice([0, 3, 20])
    return Task(costs, edges, placement, micro_batches, has_backward, cap)


def least_memory(task: Task, policy: Policy) -> int:
    """Return the bytes that the fullest rank needs for one micro-batch."""
    return max(
        task.fixed_bytes(rank, split=policy.split_backward)
        + max(
            sum(task.stages[s].saved_bytes for r, s in lanes if r == replica)
            for replica in range(len(task.placement))
        )
        for rank, lanes in enumerate(task.lanes)
    )


def proved(task: Task, timeline: Timeline) -> None:
    """Prove a schedule; a simpler count of what is held finds the same peaks."""
    ranks = in_order(ranks_of(task, timeline.orders), task)
    prove(ranks, task, shared=shared_by(task))
    peaks = [peaks_of(task, rank, o) for rank, o in enumerate(timeline.orders)]
    assert tuple(most for most, _ in peaks) == timeline.peak_bytes
    assert tuple(live for _, live in peaks) == timeline.peak_live


def peaks_of(task: Task, rank: int, order: Sequence[Action]) -> tuple[int, int]:
    """Return the most bytes that a rank holds, and the most forwards in flight.

    Counted without times: what is there after each action, and what comes on top of
    what was there before while it runs.
    """
    held = task.resident_bytes(rank)
    most, most_live, live = held, 0, 0
    gradients: dict[int, int] = {}
    posted: dict[tuple[Kind, int, int], int] = {}
    alive: dict[Action, int] = {}
    actions = set(order)
    for action in order:
        stage, key = task.stages[action.stage], replace(action, kind=Kind.FORWARD)
        split = replace(action, kind=Kind.WEIGHT) in actions
        held -= sum(posted.values())
        posted[action.kind, action.replica, action.stage] = posted_at(task, action)
        held += sum(posted.values())
        live += action.kind is Kind.FORWARD
        most_live = max(most_live, live)
        before = gradients.get(action.stage, 0)
        meanwhile, stays, there = 0, 0, before
        if action.kind is Kind.FORWARD:
            meanwhile = stage.saved_bytes
            stays = meanwhile if task.has_backward else 0
        elif action.kind is Kind.WEIGHT:
            there = stage.gradient_bytes
            meanwhile = there - before or stage.weight_working_bytes
        else:
            first = action.stage not in gradients
            meanwhile = needed(stage, "first_" * first + "split_" * split)
            stays = stage.waiting_bytes if split else 0
            waiting = stage.waiting_gradient_bytes if split else 0
            there = max(before, stage.gradient_bytes - waiting)
        if action.kind is not Kind.FORWARD:
            gradients[action.stage] = there
        now = held + meanwhile
        held += there - before + stays - alive.pop(key, 0)
        alive[key] = stays
        most = max(most, now, held)
        live -= action.kind is (Kind.WEIGHT if split else task.kinds[:2][-1])
    return most, most_live


def needed(stage: StageCost, which: str) -> int:
    """Return what a backward needs on top of what is saved."""
    names = f"{which}transient_bytes", f"{which}working_bytes"
    return sum(getattr(stage, name) for name in names)


def posted_at(task: Task, action: Action) -> int:
    """Return the bytes of the receives that are posted once an action begins."""
    if task.is_last(action) or action.kind is Kind.WEIGHT:
        return 0
    values, gradients = task.posted[action.replica][action.stage]
    return values if action.kind is Kind.FORWARD else gradients
