"""What a plan says of its step: when ranks do what, how fast it is, what limits it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gemsc.base.process import num_cores
from gemsc.base.units import show_flops, show_ranks, show_seconds
from gemsc.costs.hardware import DEFAULT_HARDWARE
from gemsc.errors import GemscError, InternalError
from gemsc.plan import Plan
from gemsc.schedules import Action, Kind, Task, Timeline, replay
from gemsc.schedules.paths import beside

SMALL = 0.03  # shares of the step below which nothing is worth changing
TRAINS = 3  # times the forward's operations: one for each of two gradients


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
    edges = tuple(replace(edge, seconds=0.0) for edge in task.edges)
    free = replay(replace(task, edges=edges), timeline.orders).makespan
    stages = [stage for _, stage in task.lanes[slowest_rank]]
    waited = sum(stage.talking_seconds for stage in plan.stages)
    talking = waited * plan.micro_batches / len(plan.members)
    costs = {
        "talking_seconds": talking,
        "imbalance_seconds": busy[slowest_rank] - mean,
        "fill_seconds": max(0.0, free - busy[slowest_rank]),
        "message_seconds": max(0.0, timeline.makespan - free),
    }
    slowest_stage = max(stages, key=lambda s: task.stages[s].forward)
    limit, advice = _limit(plan, costs, timeline.makespan, slowest_stage)
    return Explanation(
        slowest_ranks=show_ranks(plan.members[slowest_rank]),
        slowest_stage=slowest_stage,
        work_seconds=mean - talking,
        **costs,
        limit=limit,
        advice=advice,
    )


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


def _limit(
    plan: Plan, costs: dict[str, float], step: float, stage: int
) -> tuple[str, str]:
    """Return what costs most, and what would help."""
    name = max(costs, key=costs.__getitem__)
    share = costs[name] / step if step else 0.0
    if share < SMALL:
        return f"{1 - sum(costs.values()) / (step or 1.0):.0%} of the step is work", ""
    if name == "talking_seconds":
        return (
            f"messages and sums inside stages cost most, {share:.0%} of the step",
            "fewer ranks for each stage, or ranks that are closer, may help",
        )
    if name == "message_seconds":
        return (
            f"messages cost most, {share:.0%} of the step",
            "larger micro-batches, or cuts that fewer bytes cross, may help",
        )
    if name == "fill_seconds":
        more = "more --micro-batches help"
        if plan.schedule in ("basic", "mast", "master", "bidirectional"):
            more = "--schedule 1f1b overlaps micro-batches"
        return f"filling and draining the pipeline costs most, {share:.0%}", more
    blocks = plan.stages[stage].blocks
    edges = ((transfer.edge.source, transfer.edge.dest) for transfer in plan.transfers)
    others = beside(stage, len(plan.stages), edges)
    if plan.options.get("balance") == "explicit":
        advice = "without --blocks, --cuts and --placement gemsc chooses the stages"
    elif others:
        shown = " and ".join(map(str, others))
        advice = f"it runs beside stage {shown}; --placement joins light ones"
    elif len(blocks) == 1:
        advice = f"it is one block, {blocks[0]}, which cannot be cut"
    else:
        total = sum(len(planned.blocks) for planned in plan.stages)
        stages = len(plan.stages)
        advice = f"these {total} blocks cannot be balanced better over {stages} stages"
    return f"the imbalance costs most, {share:.0%} of the step", advice


def task_of(plan: Plan) -> Task:
    """Return what one copy of the model does in a step, and where."""
    per_replica = plan.micro_batches // plan.replicas
    return Task(
        stages=tuple(stage.cost for stage in plan.stages),
        edges=tuple(transfer.edge for transfer in plan.transfers),
        placement=tuple(map(tuple, plan.places)),
        micro_batches=(per_replica,) * plan.replicas,
        has_backward=any(str(Kind.BACKWARD) in row for row in plan.order),
        workspace_bytes=plan.workspace_bytes,
        whole_stages=plan.whole_stages,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Of all replicas together.

    `tokens_per_second` is 0 where samples are no words. `flops_per_second` counts the
    model's own operations: none for what is recomputed. `peak_share` is what that is of
    what the devices could do in `dtype`; 0 where the plan does not know, or it is more:
    a CPU's peak is that of its matrix products, and convolutions may need less of them.
    """

    samples_per_second: float
    tokens_per_second: float
    flops_per_second: float
    peak_share: float
    dtype: str

    def __str__(self) -> str:
        tokens = f" ({show_rate(self.tokens_per_second)} tokens/s)"
        share = f": {self.peak_share:.0%} of the devices' peak ({self.dtype})"
        return (
            f"{show_rate(self.samples_per_second)} samples/s"
            f"{tokens * bool(self.tokens_per_second)}, "
            f"{show_flops(self.flops_per_second)}/s{share * bool(self.peak_share)}"
        )


def speed(plan: Plan) -> Speed:
    """Return the predicted speed, the sums of gradients and the update included."""
    seconds = plan.step_seconds + plan.ending_seconds
    micro_batches = plan.data * plan.micro_batches
    samples = micro_batches * plan.micro_batch_size
    flops = TRAINS * micro_batches * sum(stage.flops for stage in plan.stages)
    rate = flops / seconds if seconds else 0.0
    devices = plan.ranks / (plan.per_device or 1)
    peak = devices * plan.peak_flops
    return Speed(
        samples_per_second=samples / seconds if seconds else 0.0,
        tokens_per_second=plan.tokens * samples / seconds if seconds else 0.0,
        flops_per_second=rate,
        peak_share=rate / peak if rate < peak else 0.0,
        dtype=plan.peak_dtype,
    )


def show_rate(count: float) -> str:
    """Return samples, tokens, ... per second, to three digits or a whole number."""
    return f"{count:,.0f}" if count >= 100 else f"{count:.3g}"
