"""From a program with stages to the scheduler's task, and from its answer to a plan."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path

import torch

from gemsc.base.dtypes import model_dtype
from gemsc.base.fingerprint import fingerprint, source_fingerprints
from gemsc.costs.hardware import DEFAULT_HARDWARE, Hardware, Network
from gemsc.ir import meta
from gemsc.ir.dump import dump
from gemsc.ir.flow import is_overlapped
from gemsc.ir.opaque import opaques
from gemsc.ir.program import Barrier, Program, Stage, Transfer
from gemsc.ir.segments import recomputed_nodes
from gemsc.options import CompileOptions
from gemsc.plan import Plan, PlannedStage, PlannedTransfer
from gemsc.planner.activations import (
    activations,
    again_seconds,
    waiting_gradient_bytes,
)
from gemsc.planner.ending import after_backward
from gemsc.planner.layout import StageLayout
from gemsc.planner.memory import peak_parts, stage_weights
from gemsc.planner.tiles import (
    exchanges,
    exchanging,
    most_bytes,
    moved_bytes,
    waiting,
)
from gemsc.planner.traffic import received_bytes, step_traffic
from gemsc.schedules import Edge, StageCost, Task, Timeline

__all__ = [
    "make_plan",
    "micro_batch_size",
    "reduced_bytes",
    "schedule_task",
    "sent_bytes",
]


def schedule_task(
    tiles: Sequence[Program],
    chosen: StageLayout,
    memory_cap: int | None,
    hardware: Hardware,
) -> Task:
    """Return what the schedule engine needs to know of the program.

    `tiles` are what the tiles of the largest grid run. The ranks of a grid go in step:
    a stage takes the time and the memory of its fullest tile.
    """
    first = tiles[0]
    placement = first.placement
    assert placement is not None
    network = hardware.network
    costs = [_stage_costs(tile, hardware) for tile in tiles]
    stages = tuple(
        _worst([cost[stage.index] for cost in costs[: _size(first, stage.index)]])
        for stage in first.require_stages()
    )
    edges = tuple(
        Edge(
            t.source,
            t.dest,
            seconds=_transfer_seconds(first, t, network),
            num_bytes=most_bytes(first, t),
            gradient=has_gradient(t),
            value_bytes=received_bytes(first, t)[0],
            gradient_bytes=received_bytes(first, t)[1],
        )
        for t in first.transfers or ()
    )
    return Task(
        stages,
        edges,
        chosen.rows,
        chosen.micro_batches,
        has_backward=first.loss is not None,
        memory_cap=memory_cap,
        workspace_bytes=hardware.device.workspace_bytes,
    )


def _size(program: Program, stage: int) -> int:
    """Return the number of a stage's tiles."""
    assert program.placement is not None
    return len(program.placement.ranks[0][stage])


def _stage_costs(program: Program, hardware: Hardware) -> list[StageCost]:
    """Return what each stage costs on the rank that runs this program."""
    saved = activations(program)
    split = activations(program, waiting=set(program.compute_nodes))
    weights = stage_weights(program)
    found = []
    for stage in program.require_stages():
        kept, owned = saved[stage.index], weights[stage.index]
        talking = _talking(program, stage, hardware.network)
        moving = hardware.device.host_seconds(kept.moved)
        forward, backward = (each + moving for each in talking)
        again = again_seconds(program, stage.index)
        found.append(
            StageCost(
                forward=stage.total("forward_seconds") + forward,
                backward=stage.total("backward_seconds") + backward + again,
                saved_bytes=kept.kept,
                transient_bytes=kept.transient,
                first_transient_bytes=kept.first_transient,
                resident_bytes=owned.resident,
                gradient_bytes=owned.gradients,
                weight=_waiting_seconds(program, stage),
                waiting_bytes=split[stage.index].waiting,
                waiting_gradient_bytes=waiting_gradient_bytes(program, stage.index),
                split_transient_bytes=split[stage.index].transient,
                first_split_transient_bytes=split[stage.index].first_transient,
            )
        )
    return found


