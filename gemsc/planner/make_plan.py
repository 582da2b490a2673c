"""From a program, its task and its schedule to a plan."""

from __future__ import annotations

import os
import shlex
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

import torch

from gemsc.base.dtypes import model_dtype
from gemsc.base.fingerprint import fingerprint, source_fingerprints
from gemsc.costs.hardware import DEFAULT_HARDWARE, Hardware
from gemsc.ir import meta
from gemsc.ir.dump import dump
from gemsc.ir.flow import is_overlapped
from gemsc.ir.opaque import opaques
from gemsc.ir.program import Program, Stage
from gemsc.ir.shards import CutTensor, Fork, StageShards, WholeTensor
from gemsc.options import CompileOptions
from gemsc.plan import Plan
from gemsc.plan_tables import PlannedFork, PlannedStage, PlannedTransfer, PlannedWhole
from gemsc.planner.ending import after_backward
from gemsc.planner.labels import ignored_labels
from gemsc.planner.memory import largest_weights, peak_parts
from gemsc.planner.notes import (
    loss_notes,
    optimizer_note,
    state_notes,
    unfused_note,
)
from gemsc.planner.predict import micro_batch_size, talking
from gemsc.planner.traffic import exchanges, moved_bytes, stage_traffic, step_traffic
from gemsc.schedules import Task, Timeline
from gemsc.schedules.paths import skipping


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
    placement = program.require_placement()
    first = tiles[0]
    weights = largest_weights(tiles)
    shown = os.path.relpath(source) if source else program.name
    given = {key: value for key, value in asdict(options).items() if value is not None}
    ending = after_backward(first, task, timeline, options.data, hardware)
    dtype = str(model_dtype(program.module.parameters())).removeprefix("torch.")
    memory = [
        peak_parts(weights, task, timeline, rank) for rank in range(task.num_ranks)
    ]
    step = timeline.makespan + ending.seconds
    unfused = unfused_note(program, max(m.optimizer for m in memory), step, hardware)
    peak_dtype, peak = hardware.device.peak(
        options.precision if options.precision != "float32" else dtype
    )
    return Plan(
        gemsc=version("gemsc"),
        torch=torch.__version__,
        command=f"gemsc compile {shlex.quote(shown)} {options.command_line()}",
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
        sample_dims=list(program.sample_dims),
        loss_of_all=program.loss_of_all,
        mixes_samples=program.evaluation_mixes,
        ignored=ignored_labels(program),
        times=times_text(hardware, options),
        step_seconds=timeline.makespan,
        ending_seconds=ending.seconds,
        sums=[
            {"stage": stage, "start": start, "end": end}
            for stage, (start, end) in sorted(ending.sums.items())
        ],
        bubble=timeline.bubble,
        workspace_bytes=task.workspace_bytes,
        whole_stages=task.whole_stages,
        peak_bytes=list(timeline.peak_bytes),
        activation_bytes=list(timeline.peak_activation_bytes),
        memory=[asdict(parts) for parts in memory],
        places=[list(row) for row in task.placement],
        stages=_stages(program, tiles, task, hardware),
        transfers=_transfers(first, task),
        traffic=asdict(step_traffic(tiles, task)),
        groups=[list(ranks) for ranks in placement.groups if placement.grids],
        barriers=_barriers(tiles),
        opaque=_opaque(program),
        notes=[
            *program.notes,
            *loss_notes(program, task, options),
            *state_notes(program, task, options),
            *optimizer_note(program),
            *unfused,
        ],
        dtype=dtype,
        tokens=_tokens(program),
        peak_flops=peak,
        peak_dtype=peak_dtype,
        only_dtype=program.only_dtype,
        skips=_skips(program),
        made=_made(program),
        order=[" ".join(map(str, order)) for order in timeline.orders],
        options={k: list(v) if isinstance(v, tuple) else v for k, v in given.items()},
        sources=_fingerprints(program, whole=source is not None),
    )


