"""From a plan back to the scheduler's task: predicted times without the model."""

from __future__ import annotations

from collections import Counter

from gemsc.errors import GemscError, InternalError
from gemsc.plan import Plan
from gemsc.schedules import (
    Action,
    Edge,
    Kind,
    StageCost,
    Task,
    Timeline,
    replay,
)

__all__ = ["task_of", "timeline_of"]

HELP = "compile again to rewrite it"


def task_of(plan: Plan) -> Task:
    """Return what one copy of the model does in a step, and where.

    Placement and micro-batches are read off the order of the ranks, which says all of
    it: rank 1 does `2F0'`, so stage 2 of replica 1 is there.

    Raises:
        GemscError: the order names stages that do not exist, or leaves some out.
    """
    places: dict[tuple[int, int], int] = {}
    forwards: Counter[tuple[int, int]] = Counter()
    for rank, actions in enumerate(_orders(plan)):
        for action in actions:
            lane = (action.replica, action.stage)
            if places.setdefault(lane, rank) != rank:
                raise _damaged(f"{action} is on two ranks")
            forwards[lane] += action.kind is Kind.FORWARD
    wanted = {(r, s) for r in range(plan.replicas) for s in range(len(plan.stages))}
    if set(places) != wanted:
        replica, stage = min(wanted ^ set(places))
        raise _damaged(f"its order does not fit stage {stage} of replica {replica}")
    stages = range(len(plan.stages))
    return Task(
        stages=tuple(
            StageCost(
                forward=stage.forward_seconds,
                backward=stage.backward_seconds,
                saved_bytes=stage.saved_bytes,
                resident_bytes=stage.resident_bytes,
                transient_bytes=stage.transient_bytes,
                first_transient_bytes=stage.first_transient_bytes,
                gradient_bytes=stage.gradient_bytes,
                weight=stage.weight_seconds,
                waiting_bytes=stage.waiting_bytes,
                waiting_gradient_bytes=stage.waiting_gradient_bytes,
                split_transient_bytes=stage.split_transient_bytes,
                first_split_transient_bytes=stage.first_split_transient_bytes,
            )
            for stage in plan.stages
        ),
        edges=tuple(
            Edge(
                t.source,
                t.dest,
                t.seconds,
                t.most_bytes,
                t.gradient,
                t.value_bytes,
                t.gradient_bytes,
            )
            for t in plan.transfers
        ),
        placement=tuple(
            tuple(places[replica, stage] for stage in stages)
            for replica in range(plan.replicas)
        ),
        micro_batches=tuple(forwards[replica, 0] for replica in range(plan.replicas)),
        workspace_bytes=plan.workspace_bytes,
        has_backward=any(
            action.kind is Kind.BACKWARD for row in _orders(plan) for action in row
        ),
    )


def timeline_of(plan: Plan) -> Timeline:
    """Return when each rank of one copy does what, as predicted.

    Raises:
        GemscError: the order cannot be carried out.
    """
    try:
        return replay(task_of(plan), _orders(plan))
    except (InternalError, KeyError) as error:
        raise _damaged(str(error)) from None


def _orders(plan: Plan) -> list[list[Action]]:
    try:
        return [[Action.parse(word) for word in row.split()] for row in plan.order]
    except ValueError as error:
        raise _damaged(str(error)) from None


def _damaged(why: str) -> GemscError:
    return GemscError(f"plan.toml is damaged: {why}", help=HELP)
