"""What follows the backward of a step: sums of gradients over ranks, and the update.

The sums of a stage's gradients start in its last backward everywhere, bucket by bucket.
A rank runs its sums one after the other, and they hide behind what it still computes.
Where ranks share the update, they bring together at the end what each has updated.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from gemsc.costs.collectives import BUCKET_BYTES, Sum, allreduce, reduce_scatter
from gemsc.costs.hardware import Device, Hardware, Network
from gemsc.errors import GemscError
from gemsc.ir.flow import owned_tensors, shared_parameters
from gemsc.ir.opaque import opaques
from gemsc.ir.program import Program
from gemsc.messages.rows import Rows, in_pairs, rows_of_holders
from gemsc.planner.memory import frozen_parts, stage_weights
from gemsc.schedules import Kind, Task, Timed, Timeline
from gemsc.schedules.held import are_gathered

# Bytes read and written for each byte of gradients: packed for the sum and unpacked;
# in the update of SGD with momentum (weight, gradient, momentum; weight, momentum).
PACKING = 4
UPDATE = 5

Held = tuple[tuple[int, ...], int]  # ranks that hold the same gradients, their bytes


@dataclass(frozen=True, slots=True)
class StageSum:
    """What the slowest rank of a stage adds up after its last backward, and updates.

    It packs so many bytes, which are added up in `seconds`; then it updates weights of
    so many bytes, and gets those that others have updated in `gather` seconds.
    """

    seconds: float
    packed: int
    updated: float
    gather: float
    algorithms: frozenset[str]


@dataclass(frozen=True, slots=True)
class StepEnd:
    """The seconds from the last backward of a step to its end.

    `sums` are the begin and end of the sums of each stage's gradients.
    """

    seconds: float = 0.0
    sums: Mapping[int, tuple[float, float]] = field(default_factory=dict)


def after_backward(
    program: Program,
    task: Task,
    timeline: Timeline,
    copies: int,
    hardware: Hardware,
) -> StepEnd:
    """Return how a step ends."""
    placement = program.require_placement()
    held = held_gradients(program, task) if task.has_backward else []
    sizes = placement.num_ranks, copies
    return end_of(program, task, timeline, held, sizes, hardware)


def end_of(
    program: Program,
    task: Task,
    timeline: Timeline,
    held: Sequence[Sequence[Held]],
    sizes: tuple[int, int],
    hardware: Hardware,
) -> StepEnd:
    """Return how a step ends where these ranks hold these gradients.

    `sizes` are the ranks of each copy and the copies.
    """
    if not task.has_backward:
        return StepEnd()
    shares_update = program.updated is not None
    sums = gradient_sums(hardware.network, held, *sizes, shares_update=shares_update)
    early = start_early(program)
    times = times_of_sums(task, [timeline], sums, hardware.device, early=early)
    ends = ends_of_sums(task, times)
    gathers = _gathers(hardware.network, task, held, sizes, sums)
    done = max(
        max((*(timed.end for timed in actions), ends[rank]), default=0.0)
        + update_seconds(task, rank, sums, hardware.device)
        + _of_parts(task, actions, sums, gathers) * program.adds_at_once
        for rank, actions in enumerate(timeline.ranks)
    )
    done += _of_pairs(program, held, sizes, hardware.network)
    return StepEnd(done - timeline.makespan, times)


def start_early(program: Program) -> bool:
    """Whether sums start inside of last backwards.

    Not where a rank may lack gradients that others have: all count them afterwards.
    `program` is what the first rank of each grid runs.
    """
    forks = (split.fork_of for split in program.shards.values())
    return not opaques(program.module) and not any(forks)


def held_gradients(program: Program, task: Task) -> list[list[Held]]:
    """Return for each stage who holds its gradients: the whole ones, then parts.

    `program` is what the first rank of each grid runs. All ranks of a stage hold the
    gradients of whole weights, those of the same shard the same parts, or the same
    weights of branches. Where they are in parts, those count that run alike.
    """
    placement = program.require_placement()
    rows = placement.ranks[:1] if program.adds_at_once else placement.ranks
    held_by_stage = []
    for stage, weights in enumerate(stage_weights(program)):
        grids = [row[stage] for row in rows]
        whole = weights.gradients - weights.part_gradients
        held = [(tuple(sorted({rank for grid in grids for rank in grid})), whole)]
        parts = task.stages[stage].summed_bytes - whole  # where they are largest
        if parts:
            count = placement.grid(stage).beside
            alike = [
                {r for grid in grids for r in grid[n::count]} for n in range(count)
            ]
            held += [(tuple(sorted(ranks)), parts) for ranks in alike]
        held_by_stage.append(held)
    return held_by_stage


def reduced_bytes(program: Program, task: Task, copies: int) -> list[int]:
    """Return the bytes of gradients that a rank of each stage adds up in a step."""
    return [
        sum(size for ranks, size in held[:2] if len(ranks) * copies > 1)
        for held in held_gradients(program, task)
    ]


def gradient_sums(
    network: Network,
    held: Sequence[Sequence[Held]],
    num_ranks: int,
    copies: int,
    *,
    shares_update: bool = False,
) -> list[StageSum]:
    """Return what the ranks of each stage add up.

    `held` is as `held_gradients` returns it, in the first copy; each copy has
    `num_ranks` ranks. If it `shares_update`, each rank gets its part of the sum.
    """
    shared = {
        (stage, index): [copy * num_ranks + n for copy in range(copies) for n in ranks]
        for stage, groups in enumerate(held)
        for index, (ranks, size) in enumerate(groups)
        if copies * len(ranks) > 1 and size
    }
    find = reduce_scatter if shares_update else allreduce
    sums: dict[tuple[int, int], Sum] = {}
    for are_parts in (False, True):  # a rank sums one after the other
        keys = [key for key in shared if (key[1] > 0) is are_parts]
        sizes = [held[stage][index][1] for stage, index in keys]
        costs = find(network, [shared[key] for key in keys], sizes)
        sums |= dict(zip(keys, costs, strict=True))
    joined = []
    for stage, groups in enumerate(held):
        whole, *parts = (
            (size, sums.get((stage, index))) for index, (_, size) in enumerate(groups)
        )
        parts.sort(key=lambda part: part[1].seconds if part[1] else 0.0)
        joined.append(_stage_sum([whole, *parts[-1:]]))
    return joined


def _stage_sum(sums: Sequence[tuple[int, Sum | None]]) -> StageSum:
    """Join what a rank adds up, one after the other: bytes, and the sum if there is."""
    summed = [(size, cost) for size, cost in sums if cost is not None]
    alone = sum(size for size, cost in sums if cost is None)
    return StageSum(
        seconds=sum(cost.seconds for _, cost in summed),
        packed=sum(size for size, _ in summed),
        updated=alone + sum(size / cost.updaters for size, cost in summed),
        gather=sum(cost.gather for _, cost in summed),
        algorithms=frozenset(cost.algorithm for _, cost in summed),
    )


def times_of_sums(
    task: Task,
    timelines: Sequence[Timeline],
    sums: Sequence[StageSum],
    device: Device,
    *,
    early: bool = True,
) -> dict[int, tuple[float, float]]:
    """Return, for each stage, when its sums begin and end.

    Of n buckets, which take T seconds, one is complete after each n-th of the last
    backward. What is exposed of them is at most T, at least T/n:

        done = max(begin + (end - begin) / n + T, end + T/n)

    Unless they start `early`, all are complete at the end of the backward: n = 1.
    """
    ready = {stage: (0.0, 0.0) for stage, total in enumerate(sums) if total.packed}
    for timeline in timelines:
        for actions in timeline.ranks:
            last = {timed.action.stage: timed for timed in actions}
            for stage in last.keys() & ready.keys():
                begin, end = ready[stage]
                timed = last[stage]
                ready[stage] = max(begin, timed.start), max(end, timed.end)
    free = [0.0] * task.num_ranks
    times = {}
    for stage in sorted(ready, key=lambda stage: ready[stage][1]):
        places = {row[stage] for row in task.placement}
        begin, end = ready[stage]
        count = -(-sums[stage].packed // BUCKET_BYTES) if early else 1
        start = max(begin + (end - begin) / count, *(free[place] for place in places))
        seconds = PACKING * sums[stage].packed / device.memory_bandwidth
        seconds += sums[stage].seconds
        times[stage] = start, max(start + seconds, end + seconds / count)
        for place in places:
            free[place] = times[stage][1]
    return times


def ends_of_sums(task: Task, times: Mapping[int, tuple[float, float]]) -> list[float]:
    """Return, for each rank of a copy, when its last sum is done."""
    return [
        max((times[stage][1] for _, stage in lanes if stage in times), default=0.0)
        for lanes in task.lanes
    ]


def update_seconds(
    task: Task, rank: int, sums: Sequence[StageSum], device: Device
) -> float:
    """Return the seconds in which a rank updates the weights of its stages.

    With those in which it gets what other ranks have updated.
    """
    total = 0.0
    for stage in {stage for _, stage in task.lanes[rank]}:
        total += UPDATE * sums[stage].updated / device.memory_bandwidth
        total += sums[stage].gather
    return total


def _gathers(
    network: Network,
    task: Task,
    held: Sequence[Sequence[Held]],
    sizes: tuple[int, int],
    sums: Sequence[StageSum],
) -> list[float]:
    """Return the seconds in which a stage's weights are gathered, frozen ones too.

    Where ranks hold parts of a stage, its frozen weights are taken for parts.
    """
    frozen = [stage.frozen_bytes for stage in task.stages]
    if not any(frozen):
        return [total.gather for total in sums]
    weights = [
        [
            (ranks, size + frozen[stage] * (index > 0 or len(groups) == 1))
            for index, (ranks, size) in enumerate(groups)
        ]
        for stage, groups in enumerate(held)
    ]
    with_frozen = gradient_sums(network, weights, *sizes, shares_update=True)
    return [total.gather for total in with_frozen]


def _of_parts(
    task: Task,
    actions: Sequence[Timed],
    sums: Sequence[StageSum],
    gathers: Sequence[float],
) -> float:
    """Return the seconds of a rank's sums and gathers beyond one of each stage.

    Gradients that are kept in parts are added up after each backward, and weights that
    are gathered before actions: where two stages may be whole, while the action before
    runs. What was updated is counted as one gather already.
    """
    order = [timed.action for timed in actions]
    backwards = Counter(a.stage for a in order if a.kind is Kind.BACKWARD)
    seconds = sum((n - 1) * sums[stage].seconds for stage, n in backwards.items())
    hidden, counted = 0.0, set[int]()
    for timed, is_gathered in zip(actions, are_gathered(task, order), strict=True):
        stage = timed.action.stage
        if is_gathered:
            seconds += max(0.0, gathers[stage] - hidden)
            seconds -= sums[stage].gather if stage not in counted else 0.0
            counted.add(stage)
        hidden = timed.end - timed.start if task.whole_stages > 1 else 0.0
    return seconds


def _of_pairs(
    program: Program,
    held: Sequence[Sequence[Held]],
    sizes: tuple[int, int],
    network: Network,
) -> float:
    """Return the seconds in which mirrored ranks add up what both keep, and gather it.

    `held` is what those hold that run alike: see `held_gradients`.
    """
    first, *others = program.require_placement().ranks
    if not program.adds_at_once or not others:
        return 0.0
    seconds = [0.0] * sizes[0]
    for stage, groups in enumerate(held):
        pair = sorted({row[stage][0] for row in (first, *others)})
        rows = sum(-(-size // (len(ranks) * sizes[1])) for ranks, size in groups[:2])
        if len(pair) > 1:
            (total,) = gradient_sums(
                network, [[(tuple(pair), rows)]], sizes[0], 1, shares_update=True
            )
            for rank in pair:
                seconds[rank] += total.seconds + total.gather
    return max(seconds)


def share_updates(program: Program, copies: int, shard: str) -> Program:
    """Let the ranks that hold the same parameters update a part of them each.

    `copies` are the data-parallel copies of the program's ranks; `shard` says what each
    keeps in parts: the optimizer's state, gradients too, or weights as well.

    Raises:
        GemscError: each parameter is on one rank, or nothing is trained; ranks that
            keep gradients in parts would do so in different orders.
    """
    flag = f"--shard {shard}"
    if program.loss is None:
        raise GemscError(
            f"{flag} has no effect on a program that cannot train",
            help=f"add loss(output, target) to the model's file, or leave out {flag}",
        )
    named = dict(program.module.named_parameters())
    groups: dict[tuple[str, bool], list[str]] = defaultdict(list)
    holders: dict[tuple[str, bool], int] = {}
    owned = owned_tensors(program)
    tied = shared_parameters(program, owned)
    whole_stages = int(shard == "weights")
    program = replace(program, shard=shard, whole_stages=whole_stages)
    frozen = frozen_parts(program, owned)
    for stage, of_stage in enumerate(owned):
        for name in of_stage:
            if name in frozen[stage] or (name in named and named[name].requires_grad):
                key = (name if name in tied else f"stage{stage}", name in program.parts)
                groups[key].append(name)
                holders[key] = copies * _holders(program, tied.get(name, (stage,)), key)
    if max(holders.values(), default=1) == 1:
        raise GemscError(
            f"{flag} has no effect: each weight is on one rank",
            help=f"use --data 2 or --schedule mast, or leave out {flag}",
        )
    updated, kept = dict[str, int](), dict[str, int]()
    stages = range(len(owned))
    mirrored = {f"stage{stage}" for stage in stages if _is_mirrored(program, stage)}
    if mirrored and program.adds_at_once and max(holders.values()) == 2:
        ranks = 3 * program.require_placement().num_ranks
        raise GemscError(
            f"{flag} divides state among ranks that run the same stages in the same "
            "order, which the two mirrored replicas do not",
            help=f"use --shard optimizer, or --data 3 with --ranks {ranks}: without, a "
            "rank would hold one whole stage and half of each of its two stages, which "
            "saves nothing",
        )
    for key, names in groups.items():
        shapes = {name: tuple(named[name].shape) for name in names}
        rows = rows_of_holders(shapes, holders[key], program.updated_whole())
        updated |= _most(program, shapes, rows)
        if key[0] in mirrored:
            rows = {name: in_pairs(bounds) for name, bounds in rows.items()}
        kept |= _most(program, shapes, rows)
    return replace(program, updated=updated, kept=kept)


def _is_mirrored(program: Program, stage: int) -> bool:
    """Whether the replicas of a stage are on different ranks."""
    return len({row[stage] for row in program.require_placement().ranks}) > 1


def _holders(program: Program, stages: tuple[int, ...], key: tuple[str, bool]) -> int:
    """Return how many ranks of one copy hold the same of a group of parameters."""
    placement, (_, is_part) = program.require_placement(), key
    ranks = {rank for stage in stages for rank in placement.ranks_of(stage)}
    return len(ranks) // placement.grid(stages[0]).beside if is_part else len(ranks)


def _most(
    program: Program, shapes: Mapping[str, tuple[int, ...]], rows: Mapping[str, Rows]
) -> dict[str, int]:
    """Return how many elements of each that holder has who keeps most state."""

    def kept(elements: dict[str, int]) -> int:
        state = program.optimizer_bytes
        names = state.keys() & elements.keys()
        return sum(state[n].of(elements[n], prod(shapes[n])) for n in names)

    by_holder = [
        {
            name: prod(shape[1:]) * (rows[name][holder][1] - rows[name][holder][0])
            for name, shape in shapes.items()
        }
        for holder in range(len(next(iter(rows.values()))))
    ]
    return max(by_holder, key=lambda counts: (kept(counts), sum(counts.values())))
