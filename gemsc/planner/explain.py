"""Why this split: which rank is slowest, what the step consists of, what limits it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gemsc.base.process import num_cores
from gemsc.base.units import show_ranks, show_seconds
from gemsc.costs.hardware import DEFAULT_HARDWARE
from gemsc.plan import Plan
from gemsc.planner.from_plan import task_of, timeline_of
from gemsc.schedules import Task, Timeline, replay
from gemsc.schedules.paths import beside

SMALL = 0.03  # shares of the step below which nothing is worth changing


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A predicted step in parts that add up to it, and its slowest rank.

    `work_seconds` is what a rank computes on average, `talking_seconds` what it waits
    for other ranks of its stage, `imbalance_seconds` how much more
    the slowest rank computes; `message_seconds` is what the step would save if messages
    took no time; `fill_seconds` is the rest: what the slowest rank waits at the ends of
    the step, or for others in between. `advice` is what would help most.
    """

    slowest_ranks: str
    slowest_stage: int
    work_seconds: float
    talking_seconds: float = 0.0
    imbalance_seconds: float
    fill_seconds: float
    message_seconds: float
    limit: str
    advice: str

    @property
    def step_seconds(self) -> float:
        """All parts together."""
        return sum(seconds for _, seconds in self.parts)

    @property
    def parts(self) -> tuple[tuple[str, float], ...]:
        """The parts of the step with their names."""
        talking = (("sums inside stages", self.talking_seconds),)
        return (
            ("work", self.work_seconds),
            *(talking if self.talking_seconds else ()),
            ("imbalance", self.imbalance_seconds),
            ("filling and draining", self.fill_seconds),
            ("messages", self.message_seconds),
        )

    @property
    def imbalance(self) -> float:
        """How much longer than the average the slowest rank is busy, 0.12 for 12 %."""
        busy = self.work_seconds + self.talking_seconds
        return self.imbalance_seconds / busy if busy else 0.0

    @property
    def line(self) -> str:
        """All of it in one line."""
        return (
            f"stage {self.slowest_stage} on {self.slowest_ranks} is slowest, "
            f"{self.imbalance:.0%} above the average rank; {self.limit}"
            + (f": {self.advice}" if self.advice else "")
        )

    @property
    def parts_line(self) -> str:
        """The step as a sum of its parts."""
        total = self.step_seconds or 1.0
        shown = [
            f"{show_seconds(seconds)} {name} ({seconds / total:.0%})"
            for name, seconds in self.parts
        ]
        return f"{show_seconds(self.step_seconds)} = {' + '.join(shown)}"


def explain(plan: Plan) -> Explanation:
    """Return what a plan's predicted step consists of.

    Raises:
        GemscError: the plan's order cannot be carried out.
    """
    task, timeline = task_of(plan), timeline_of(plan)
    busy = [sum(t.end - t.start for t in actions) for actions in timeline.ranks]
    slowest_rank = max(range(len(busy)), key=busy.__getitem__)
    mean = sum(busy) / len(busy)
    free = _without_messages(task, timeline)
    stages = [stage for _, stage in task.lanes[slowest_rank]]
    talking = _talking(plan)
    parts = {
        "talking": talking,
        "imbalance": busy[slowest_rank] - mean,
        "fill": max(0.0, free - busy[slowest_rank]),
        "messages": max(0.0, timeline.makespan - free),
    }
    slowest_stage = max(stages, key=lambda s: task.stages[s].forward)
    limit, advice = _limit(plan, parts, timeline.makespan, slowest_stage)
    return Explanation(
        slowest_ranks=show_ranks(plan.members[slowest_rank]),
        slowest_stage=slowest_stage,
        work_seconds=mean - talking,
        talking_seconds=talking,
        imbalance_seconds=parts["imbalance"],
        fill_seconds=parts["fill"],
        message_seconds=parts["messages"],
        limit=limit,
        advice=advice,
    )


def _talking(plan: Plan) -> float:
    """Return what a rank waits in a step for others of its stage, on average."""
    each = sum(stage.talking_seconds for stage in plan.stages)
    return each * plan.micro_batches / len(plan.members)


def seconds_here(plan: Plan) -> tuple[float, int] | None:
    """Return how long a step takes at least on the cores that are here; their count.

    The prediction gives each rank a core of its own; fewer have the same work to do.
    None where there are enough, and where the plan is for another machine.
    """
    cores = num_cores()
    is_elsewhere = plan.options.get("hardware") not in (None, "", DEFAULT_HARDWARE)
    if is_elsewhere or plan.ranks <= cores:
        return None
    rows = zip(timeline_of(plan).ranks, plan.members, strict=True)
    work = sum((t.end - t.start) * len(ranks) for row, ranks in rows for t in row)
    return max(plan.step_seconds, plan.data * work / cores), cores


def _without_messages(task: Task, timeline: Timeline) -> float:
    """Return the time of the same order if nothing took time to travel."""
    edges = tuple(replace(edge, seconds=0.0) for edge in task.edges)
    return replay(replace(task, edges=edges), timeline.orders).makespan


def _limit(
    plan: Plan, parts: dict[str, float], step: float, stage: int
) -> tuple[str, str]:
    """Return what costs most, and what would help."""
    name = max(parts, key=parts.__getitem__)
    share = parts[name] / step if step else 0.0
    if share < SMALL:
        return f"{1 - sum(parts.values()) / (step or 1.0):.0%} of the step is work", ""
    if name == "talking":
        return (
            f"messages and sums inside stages cost most, {share:.0%} of the step",
            "fewer ranks for each stage, or ranks that are closer, may help",
        )
    if name == "messages":
        return (
            f"messages cost most, {share:.0%} of the step",
            "larger micro-batches, or cuts that fewer bytes cross, may help",
        )
    if name == "fill":
        more = "more --micro-batches help"
        if plan.schedule in ("basic", "mast", "master", "bidirectional"):
            more = "--schedule 1f1b overlaps micro-batches"
        return f"filling and draining the pipeline costs most, {share:.0%}", more
    blocks = plan.stages[stage].blocks
    edges = ((each.edge.source, each.edge.dest) for each in plan.transfers)
    others = beside(stage, len(plan.stages), edges)
    if others:
        shown = " and ".join(map(str, others))
        advice = f"it runs beside stage {shown}; --placement joins light ones"
    elif len(blocks) == 1:
        advice = f"it is one block, {blocks[0]}, which cannot be cut"
    else:
        total = sum(len(each.blocks) for each in plan.stages)
        stages = len(plan.stages)
        advice = f"these {total} blocks cannot be balanced better over {stages} stages"
    return f"the imbalance costs most, {share:.0%} of the step", advice