def _waiting_seconds(program: Program, stage: Stage) -> float:
    """Return the part of a backward that may wait, 0 where that is not known.

    Stages on tiles go in step; what recomputed or offloaded blocks keep is theirs; what
    a module does that is not looked into is its own.
    """
    placement = program.placement
    assert placement is not None
    whole = [_stages_of(program, path) for path in opaques(program.module)]
    apart = placement.grid(stage.index) or program.segments_of(stage.index)
    if apart or any(stage.index in stages for stages in whole):
        return 0.0
    return float(stage.total("weight_seconds"))


def _talking(program: Program, stage: Stage, network: Network) -> tuple[float, float]:
    """Return the seconds in which the tiles of a stage wait for each other.

    First those in forward, then those in backward: for the parts of others, and for
    sums, which take a message each time that the tiles halve (recursive doubling).
    """
    assert program.placement is not None
    ranks = program.placement.ranks[0][stage.index]
    if len(ranks) == 1:
        return 0.0, 0.0
    link = network.link(ranks[0], ranks[-1])
    again = recomputed_nodes(program, stage)
    forward = backward = 0.0
    for node in exchanging(program, stage):
        there, back = waiting(node, link)
        forward += there
        backward += back + (there if node in again else 0.0)
    rounds = (len(ranks) - 1).bit_length()
    for node in stage.nodes:
        for each in meta.facts(node).sums:
            rows = len(ranks) if each.has_rows else 1
            seconds = rounds * link.seconds(rows * each.num_bytes)
            forward += 0.0 if each.backward else seconds
            backward += seconds if each.backward or node in again else 0.0
    return forward, backward


def _worst(costs: Sequence[StageCost]) -> StageCost:
    """Return the most of everything.

    What comes on top of the saved bytes for a while is what the fullest tile then has
    more than the most that any tile saves: the two may be different ones.
    """
    most = {
        field.name: max(getattr(cost, field.name) for cost in costs)
        for field in fields(StageCost)
    }
    for name in [name for name in most if "transient" in name]:
        fullest = max(cost.saved_bytes + getattr(cost, name) for cost in costs)
        most[name] = fullest - most["saved_bytes"]
    return StageCost(**most)


def num_bytes(program: Program, transfer: Transfer) -> int:
    """Return the bytes of a transfer's values that travel, from all tiles to all."""
    return moved_bytes(program, transfer)


def _transfer_seconds(program: Program, transfer: Transfer, network: Network) -> float:
    """Return the time of a transfer between the ranks of the first replica."""
    assert program.placement is not None
    row = program.placement.ranks[0]
    source, dest = row[transfer.source][0], row[transfer.dest][0]
    return network.link(source, dest).seconds(most_bytes(program, transfer))


def sent_bytes(program: Program, task: Task) -> int:
    """Return the bytes of values and gradients that ranks of one copy send a step.

    `program` is what the first tile of a grid runs; it knows what all tiles hold.
    """
    total = 0
    for replica, count in enumerate(task.micro_batches):
        ranks = task.placement[replica]
        for transfer in program.transfers or ():
            if ranks[transfer.source] != ranks[transfer.dest]:
                both = 2 if has_gradient(transfer) else 1
                total += both * count * num_bytes(program, transfer)
        for stage in program.require_stages():
            for each in exchanges(program, stage):
                total += each.trips * count * each.num_bytes
    return total


def reduced_bytes(program: Program, task: Task, data: int) -> list[int]:
    """Return the bytes of gradients that each stage's ranks add up in a step."""
    placement = program.placement
    assert placement is not None
    sums = []
    for stage in program.require_stages():
        ranks = {rank for row in placement.ranks for rank in row[stage.index]}
        share = task.stages[stage.index].gradient_bytes
        sums.append(share if len(ranks) * data > 1 else 0)
    return sums


