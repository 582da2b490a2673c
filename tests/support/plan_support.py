"""Plans of any size that no model was compiled for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields, replace
from functools import partial
from typing import Any, TypeVar

from gemsc.compiler import Traced, plan, schedule_stages
from gemsc.options import CompileOptions
from gemsc.passes.manager import Runs
from gemsc.plan import Plan
from gemsc.plan_tables import PlannedStage, PlannedTransfer
from gemsc.planner.explain import timeline_of
from gemsc.schedules import SCHEDULES, Edge, StageCost, Task, run
from gemsc.search import auto
from gemsc.search.candidates import Candidate

__all__ = ["assess", "made_up_plan", "metered_peaks", "search"]

MIB = 2**20
T = TypeVar("T")


def search(traced: Traced, options: CompileOptions) -> tuple[Candidate, ...]:
    """Return what is compared for these options, best first."""
    candidates, _ = plan(traced, options)
    return candidates


def assess(
    traced: Traced, options: CompileOptions, *, every_tile: bool = True
) -> Candidate:
    """Return what is predicted for one choice."""
    stage = partial(schedule_stages, traced, run=Runs())
    return auto.assess(options, stage, every_tile=every_tile)


def metered_peaks(plan: Plan) -> list[int]:
    """Return the peaks without gradients on their way, which no meter sees."""
    names = [item.name for item in fields(StageCost) if "working" in item.name]
    nothing = dict.fromkeys(names, 0)
    stages = [
        replace(stage, cost=replace(stage.cost, **nothing)) for stage in plan.stages
    ]
    return list(timeline_of(replace(plan, stages=stages)).peak_bytes)


def made_up_plan(
    num_ranks: int = 4,
    micro_batches: int = 8,
    *,
    seconds: Sequence[float] = (),
    message_seconds: float = 0.0,
    schedule: str = "1f1b",
    num_blocks: int = 2,
) -> Plan:
    """Return the plan of a chain, one stage a rank; `seconds` are their forwards."""
    forwards = list(seconds) or [0.01] * num_ranks
    stages = tuple(StageCost(f, 2 * f, saved_bytes=MIB) for f in forwards)
    edges = tuple(
        Edge(s, s + 1, message_seconds, MIB, True, MIB, MIB)
        for s in range(num_ranks - 1)
    )
    task = Task(stages, edges, (tuple(range(num_ranks)),), (micro_batches,))
    timeline = run(task, SCHEDULES[schedule].policy)
    return _filled(
        Plan,
        command="gemsc compile <model> & more",
        model="Made<Up>",
        times="made up",
        ranks=num_ranks,
        data=1,
        replicas=1,
        schedule=schedule,
        placement="linear",
        micro_batches=micro_batches,
        micro_batch_size=2,
        step_seconds=timeline.makespan,
        bubble=timeline.bubble,
        peak_bytes=list(timeline.peak_bytes),
        activation_bytes=list(timeline.peak_bytes),
        places=[list(row) for row in task.placement],
        stages=[
            _filled(
                PlannedStage,
                index=index,
                ranks=[index],
                blocks=[f"layer{index}.block{b}" for b in range(num_blocks)],
                flops=10**9,
                parameter_bytes=MIB,
                cost=cost,
            )
            for index, cost in enumerate(stages)
        ],
        transfers=[
            _filled(
                PlannedTransfer,
                index=index,
                values=["<value>"],
                num_bytes=edge.num_bytes,
                edge=edge,
            )
            for index, edge in enumerate(edges)
        ],
        skips=[
            {
                "value": f"skip{index}",
                "source": "layer0.block0",
                "dest": f"layer{index}.block0",
                "num_bytes": MIB,
                "kind": "sent once",
            }
            for index in range(2, min(num_ranks, 300))
        ],
        order=[" ".join(map(str, order)) for order in timeline.orders],
    )


def _filled(kind: type[T], **values: Any) -> T:
    """Return the dataclass; what is not given is empty or zero."""
    empty = {
        **{"str": "", "int": 0, "float": 0.0, "list": [], "dict": {}, "bool": False},
        **{"StageCost": StageCost(0.0, 0.0), "Edge": Edge(0, 1)},
    }
    for item in fields(kind):  # type: ignore[arg-type]
        if item.default is MISSING and item.default_factory is MISSING:
            values.setdefault(item.name, empty[str(item.type).split("[")[0]])
    return kind(**values)