def _tokens(program: Program) -> int:
    """Return the words of a sample: whole numbers, samples by positions."""
    shapes = (
        item.spec.shape
        for item in program.inputs
        if not item.spec.dtype.is_floating_point and len(item.spec.shape) == 2
    )
    return max((shape[1] for shape in shapes), default=0)


def _stages(
    program: Program, tiles: Sequence[Program], task: Task, hardware: Hardware
) -> list[PlannedStage]:
    """Return what each stage holds; `tiles` are what those of the largest grid run."""
    placement, first = program.require_placement(), tiles[0]
    before = first.halos.unfused if first.halos else {}  # without fused halos
    planned = []
    stages = zip(program.require_stages(), first.require_stages(), strict=True)
    for (stage, of_tile), cost in zip(stages, task.stages, strict=True):
        grid, halos = placement.grid(stage.index), exchanges(first, of_tile)
        size = len(halos), sum(halo.num_bytes for halo in halos)
        unfused = before.get(stage.index, size)
        planned.append(
            PlannedStage(
                index=stage.index,
                ranks=sorted(placement.ranks_of(stage.index)),
                blocks=[block.name for block in stage.blocks],
                flops=stage.total("flops"),
                parameter_bytes=stage.total("parameter_bytes"),
                cost=cost,
                recompute=_names(program, stage.index, "recompute"),
                offload=_names(program, stage.index, "offload"),
                tiles=list(grid.tiles),
                shards=grid.shards,
                branches=grid.branches,
                talking_seconds=sum(talking(first, of_tile, hardware.network)),
                **asdict(stage_traffic(tiles, stage.index)),
                **_shards(stage, first.shards.get(stage.index), prod(grid.tiles)),
                exchanges=size[0],
                halo_bytes=size[1],
                unfused_exchanges=unfused[0],
                unfused_halo_bytes=unfused[1],
                overlapped=[meta.layer(n) for n in of_tile.nodes if is_overlapped(n)],
            )
        )
    return planned


def _shards(stage: Stage, shards: StageShards | None, tiles: int) -> dict[str, Any]:
    """Return what a stage's ranks share of it, and what they do not."""
    if shards is None:
        return {}
    alike: dict[str, list[WholeTensor]] = {}
    placed = dict(shards.placed)
    for tensor in shards.whole:
        if tensor.name not in placed:
            alike.setdefault(tensor.reason, []).append(tensor)
    whole = [
        PlannedWhole(
            reason=reason,
            num_bytes=sum(tensor.num_bytes for tensor in tensors),
            names=[tensor.name for tensor in tensors],
        )
        for reason, tensors in alike.items()
    ]
    whole.sort(key=lambda group: -group.num_bytes)
    ranks = range(shards.count if shards.placed else 0)
    trunk = _trunk_seconds(stage, shards, tiles)
    return {
        "trunk": shards.trunk,
        "cut": [_cut_text(tensor) for tensor in shards.cut],
        "whole": whole,
        "alone": [[name for name, rank in placed.items() if rank == r] for r in ranks],
        "forks": [
            _fork(fork, shards.count, trunk.get(fork.join, 0.0))
            for fork in shards.forks
        ],
    }


def _trunk_seconds(stage: Stage, shards: StageShards, tiles: int) -> dict[str, float]:
    """Return how long a rank computes the trunk before each fork, by its join.

    That is since the join of the fork before.
    """
    joins = {node: f.join for f in shards.forks for b in f.branches for node in b.nodes}
    before: dict[str, float] = {}
    seconds = 0.0
    for node in stage.nodes:
        if node.name not in shards.rank_of:
            num_ranks = shards.count if node.name in shards.split_dims else tiles
            seconds += meta.facts(node).seconds / num_ranks
        elif joins[node.name] not in before:
            before[joins[node.name]] = seconds
            seconds = 0.0
    return before