def micro_batch_size(program: Program) -> int:
    """Return the samples of one micro-batch: the first input's first size."""
    return next((item.spec.shape[0] for item in program.inputs if item.spec.shape), 1)


def has_gradient(transfer: Transfer) -> bool:
    """Whether any gradient travels back."""
    return any(meta.needs_gradient(value) for value in transfer.values)


def make_plan(
    program: Program,
    tiles: Sequence[Program],
    task: Task,
    timeline: Timeline,
    options: CompileOptions,
    source: Path | None,
    hardware: Hardware,
) -> Plan:
    """Return every decision as plain data.

    `tiles` are what the tiles of the largest grid run, the program itself without any.
    """
    placement = program.placement
    assert placement is not None
    first = tiles[0]
    groups = placement.groups
    traffic = [exchanges(first, stage) for stage in first.require_stages()]
    sizes = [(len(each), sum(t.num_bytes for t in each)) for each in traffic]
    unfused = dict(enumerate(sizes)) | first.unfused
    stages = [
        PlannedStage(
            index=stage.index,
            ranks=sorted({r for rep in placement.ranks for r in rep[stage.index]}),
            blocks=[block.name for block in stage.blocks],
            flops=stage.total("flops"),
            parameter_bytes=stage.total("parameter_bytes"),
            resident_bytes=task.stages[stage.index].resident_bytes,
            gradient_bytes=task.stages[stage.index].gradient_bytes,
            saved_bytes=task.stages[stage.index].saved_bytes,
            transient_bytes=task.stages[stage.index].transient_bytes,
            first_transient_bytes=task.stages[stage.index].first_transient_bytes,
            waiting_bytes=task.stages[stage.index].waiting_bytes,
            waiting_gradient_bytes=task.stages[stage.index].waiting_gradient_bytes,
            weight_seconds=task.stages[stage.index].weight,
            split_transient_bytes=task.stages[stage.index].split_transient_bytes,
            first_split_transient_bytes=task.stages[
                stage.index
            ].first_split_transient_bytes,
            forward_seconds=task.stages[stage.index].forward,
            backward_seconds=task.stages[stage.index].backward,
            recompute=_names(program, stage.index, "recompute"),
            offload=_names(program, stage.index, "offload"),
            tiles=list(placement.grid(stage.index)),
            halo_bytes=sizes[stage.index][1],
            exchanges=sizes[stage.index][0],
            overlapped=_overlapped(first.require_stages()[stage.index]),
            unfused_exchanges=unfused[stage.index][0],
            unfused_halo_bytes=unfused[stage.index][1],
        )
        for stage in program.require_stages()
    ]
    transfers = [
        PlannedTransfer(
            index=t.index,
            source=t.source,
            dest=t.dest,
            values=[value.name for value in t.values],
            num_bytes=num_bytes(first, t),
            most_bytes=most_bytes(first, t),
            seconds=_transfer_seconds(first, t, hardware.network),
            gradient=has_gradient(t),
            value_bytes=received_bytes(first, t)[0],
            gradient_bytes=received_bytes(first, t)[1],
        )
        for t in first.transfers or ()
    ]
    weights = stage_weights(program)
    shown = os.path.relpath(source) if source else program.name
    given = {key: value for key, value in asdict(options).items() if value is not None}
    return Plan(
        gemsc=version("gemsc"),
        torch=torch.__version__,
        command=f"gemsc compile {shown} {options.command_line()}",
        model=program.name,
        spec=str(source.resolve()) if source else "",
        graph=fingerprint(dump(program)),
        ranks=options.data * placement.num_ranks,
        data=options.data,
        replicas=placement.num_replicas,
        schedule=options.schedule,
        placement=placement.name,
        micro_batches=sum(task.micro_batches),
        micro_batch_size=micro_batch_size(program),
        times=times_text(hardware, options),
        step_seconds=timeline.makespan,
        ending_seconds=after_backward(program, task, timeline, options.data, hardware),
        bubble=timeline.bubble,
        workspace_bytes=task.workspace_bytes,
        peak_bytes=list(timeline.peak_bytes),
        activation_bytes=list(timeline.peak_activation_bytes),
        memory=[
            asdict(peak_parts(weights, task, timeline, rank))
            for rank in range(task.num_ranks)
        ],
        stages=stages,
        transfers=transfers,
        traffic=asdict(step_traffic(first, task)),
        groups=[list(ranks) for ranks in groups] if placement.grids else [],
        barriers=[_barrier(first, barrier) for barrier in first.barriers],
        opaque=[
            {
                "module": path,
                "stages": _stages_of(program, path),
                "line": opaque.at.short if opaque.at is not None else "",
                "reason": opaque.why,
            }
            for path, opaque in opaques(program.module).items()
        ],
        notes=list(program.notes),
        dtype=str(model_dtype(program.module.parameters())).removeprefix("torch."),
        only_dtype=program.only_dtype,
        skips=_skips(program),
        order=[" ".join(map(str, order)) for order in timeline.orders],
        options={k: list(v) if isinstance(v, tuple) else v for k, v in given.items()},
        sources=_fingerprints(program, whole=source is not None),
    )


