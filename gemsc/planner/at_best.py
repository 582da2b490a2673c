"""What a split can come to at best: ranks share each stage evenly, for next to nothing.

Example: a stage of 8 ms, 4 GiB of weights and 2 GiB saved, on four shards: 2 ms, 1 GiB
of weights, 0.5 GiB saved; if 1 ms of the 8 is what its kernels take on next to nothing,
2.75 ms. A split that is not even then as fast as another one, or that is not even then
small enough, need not be lowered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import accumulate
from math import prod
from typing import Any

from gemsc.base.cost import StageCost
from gemsc.base.grid_shape import GridShape
from gemsc.costs.collectives import sum_seconds
from gemsc.costs.hardware import Hardware, Network
from gemsc.errors import GemscError
from gemsc.ir import meta
from gemsc.ir.operators.calls import call_of
from gemsc.ir.program import Program, Stage
from gemsc.options import CompileOptions
from gemsc.planner.ending import Held, share_updates
from gemsc.planner.fitting import Scheduled, Scheduling
from gemsc.planner.layout import StageLayout
from gemsc.planner.predict import schedule_task
from gemsc.schedules import Task

OF_WEIGHTS = (
    *("resident_bytes", "gradient_bytes", "summed_bytes"),
    *("waiting_gradient_bytes", "gathered_bytes", "frozen_bytes", "packed_bytes"),
)
LEAST = 0.9  # of its even share of what is saved: an operator for parts may save less


def schedule_at_best(
    program: Program,
    chosen: StageLayout,
    options: CompileOptions,
    hardware: Hardware,
    shares: Mapping[GridShape, Sequence[float]],
    once: Callable[..., Any],
) -> Scheduled:
    """Return the schedule of stages that are shared evenly; nothing is lowered.

    `program` has its stages placed, each on one rank that stands for all of its group.
    `shares` are the part of each block's seconds that a rank of each grid takes. Where
    blocks may be recomputed or offloaded, nothing is kept.
    """
    if options.shard != "off":
        shared = "at best", id(program), options.data, options.shard
        program = once(shared, _updates_shared, program, options)
    key = id(program), replace(chosen, groups=(), micro_batches=())
    task = once(key, schedule_task, (program,), chosen, None, hardware)
    keeps = "auto" not in (*options.recompute, *options.offload)
    stages = tuple(
        _shared(cost, stage, grid, _share(stage, shares[grid]), LEAST if keeps else 0.0)
        for cost, stage, grid in zip(
            task.stages, program.require_stages(), chosen.grids, strict=True
        )
    )
    if not options.local_batchnorm:
        sums = once(("sums", id(program)), _statistics, program)
        network = hardware.network
        stages = tuple(
            _waiting(cost, sums[index] * _sum_seconds(network, grid))
            for index, (cost, grid) in enumerate(zip(stages, chosen.grids, strict=True))
        )
    edges = tuple(
        replace(
            edge,
            seconds=0.0,
            value_bytes=edge.value_bytes // chosen.grids[edge.dest].size,
            gradient_bytes=edge.gradient_bytes // chosen.grids[edge.source].size,
        )
        for edge in task.edges
    )
    counts = chosen.micro_batches
    task = replace(task, stages=stages, edges=edges, micro_batches=counts)
    given = replace(options, recompute=(), offload=())
    return Scheduling(chosen, given, hardware).schedule(program, (program,), task)


def held_at_best(task: Task, groups: Sequence[GridShape]) -> list[list[Held]]:
    """Return who holds the gradients of each stage: as `held_gradients`, shared evenly.

    Tiles hold all weights, shards and branches their part of them.
    """
    first = list(accumulate((group.size for group in groups), initial=0))
    held: list[list[Held]] = []
    for stage, cost in enumerate(task.stages):
        rows = task.placement[:1] if cost.scatter_bytes else task.placement
        places = {row[stage] for row in rows}
        alike = {
            rank
            for group in places
            for rank in range(first[group], first[group + 1], groups[group].beside)
        }
        held.append([(tuple(sorted(alike)), cost.summed_bytes)])
    return held


def _share(stage: Stage, shares: Sequence[float]) -> float:
    """Return the part of a stage's seconds that a rank takes."""
    seconds = [block.busy_seconds for block in stage.blocks]
    taken = (
        busy * shares[b.index] for busy, b in zip(seconds, stage.blocks, strict=True)
    )
    return sum(taken) / sum(seconds) if sum(seconds) else 1.0


def _shared(
    cost: StageCost, stage: Stage, grid: GridShape, share: float, kept: float
) -> StageCost:
    """Return a share of what a stage costs; kernels are as many on each rank.

    But for branches: each of those has ranks of its own.
    """
    less: dict[str, Any] = {}
    kept = kept if grid or not kept else 1.0
    for field in fields(StageCost):
        value = getattr(cost, field.name)
        if field.name in OF_WEIGHTS:
            less[field.name] = value // grid.beside
        elif field.name.endswith("_bytes"):
            less[field.name] = int(kept * value / grid.size)
        else:
            less[field.name] = value * share
    for way in ("forward", "backward") if grid.branches == 1 else ():
        whole, launches = getattr(cost, way), float(stage.total(f"{way}_launches"))
        seconds = (_least(stage, way) * (1 - share) + whole * share, launches)
        less[way] = min(whole, max(seconds))
    return StageCost(**less)


def _least(stage: Stage, way: str) -> float:
    """Return what the kernels of a stage take, however small they are."""
    least = 0.0
    for facts in map(meta.facts, stage.nodes):
        least += min(getattr(facts, f"{way}_{what}") for what in ("least", "seconds"))
    return least


def _statistics(program: Program) -> list[int]:
    """Return how many norms of each stage sum over all tiles, in forward and again."""
    return [
        sum(
            call_of(node, program.module).kind == "batch_norm"
            and len(meta.spec(node).shape) > 2
            and str(node.target) not in program.frozen
            for node in stage.nodes
        )
        for stage in program.require_stages()
    ]


def _sum_seconds(network: Network, grid: GridShape) -> float:
    """Return the seconds of the smallest sum over the tiles of a grid, 0 without any.

    No link between two of them is faster than that of neighbours.
    """
    count = prod(grid.tiles)
    return sum_seconds(network, range(count), 8) if count > 1 else 0.0


def _waiting(cost: StageCost, seconds: float) -> StageCost:
    """Return the cost of a stage whose ranks wait so long in each direction."""
    there, back = cost.forward + seconds, cost.backward + seconds
    return replace(cost, forward=there, backward=back)


def _updates_shared(program: Program, options: CompileOptions) -> Program:
    """Return the program with updates shared, as it is where that has no effect."""
    try:
        return share_updates(program, options.data, options.shard)
    except GemscError:  # of whole weights; of shards there may be some
        return program
