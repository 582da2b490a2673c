"""From a program with stages to the scheduler's task: what each stage costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from operator import add

from gemsc.costs.collectives import sum_seconds
from gemsc.costs.hardware import Hardware, Network
from gemsc.ir import meta
from gemsc.ir.flow import exchange_of, is_exchange
from gemsc.ir.holder import called_layer
from gemsc.ir.opaque import opaque_of
from gemsc.ir.program import Program, Stage, Transfer, busy_seconds
from gemsc.ir.segments import recomputed_nodes
from gemsc.messages.exchange import Exchange
from gemsc.planner.activations import activations, again_seconds, made_once_storages
from gemsc.planner.layout import StageLayout
from gemsc.planner.memory import StageWeights, stage_weights
from gemsc.planner.traffic import (
    exchanging,
    most_bytes,
    received_bytes,
    waiting,
)
from gemsc.schedules import Edge, StageCost, Task


def schedule_task(
    tiles: Sequence[Program],
    chosen: StageLayout,
    memory_cap: int | None,
    hardware: Hardware,
) -> Task:
    """Return what the schedule engine needs to know of the program.

    `tiles` are what the tiles of the largest grid run. The ranks of a grid go in step:
    a stage takes the time and the memory of its peak-memory tile. Ranks that share
    branches wait for each other at each exchange.
    """
    first = tiles[0]
    placement = first.require_placement()
    unlike = {id(tile): tile for tile in tiles}
    known = {key: _stage_costs(tile, hardware) for key, tile in unlike.items()}
    costs = [known[id(tile)] for tile in tiles]
    stages = []
    for index in range(len(first.require_stages())):
        size = len(placement.ranks[0][index])
        of_stage = [cost[index] for cost in costs[:size]]
        worst = _worst(of_stage)
        if placement.grid(index).branches > 1:
            worst = _in_step(worst, of_stage, tiles[:size], index)
        stages.append(worst)
    edges = tuple(_edge(first, t, hardware.network) for t in first.transfers or ())
    return Task(
        tuple(stages),
        edges,
        chosen.rows,
        chosen.micro_batches,
        has_backward=first.loss is not None,
        memory_cap=memory_cap,
        workspace_bytes=hardware.device.workspace_bytes,
        whole_stages=first.whole_stages,
    )


def _stage_costs(program: Program, hardware: Hardware) -> list[StageCost]:
    """Return what each stage costs on the rank that runs this program."""
    saved = activations(program)
    split = activations(program, split=True)
    weights = stage_weights(program)
    by_stage = []
    for stage in program.require_stages():
        made = sum(made_once_storages(program, stage.index).values())
        kept, owned = saved[stage.index], weights[stage.index]
        waits = talking(program, stage, hardware.network)
        computing = _computing(program, stage)
        moving = hardware.device.host_seconds(kept.moved)
        if hardware.device.asynchronous:  # beside what is computed
            computing = [max(seconds, moving) for seconds in computing]
        else:
            computing = [seconds + moving for seconds in computing]
        forward, backward = map(sum, zip(computing, waits, strict=True))
        cost = StageCost(
            forward=forward,
            backward=backward,
            saved_bytes=kept.kept,
            transient_bytes=kept.transient,
            first_transient_bytes=kept.first_transient,
            resident_bytes=owned.resident + made,
            gradient_bytes=owned.gradients,
            summed_bytes=owned.gradients,
            weight=_waiting_seconds(program, stage),
            waiting_bytes=split[stage.index].waiting,
            waiting_gradient_bytes=stage.total("weight_bytes"),
            split_transient_bytes=split[stage.index].transient,
            first_split_transient_bytes=split[stage.index].first_transient,
            working_bytes=kept.working,
            first_working_bytes=kept.first_working,
            split_working_bytes=split[stage.index].working,
            first_split_working_bytes=split[stage.index].first_working,
            weight_working_bytes=max(
                (meta.facts(node).weight_bytes for node in stage.nodes), default=0
            ),
        )
        by_stage.append(_in_parts(cost, owned) if program.adds_at_once else cost)
    return by_stage


def _in_parts(cost: StageCost, owned: StageWeights) -> StageCost:
    """Return the cost where gradients are rows between backwards.

    Each backward is like the first one of a step: it makes them anew, and at its end
    they go, but for the rows.
    """
    return replace(
        cost,
        gradient_bytes=owned.rows,
        gathered_bytes=owned.gathered,
        frozen_bytes=owned.frozen,
        packed_bytes=owned.packed,
        scatter_bytes=owned.scatter,
        transient_bytes=cost.first_transient_bytes,
        working_bytes=cost.first_working_bytes,
        split_transient_bytes=cost.first_split_transient_bytes,
        split_working_bytes=cost.first_split_working_bytes,
        waiting_gradient_bytes=0,
        weight_working_bytes=cost.waiting_gradient_bytes,
    )


def _computing(program: Program, stage: Stage) -> list[float]:
    """Return the seconds of a stage's own work, forward and backward.

    What the backward computes again takes as much as it did in the forward.
    """
    spent, launches = (
        [float(stage.total(f"{way}_{what}")) for way in ("forward", "backward")]
        for what in ("seconds", "launches")
    )
    again = again_seconds(program, stage.index)
    if spent[0]:
        launches[1] += launches[0] * again / spent[0]
    spent[1] += again
    return [busy_seconds(*pair) for pair in zip(spent, launches, strict=True)]


def _waiting_seconds(program: Program, stage: Stage) -> float:
    """Return the part of a backward that may wait, 0 where that is not known.

    Stages on tiles go in step; what recomputed or offloaded blocks keep is theirs; what
    a module does that is not looked into is its own.
    """
    placement = program.require_placement()
    whole = any(opaque_of(called_layer(n, program.module)) for n in stage.nodes)
    if whole or placement.grid(stage.index) or program.segments_of(stage.index):
        return 0.0
    return float(stage.total("weight_seconds"))


def talking(program: Program, stage: Stage, network: Network) -> tuple[float, float]:
    """Return the seconds in which the ranks of a stage wait for each other.

    First those in forward, then those in backward: for the parts of others, and for
    sums.
    """
    ranks = program.require_placement().ranks[0][stage.index]
    if len(ranks) == 1:
        return 0.0, 0.0
    link = network.link(ranks[0], ranks[-1])
    again = recomputed_nodes(program, stage)
    forward = backward = 0.0
    for node in exchanging(program, stage):
        there, back = waiting(node, link)
        forward += there
        backward += back + (there if node in again else 0.0)
    for node in stage.nodes:
        for summed in meta.facts(node).sums:
            seconds = sum_seconds(network, ranks, summed.num_bytes)
            forward += 0.0 if summed.backward else seconds
            backward += seconds if summed.backward or node in again else 0.0
    return forward, backward


def _worst(costs: Sequence[StageCost]) -> StageCost:
    """Return the most of everything.

    What comes on top of the saved bytes for a while is what the peak-memory tile then
    has more than the most that any tile saves: the two may be different ones. So is
    what gradients on their way add to both.
    """
    most = {
        field.name: max(getattr(cost, field.name) for cost in costs)
        for field in fields(StageCost)
    }
    for name in [name for name in most if "transient" in name]:
        working = name.replace("transient", "working")
        saved = [cost.saved_bytes + getattr(cost, name) for cost in costs]
        most[name] = max(saved) - most["saved_bytes"]
        both = map(add, saved, (getattr(cost, working) for cost in costs))
        most[working] = max(both) - max(saved)
    return StageCost(**most)


def _in_step(
    worst: StageCost, costs: Sequence[StageCost], tiles: Sequence[Program], index: int
) -> StageCost:
    """Return the cost of a stage where each part between exchanges takes its slowest.

    Whoever has the slowest branch of a fork may have the fastest of the next.
    """
    in_step = worst
    for name in ("forward", "backward"):
        parts = [
            _parts(tile.require_stages()[index], f"{name}_seconds") for tile in tiles
        ]
        others = max(
            getattr(cost, name) - sum(seconds)
            for cost, seconds in zip(costs, parts, strict=True)
        )
        slowest = sum(map(max, zip(*parts, strict=True)))
        in_step = replace(in_step, **{name: slowest + others})
    return in_step


def _parts(stage: Stage, fact: str) -> list[float]:
    """Return the seconds of the nodes before, between and after joins of branches.

    Those are the exchanges in which all ranks of the stage have something.
    """
    seconds = [0.0]
    for node in stage.nodes:
        if is_exchange(node) and _meets_all(exchange_of(node)):
            seconds.append(0.0)
        seconds[-1] += getattr(meta.facts(node), fact)
    return seconds


def _meets_all(exchange: Exchange) -> bool:
    """Whether all ranks take part: not in a branch of some of them."""
    return exchange.arrives or len(exchange.present) == len(exchange.held)


def _edge(program: Program, transfer: Transfer, network: Network) -> Edge:
    """Return what a transfer takes between the ranks of the first replica."""
    row = program.require_placement().ranks[0]
    link = network.link(row[transfer.source][0], row[transfer.dest][0])
    num_bytes = most_bytes(program, transfer)
    return Edge(
        transfer.source,
        transfer.dest,
        link.seconds(num_bytes),
        num_bytes,
        any(meta.needs_gradient(value) for value in transfer.values),
        *received_bytes(program, transfer),
    )


def micro_batch_size(program: Program) -> int:
    """Return the samples of one micro-batch: the first input's first size."""
    return next((item.spec.shape[0] for item in program.inputs if item.spec.shape), 1)