def _fork(fork: Fork, count: int, trunk_seconds: float) -> PlannedFork:
    """Return which of `count` ranks has which branches."""
    ranks = range(0 if fork.reason else count)
    return PlannedFork(
        name=fork.name,
        join=fork.join,
        branches=[branch.name for branch in fork.branches],
        seconds=[branch.seconds for branch in fork.branches],
        placed=[[b.name for b in fork.branches if b.rank == rank] for rank in ranks],
        saved_seconds=fork.saved,
        trunk_seconds=trunk_seconds,
        reason=fork.reason,
    )


def _cut_text(tensor: CutTensor) -> str:
    """Return `qkv.weight.0 of 3 x 4 heads`: dimension 0 has thrice four heads."""
    part = tensor.parts[0]
    outer = f"{part.outer} x " if part.outer > 1 else ""
    return f"{tensor.name}.{part.dim} of {outer}{part.units} {tensor.noun}s"


def _transfers(first: Program, task: Task) -> list[PlannedTransfer]:
    return [
        PlannedTransfer(
            index=transfer.index,
            values=[value.name for value in transfer.values],
            num_bytes=moved_bytes(first, transfer),
            edge=edge,
        )
        for transfer, edge in zip(first.transfers or (), task.edges, strict=True)
    ]


def _opaque(program: Program) -> list[dict[str, object]]:
    """Return the modules that stay whole, the stages that call them, and why."""
    stages = program.require_stages()
    calls = [{n.target for n in s.nodes if n.op == "call_module"} for s in stages]
    return [
        {
            "module": path,
            "stages": [index for index, paths in enumerate(calls) if path in paths],
            "line": opaque.at.short if opaque.at is not None else "",
            "reason": opaque.why,
        }
        for path, opaque in opaques(program.module).items()
    ]


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


def _barriers(tiles: Sequence[Program]) -> list[dict[str, object]]:
    """Return what is gathered: by all tiles, or in a branch that some of them have."""
    gathered: dict[tuple[int, str], dict[str, object]] = {}
    for program in tiles:
        stages = program.require_stages()
        for barrier in program.barriers:
            at = barrier.location
            key = meta.traced_place(barrier.node), barrier.reason
            entry = {
                "stage": next(s.index for s in stages if barrier.node in s.nodes),
                "value": barrier.node.name,
                "reason": barrier.reason,
                "num_bytes": barrier.num_bytes,
                "line": at.short if at is not None else "",
            }
            gathered.setdefault(key, entry)
    return [gathered[key] for key in sorted(gathered)]


def _made(program: Program) -> list[dict[str, object]]:
    """Return what stages make that an earlier one makes as well."""
    made: dict[tuple[str, str], dict[str, Any]] = {}
    for stage in program.require_stages():
        for node in stage.nodes:
            name = meta.copy_of(node)
            if name is None or all(meta.copy_of(user) for user in node.users):
                continue
            when = "once" if meta.is_made_once(node) else "each micro-batch"
            size = meta.facts(node).output_bytes
            entry = {"value": name, "stages": [], "num_bytes": size, "when": when}
            made.setdefault((name, when), entry)["stages"].append(stage.index)
    return list(made.values())


def _skips(program: Program) -> list[dict[str, object]]:
    placement = program.require_placement()
    block_of = {node: b for b in program.blocks or () for node in b.nodes}
    stage_of = {
        block.index: stage.index
        for stage in program.require_stages()
        for block in stage.blocks
    }
    skips = skipping(
        (block.index, block_of[user].index)
        for node, block in block_of.items()
        for user in node.users
        if user in block_of
    )
    jumps: list[dict[str, object]] = []
    for skip in program.skips or ():
        source, dest = block_of[skip.value], block_of[skip.last_use]
        if (source.index, dest.index) in skips:
            stages = stage_of[source.index], stage_of[dest.index]
            local = placement.ranks[0][stages[0]] == placement.ranks[0][stages[1]]
            jumps.append(
                {
                    "value": skip.value.name,
                    "source": source.name,
                    "dest": dest.name,
                    "num_bytes": skip.num_bytes,
                    "kind": "stays on its rank" if local else "sent once",
                }
            )
    return jumps
