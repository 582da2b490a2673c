"""From a plan back to the scheduler's task: predicted times without the model."""

from __future__ import annotations

from gemsc.errors import GemscError, InternalError
from gemsc.plan import Plan
from gemsc.schedules import Action, Kind, Task, Timeline, replay


def task_of(plan: Plan) -> Task:
    """Return what one copy of the model does in a step, and where."""
    each = plan.micro_batches // plan.replicas
    return Task(
        stages=tuple(stage.cost for stage in plan.stages),
        edges=tuple(transfer.edge for transfer in plan.transfers),
        placement=tuple(map(tuple, plan.places)),
        micro_batches=(each,) * plan.replicas,
        has_backward=any(str(Kind.BACKWARD) in row for row in plan.order),
        workspace_bytes=plan.workspace_bytes,
    )


def timeline_of(plan: Plan) -> Timeline:
    """Return when each rank of one copy does what, as predicted.

    Raises:
        GemscError: the order cannot be carried out.
    """
    try:
        orders = [[Action.parse(word) for word in row.split()] for row in plan.order]
        return replay(task_of(plan), orders)
    except (InternalError, KeyError, ValueError) as error:
        raise GemscError(
            f"plan.toml is damaged: {error}", help="compile again to rewrite it"
        ) from None
