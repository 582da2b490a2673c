"""The whole compilation on one page: trace -> passes -> schedule -> text -> proof."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemsc.base.elementwise import Factory, updated_whole
from gemsc.base.grid_shape import GridShape
from gemsc.base.memory_format import convert, converted
from gemsc.base.nests import normalize_inputs
from gemsc.codegen.package import rank_modules
from gemsc.compilation import Compilation, TileProgram, Traced
from gemsc.compiled import CompiledProgram, prove_files
from gemsc.costs.hardware import Hardware, read_hardware
from gemsc.costs.optimizer_state import optimizer_bytes
from gemsc.costs.profile import Progress
from gemsc.costs.sharing import SharedDevice
from gemsc.errors import GemscError
from gemsc.frontend import FRONTENDS
from gemsc.frontend.check import check_against_eager
from gemsc.frontend.optimizer import check_optimizer
from gemsc.frontend.precision import autocast_of
from gemsc.ir.flow import owned_tensors
from gemsc.ir.opaque import Opaque, opaques
from gemsc.ir.program import Program
from gemsc.ir.shards import Placed
from gemsc.ir.staged import same_stages
from gemsc.options import AUTO, CompileOptions, choose
from gemsc.passes.annotate import Annotate
from gemsc.passes.balance_stages import BalanceStages
from gemsc.passes.base import Pass
from gemsc.passes.branches.forks import most_branches
from gemsc.passes.canonicalize import Canonicalize
from gemsc.passes.checks.statistics import CheckStatistics
from gemsc.passes.checks.tiles import CheckTiles
from gemsc.passes.choose_shards import ChooseShards
from gemsc.passes.detect_skips import DetectSkips
from gemsc.passes.find_halos import FindHalos
from gemsc.passes.follow_stages import (
    FollowOrder,
    FollowShards,
    FollowStages,
    find_twins,
)
from gemsc.passes.group_blocks import GroupBlocks
from gemsc.passes.insert_comms import InsertComms
from gemsc.passes.local_batchnorm import LocalBatchnorm
from gemsc.passes.manager import Observer, Runs
from gemsc.passes.mark_segments import MarkSegments
from gemsc.passes.overlap_halos import OverlapHalos
from gemsc.passes.place_stages import PlaceStages
from gemsc.passes.separate_towers import SeparateTowers
from gemsc.passes.share_device import share
from gemsc.passes.split_tiles import SplitTiles
from gemsc.passes.time_blocks import TimeBlocks
from gemsc.plan import Plan
from gemsc.planner.edited import EditedPlan
from gemsc.planner.fitting import Scheduled, check_torch_compile, schedule
from gemsc.planner.layout import check_blocks, check_whole, stage_layout
from gemsc.planner.make_plan import make_plan
from gemsc.planner.predict import schedule_task
from gemsc.planner.tiles import peak_tile
from gemsc.planner.updates import share_updates
from gemsc.schedules import SCHEDULES
from gemsc.schedules.loops import find_loops
from gemsc.search.auto import settled
from gemsc.search.candidates import Candidate
from gemsc.search.grids import image_sizes
from gemsc.search.sharing import choose_sharing, sharing_note

__all__ = [
    "CompiledProgram",
    "Traced",
    "compile",
    "lower",
    "plan",
    "schedule_stages",
    "settled_options",
    "trace",
]


def compile(
    model: nn.Module,
    example_inputs: Any,
    *,
    loss: Callable[..., Any] | None = None,
    example_target: Any = None,
    optimizer: Factory | None = None,
    options: CompileOptions | None = None,
    source: Path | None = None,
    after_each: Observer | None = None,
    progress: Progress = lambda name, share: None,
    edited: EditedPlan | None = None,
    **choices: Any,
) -> CompiledProgram:
    """Compile a model for several ranks.

    `example_inputs` is one micro-batch: a tuple of positional or a dict of keyword
    inputs. `example_target` is a target of `loss(output, target)` for them. `optimizer`
    takes (name, parameter) pairs; its state counts towards the memory. Choices are
    the fields of `CompileOptions`: `ranks=4, schedule="1f1b", micro_batches=8`. An
    `edited` plan replaces them all. `progress(block, share)` is called while
    `profile=True` measures blocks.

    The model's parameters and buffers and the random generators are left unchanged;
    a `memory_format` changes how they lie in memory.

    Raises:
        GemscError: the model or an option cannot be compiled; it says where and why.
    """
    options = replace(options or CompileOptions(), **choices)
    with edited.lines() if edited else nullcontext():
        if edited is not None:
            options = edited.options()
        traced = trace(
            model,
            example_inputs,
            loss=loss,
            example_target=example_target,
            optimizer=optimizer,
            frontend=options.frontend,
            precision=options.precision,
            memory_format=options.memory_format,
            check=options.check,
            hardware=read_hardware(options.hardware),
            profile=options.profile,
            device=torch.device(options.device) if options.device else None,
            progress=progress,
            after_each=after_each,
        )
        if edited is not None:
            edited.check(traced.program.blocks or ())
            kept = *options.whole, *edited.taken_out(traced.program)
            options = replace(options, whole=kept)
        placed = edited.placed() if edited is not None else None
        program = lower(
            traced, options, placed=placed, source=source, after_each=after_each
        )
        if edited is not None:
            edited.check_shared(program.plan)
        return program


def trace(
    model: nn.Module,
    example_inputs: Any,
    *,
    loss: Callable[..., Any] | None = None,
    example_target: Any = None,
    optimizer: Factory | None = None,
    frontend: str = "record",
    precision: str = "float32",
    memory_format: str = "as-given",
    check: bool = True,
    evaluates: bool = True,
    hardware: Hardware | None = None,
    profile: bool = False,
    device: torch.device | None = None,
    progress: Progress = lambda name, share: None,
    after_each: Observer | None = None,
) -> Traced:
    """Trace a model in both modes and find its blocks: what no plan changes.

    Seconds are those of the hardware's device, the shipped default if None; or measured
    here, on the `device`, if `profile`. Without `evaluates` the result can be planned,
    not compiled.
    """
    record = choose("frontend", frontend, FRONTENDS)
    convert(model, memory_format)
    example_inputs = converted(normalize_inputs(example_inputs), memory_format)
    feed = {"loss": loss, "target": example_target}
    how = {**feed, "autocast": autocast_of(model, precision)}
    trains, run = loss is not None, Runs(after_each)

    def compare(program: Program) -> None:
        check_against_eager(program, model, example_inputs, **feed, training=trains)

    def prepared(opaque: Mapping[str, Opaque]) -> Program:
        program = record(model, example_inputs, training=trains, opaque=opaque, **how)
        annotate = Annotate(device=hardware.device if hardware else None)
        try:
            cut = SeparateTowers(), DetectSkips(), GroupBlocks()
            program = run(program, Canonicalize(), annotate, *cut)
        except Exception as error:
            if check and not isinstance(error, GemscError):  # is it the model?
                compare(program)
            raise
        parameters = dict(program.module.named_parameters())
        if optimizer is not None and trains:
            check_optimizer(parameters, optimizer)
        factory = optimizer if trains else None
        program = replace(
            program,
            optimizer_bytes=optimizer_bytes(parameters, factory),
            updated_whole=cache(partial(updated_whole, parameters, factory)),
        )
        if check:
            compare(program)
        if profile:
            given = example_inputs, example_target
            timed = TimeBlocks(*given, device=device, progress=progress)
            program = run(program, timed)
        return program

    with _one_thread():
        program = prepared({})
        if not evaluates:
            return Traced(program, program, None)
        known = opaques(program.module)
        evaluation = record(model, example_inputs, training=False, opaque=known, **how)
        found = opaques(evaluation.module)
        if found.keys() != known.keys():  # what is not cut in one mode is in neither
            program = prepared(found)
        evaluation = run(evaluation, Canonicalize(), FollowOrder(program))
    return Traced(program, evaluation, find_twins(program, evaluation))


def lower(
    traced: Traced,
    options: CompileOptions,
    *,
    placed: Placed | None = None,
    source: Path | None = None,
    after_each: Observer | None = None,
) -> CompiledProgram:
    """Cut a traced model into stages, schedule them, write their text and prove it.

    `placed` are the branches of each rank, where a plan has them.
    """
    run = Runs(after_each)
    candidates, options = settled_options(traced, options, run)
    done = schedule_stages(traced, options, run, placed=placed)
    whole, tiles = evaluate(traced, done, options, run)
    steps = tuple(find_loops(order) for order in done.timeline.orders)
    plan = _planned(traced, done, options, source)
    compilation = Compilation(whole, tiles, steps, plan)
    files = rank_modules(compilation)
    prove_files(files, compilation, done.task)
    return CompiledProgram(replace(compilation, files=files), candidates)


def plan(
    traced: Traced, options: CompileOptions, source: Path | None = None
) -> tuple[tuple[Candidate, ...], Plan]:
    """Return what was compared and the plan of the best, without a program."""
    run = Runs()
    candidates, options = settled_options(traced, options, run)
    done = schedule_stages(traced, options, run)
    return candidates, _planned(traced, done, options, source)


def settled_options(
    traced: Traced, options: CompileOptions, run: Runs
) -> tuple[tuple[Candidate, ...], CompileOptions]:
    """Return what was compared where something is `auto`, and the options to take."""
    stage = partial(schedule_stages, traced, run=run)
    sizes, has_branches = image_sizes(traced.program), "branches" in options.open_splits
    most = most_branches(traced.program) if has_branches else 1
    settle = partial(settled, sizes=sizes, most_branches=most, stage=stage)
    if options.per_device == AUTO:
        return choose_sharing(options, _shared(traced, options), settle, stage)
    return settle(options)


def _shared(traced: Traced, options: CompileOptions) -> SharedDevice:
    device = read_hardware(options.hardware).device
    return share(traced.program, device, options.micro_batches, options.ranks)


def schedule_stages(
    traced: Traced,
    options: CompileOptions,
    run: Runs,
    *,
    every_tile: bool = True,
    hardware: Hardware | None = None,
    replicas: int = 1,
    placed: Placed | None = None,
) -> Scheduled:
    """Cut, place, split and schedule: what the options decide, before any text.

    Without `every_tile` only the first tile is lowered, and the one that holds most;
    all ranks where they share branches.
    The user's `--ranks` counts the ranks of `replicas`: advice does so, too.
    """
    choose("schedule", options.schedule, SCHEDULES)
    if options.torch_compile:
        check_torch_compile(traced.program, options)
    hardware = hardware or read_hardware(options.hardware)
    chosen = stage_layout(options)
    names = [block.name for block in traced.program.blocks or ()]
    check_blocks(options, chosen, traced.program.name, names, replicas=replicas)
    check_whole(options.whole, traced.program.module)
    balance = BalanceStages(
        num_stages=chosen.num_stages,
        kind=options.balance,
        blocks=options.blocks,
        cuts=options.cuts,
        live=chosen.live,
        grids=chosen.grids,
        link=hardware.network.link(0, 1),
        # plans of other models that differ in these alone share their stages
        rows=chosen.rows if traced.program.towers else (),
        micro_batches=chosen.micro_batches if traced.program.towers else (),
    )
    place = PlaceStages(
        chosen.placement,
        num_replicas=chosen.num_replicas,
        rows=chosen.rows,
        groups=chosen.groups,
    )
    check_statistics = CheckStatistics(chosen.num_replicas * options.data)
    mark = MarkSegments(options.recompute, options.offload)
    cut = run(traced.program, balance, check_statistics, mark)
    if any(grid.beside > 1 for grid in chosen.grids):
        link, row = hardware.network.link(0, 1), chosen.rows[0]
        choose_shards = ChooseShards(
            chosen.grids, link, options.trunk, options.whole, row, placed
        )
        cut = run(cut, choose_shards)
    program = run(cut, place, CheckTiles(), InsertComms())
    tiles: tuple[Program, ...] = (program,)
    if any(chosen.grids):
        annotate = Annotate(device=hardware.device, known=traced.facts)
        fused = 0 if options.local_batchnorm else options.fuse_halos
        cut = run(cut, FindHalos(chosen.grids, fused))

        def tile(number: int) -> Program:
            split = tile_passes(number, chosen.grids, options)
            return run(cut, *split, annotate, InsertComms(), place)

        others = set(range(1, chosen.most_ranks))
        if not every_tile and all(grid.branches == 1 for grid in chosen.grids):
            others &= {peak_tile(tile(0))}
        tiles = (tile(0), *map(tile, sorted(others)))
    if options.shard_optimizer:
        program, *split = (
            run.once((id(each), options.data), share_updates, each, options.data)
            for each in (program, *tiles)
        )
        tiles = tuple(split)
    key = (*map(id, tiles), replace(chosen, micro_batches=()))
    task = run.once(key, schedule_task, tiles, chosen, None, hardware)
    task = replace(task, micro_batches=chosen.micro_batches)
    return schedule(program, tiles, task, chosen, options, hardware)


def tile_passes(
    tile: int,
    grids: tuple[GridShape, ...],
    options: CompileOptions,
    *,
    training: bool = True,
) -> tuple[Pass, ...]:
    """Return the passes that make of stages what one tile of their grids runs."""
    local = (LocalBatchnorm(),) if options.local_batchnorm else ()
    overlap = (OverlapHalos(),) if options.overlap_halos else ()
    return (SplitTiles(grids, tile, training), *local, *overlap)


def evaluate(
    traced: Traced, done: Scheduled, options: CompileOptions, run: Runs
) -> tuple[TileProgram, tuple[TileProgram, ...]]:
    """Cut evaluation where training is cut: of the whole, and of what each tile runs.

    Where the two graphs differ in constants only, evaluation is training, and the
    model's outputs travel too.
    """
    whole, twins = done.program, traced.twins
    if twins is not None:
        graph = same_stages(whole, traced.evaluation, twins)
        evaluation = run(whole, _outputs_too(whole))
    else:
        follow = FollowStages(whole, owned_tensors(whole))
        graph = run(traced.evaluation, Annotate(training=False), follow)
        evaluation = run(graph, _outputs_alone(whole))
    found = TileProgram(whole, evaluation, twins)
    grids, halos = stage_layout(options).grids, done.tiles[0].halos
    if halos is None:  # no stage is split
        return found, (found,)
    graph = replace(graph, halos=halos.for_evaluation(twins))
    if whole.shards:
        graph = run(graph, FollowShards(whole, twins))
    splits = [
        run(graph, *tile_passes(number, grids, options, training=False))
        for number in range(len(done.tiles))
    ]
    pairs = [*zip(done.tiles, splits, strict=True)]
    same = [find_twins(*pair) if twins is not None else None for pair in pairs]
    if None not in same:
        both = [run(tile, _outputs_too(tile)) for tile in done.tiles]
    else:  # on one rank, perhaps: what they send is alike
        annotate = Annotate(training=False, known=traced.facts)
        both = [run(split, annotate, _outputs_alone(tile)) for tile, split in pairs]
        same = [None] * len(pairs)
    return found, tuple(map(TileProgram, done.tiles, both, same))


def _outputs_too(training: Program) -> InsertComms:
    """Return the pass that lets outputs travel besides all that does in training."""
    return InsertComms(outputs=True, known=training.transfers or ())


def _outputs_alone(training: Program) -> InsertComms:
    """Return the pass for another graph: its transfers have numbers of their own."""
    return InsertComms(outputs=True, first_index=len(training.transfers or ()))


def _planned(
    traced: Traced, done: Scheduled, options: CompileOptions, source: Path | None
) -> Plan:
    hardware = read_hardware(options.hardware)
    parts = done.program, done.tiles, done.task, done.timeline
    plan = make_plan(*parts, options, source, hardware)
    if options.per_device == 1:
        return plan
    note = sharing_note(_shared(traced, options), options.per_device)
    return replace(plan, notes=[*plan.notes, note])


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch use one thread: in small work more only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