def _fingerprints(program: Program, *, whole: bool) -> dict[str, dict[str, str]]:
    """Return those of the user's files: whole, or what the traced lines need.

    A model that was given as an object may share its file with a training loop.
    """
    lines: dict[str, set[int]] = defaultdict(set)
    for node in program.graph.nodes:
        if (at := meta.location(node)) is not None:
            lines[at.file].add(at.line)
    return {
        str(Path(file).resolve()): source_fingerprints(
            Path(file), None if whole else lines.get(file)
        )
        for file in program.sources
    }


def times_text(hardware: Hardware, options: CompileOptions) -> str:
    """Return where the seconds of stages come from."""
    if options.profile:
        return "measured"
    kind = "calibrated" if hardware.device.fit else "data sheet"
    return f"{kind}: {options.hardware or DEFAULT_HARDWARE}"


def _names(program: Program, stage: int, kind: str) -> list[str]:
    """Return the names of a stage's segments of one kind."""
    segments = [segment for segment, _ in program.segments_of(stage)]
    return [segment.name for segment in segments if segment.kind == kind]


def _overlapped(stage: Stage) -> list[str]:
    """Return the layers whose halo travels while their inner part is computed."""
    return [str(node.target) for node in stage.nodes if is_overlapped(node)]


def _stages_of(program: Program, path: str) -> list[int]:
    """Return the stages that call a module."""
    return [
        stage.index
        for stage in program.require_stages()
        if any(n.op == "call_module" and n.target == path for n in stage.nodes)
    ]


def _barrier(program: Program, barrier: Barrier) -> dict[str, object]:
    """Return where a split value is gathered, and why."""
    at = barrier.location
    stages = program.require_stages()
    return {
        "stage": next(s.index for s in stages if barrier.node in s.nodes),
        "value": barrier.node.name,
        "reason": barrier.reason,
        "num_bytes": barrier.num_bytes,
        "line": at.short if at is not None else "",
    }


def _skips(program: Program) -> list[dict[str, object]]:
    """Return the skips that jump over blocks."""
    placement = program.placement
    assert placement is not None
    block_of = {node: b for b in program.blocks or () for node in b.nodes}
    stage_of = {
        block.index: stage.index
        for stage in program.require_stages()
        for block in stage.blocks
    }
    found: list[dict[str, object]] = []
    for skip in program.skips or ():
        source, dest = block_of[skip.value], block_of[skip.last_use]
        if dest.index - source.index > 1:
            stages = stage_of[source.index], stage_of[dest.index]
            local = placement.ranks[0][stages[0]] == placement.ranks[0][stages[1]]
            found.append(
                {
                    "value": skip.value.name,
                    "source": source.name,
                    "dest": dest.name,
                    "num_bytes": skip.num_bytes,
                    "kind": "stays on its rank" if local else "sent once",
                }
            )
    return found
