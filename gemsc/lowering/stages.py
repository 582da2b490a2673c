"""Cut, place, split and schedule a traced model: what the options decide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from gemsc.base.grid_shape import ALONE, GridShape
from gemsc.base.plain_forward import with_threads
from gemsc.compilation import Followed, Traced
from gemsc.costs.hardware import Hardware, read_hardware
from gemsc.costs.signature import alike_ranks
from gemsc.errors import GemscError, choose
from gemsc.ir.opaque import opaques
from gemsc.ir.program import Program
from gemsc.ir.shards import Placed
from gemsc.options import CompileOptions
from gemsc.passes.annotate import Annotate
from gemsc.passes.balance_stages import BalanceStages
from gemsc.passes.base import Pass
from gemsc.passes.checks.statistics import (
    CheckStatistics,
    check_in_flight,
    check_rows,
    telling_what_ties,
)
from gemsc.passes.checks.tiles import CheckTiles
from gemsc.passes.choose_shards import ChooseShards
from gemsc.passes.constants.make_again import MakeAgain
from gemsc.passes.find_halos import FindHalos
from gemsc.passes.follow_stages import FollowShards, FollowStages
from gemsc.passes.insert_comms import InsertComms
from gemsc.passes.local_batchnorm import LocalBatchnorm
from gemsc.passes.manager import Runs
from gemsc.passes.mark_segments import MarkSegments
from gemsc.passes.overlap_halos import OverlapHalos
from gemsc.passes.place_stages import PlaceStages
from gemsc.passes.split_tiles import SplitTiles
from gemsc.planner.at_best import schedule_at_best
from gemsc.planner.ending import share_updates
from gemsc.planner.fitting import Scheduled, Scheduling
from gemsc.planner.layout import (
    StageLayout,
    check_blocks,
    check_whole,
    stage_layout,
)
from gemsc.planner.predict import schedule_task
from gemsc.planner.traffic import peak_tile
from gemsc.schedules import SCHEDULES

Lowered = Literal["all", "unlike", "two", "none"]


@with_threads(1)
def schedule_stages(
    traced: Traced,
    options: CompileOptions,
    run: Runs,
    *,
    lowered: Lowered = "all",
    hardware: Hardware | None = None,
    placed: Placed | None = None,
    like: Followed | None = None,
) -> Scheduled:
    """Cut, place, split and schedule: what the options decide, before any text.

    Of a stage's ranks "all" are `lowered`; those that are "unlike" all others, which is
    as exact but has no text for each; or "two", the first and the one that holds most,
    and all where they share branches. Where "none" is, see `schedule_at_best`. Stages
    are those of a graph that this one is `like`.
    """
    _check(traced, options)
    hardware = hardware or read_hardware(options.hardware)
    chosen = stage_layout(options)
    balance = _balance(traced, options, chosen, hardware)
    again = make_again(traced, hardware, chosen)
    if like is None:
        with telling_what_ties(traced.program):
            check_blocks(options, chosen, traced.program)
    choose_stages = balance if like is None else _following(like, traced)
    cut = _cut(traced, options, chosen, (choose_stages, again), run)
    place = PlaceStages(chosen.placement, chosen.rows, chosen.groups)
    if lowered == "none":
        alone = replace(place, groups=(ALONE,) * len(chosen.groups))
        program = run(cut, alone, InsertComms())
        shares = _shares(traced, balance, chosen, run)
        return schedule_at_best(program, chosen, options, hardware, shares, run.once)
    if any(grid.beside > 1 for grid in chosen.grids):
        choose_shards = _choose_shards(traced, options, chosen, hardware, placed)
        cut = run(
            cut,
            choose_shards
            if like is None
            else _sharing(like, options, traced.program.name),
        )
    program = run(cut, place, CheckTiles(), InsertComms())
    tiles: tuple[Program, ...] = (program,)
    if any(chosen.grids):
        annotate = Annotate(device=hardware.device, known=traced.facts)
        fused = 0 if options.local_batchnorm else options.fuse_halos
        cut = run(cut, FindHalos(chosen.grids, fused))

        def tile(number: int) -> Program:
            split = tile_passes(number, chosen.grids, options)
            return run(cut, *split, annotate, InsertComms(), place)

        tiles = _tiles(tile, chosen, lowered)
    if options.shard != "off":
        program, *split = (
            run.once(
                (id(unshared), options.data, options.shard),
                *(share_updates, unshared, options.data, options.shard),
            )
            for unshared in (program, *tiles)
        )
        tiles = tuple(split)
    key = (*map(id, tiles), replace(chosen, micro_batches=()))
    task = run.once(key, schedule_task, tiles, chosen, None, hardware)
    task = replace(task, micro_batches=chosen.micro_batches)
    scheduling = Scheduling(chosen, options, hardware)
    way = scheduling.keeping_whole if program.whole_stages else scheduling.schedule
    done = way(program, tiles, task)
    check_in_flight(program, _crowded(done))
    return done


def _check(traced: Traced, options: CompileOptions) -> None:
    """Refuse options that do not go with the model."""
    choose("schedule", options.schedule, SCHEDULES)
    check_whole(options.whole, traced.program.module)
    splits = SCHEDULES[options.schedule].policy.split_backward
    asks = options.torch_compile or splits
    for path, opaque in opaques(traced.program.module).items() if asks else ():
        if options.torch_compile:
            raise GemscError(
                f"--torch-compile cannot be combined with {path}, which stays whole: "
                f"{opaque.why}",
                at=opaque.at,
                help="leave out --torch-compile",
            )
        if opaque.differentiates:
            raise GemscError(
                f"--schedule {options.schedule} cannot be used with {path}, whose "
                "forward calls torch.autograd.grad: weight gradients cannot wait there",
                at=opaque.at,
                help="use 1f1b, interleaved or chimera",
            )
    for program in traced.graphs if options.shard == "weights" else ():
        check_rows(program)
    if traced.is_phase and options.shard in ("gradients", "weights"):
        raise GemscError(
            f"--shard {options.shard} cannot be combined with phases: each phase "
            "trains only part of what a stage holds",
            help="use --shard optimizer",
        )


def _balance(
    traced: Traced, options: CompileOptions, chosen: StageLayout, hardware: Hardware
) -> BalanceStages:
    """Return the pass that chooses the cuts."""
    has_towers = bool(traced.program.towers)
    return BalanceStages(
        num_stages=chosen.num_stages,
        kind=options.balance,
        blocks=options.blocks,
        cuts=options.cuts,
        live=chosen.live,
        grids=_different(chosen.grids),
        link=hardware.network.link(0, 1),
        # plans of other models that differ in these alone share their stages
        rows=chosen.rows if has_towers else (),
        micro_batches=chosen.micro_batches if has_towers else (),
    )


def _choose_shards(
    traced: Traced,
    options: CompileOptions,
    chosen: StageLayout,
    hardware: Hardware,
    placed: Placed | None,
) -> ChooseShards:
    """Return the pass that chooses what the ranks of a stage share."""
    evaluation = dict(zip(("evaluation",), traced.graphs[1:], strict=False))
    return ChooseShards(
        chosen.grids,
        hardware.network.link(0, 1),
        options.trunk,
        options.whole,
        chosen.rows[0],
        placed,
        evaluation | traced.beside,
        traced.program,
        options.data,
    )


def _sharing(like: Followed, options: CompileOptions, name: str) -> FollowShards:
    """Return the pass that shares stages as those of another graph are."""
    first = like.compilation.program
    names = {name: twin.name for name, twin in (like.twins or {}).items()}
    forks = (fork for stage in first.shards.values() for fork in stage.forks)
    are_known = all(node in names for fork in forks for node in fork.nodes)
    trunk = "whole" if options.trunk == "whole" else "auto"
    return FollowShards(first, names if names and are_known else None, trunk, name)


def _following(like: Followed, traced: Traced) -> FollowStages:
    first = like.compilation
    name = traced.program.name
    return FollowStages(first.program, first.owned, name, like.twins)


def _shares(
    traced: Traced, balance: BalanceStages, chosen: StageLayout, run: Runs
) -> dict[GridShape, Any]:
    """Return what one rank of each grid has of each block."""
    program, blocks = traced.program, traced.program.blocks or ()
    return {
        grid: run.once(("shares", grid), balance.shares, program, blocks, grid)
        for grid in {*chosen.grids}
    }


def replicas_of(options: CompileOptions, chosen: StageLayout) -> tuple[int, bool]:
    """Return how many replicas run a model, and if each has weights of its own."""
    return chosen.num_replicas * options.data, chosen.num_replicas == 1


def _cut(
    traced: Traced,
    options: CompileOptions,
    chosen: StageLayout,
    passes: tuple[Pass, MakeAgain],
    run: Runs,
) -> Program:
    """Return the program with its stages; the same one for all that cut it alike."""
    choose_stages, again = passes
    cut = run(traced.program, choose_stages)
    edges = tuple(len(stage.blocks) for stage in cut.require_stages())
    cut = run.once(("cut", id(traced.program), edges), lambda same: same, cut)
    check_statistics = CheckStatistics(*replicas_of(options, chosen))
    follows = isinstance(choose_stages, FollowStages)
    mark = MarkSegments(options.recompute, options.offload, follows)
    return run(cut, check_statistics, again, mark)


def _tiles(
    tile: Callable[[int], Program], chosen: StageLayout, lowered: Lowered
) -> tuple[Program, ...]:
    """Return what the ranks of the largest grid run, or some of them."""
    first, others = tile(0), range(1, chosen.most_ranks)
    if lowered == "all" or any(grid.branches > 1 for grid in chosen.grids):
        return first, *map(tile, others)
    if lowered == "two":
        return first, *map(tile, {peak_tile(first)} - {0})
    if any(grid.tiles for grid in chosen.grids):
        return first, *map(tile, others)
    return tuple(map(tile, alike_ranks(first)))


def _different(grids: tuple[GridShape, ...]) -> tuple[GridShape, ...]:
    """Return the grids by which stages are weighed: none where all share all alike."""
    alike = len({*grids}) == 1 and not grids[0].tiles and grids[0].shards > 1
    return () if alike else grids


def make_again(traced: Traced, hardware: Hardware, chosen: StageLayout) -> MakeAgain:
    """Return the pass that makes constants where they are used, in both graphs."""
    return MakeAgain(hardware.network.link(0, 1), chosen.grids, traced.changing)


def _crowded(done: Scheduled) -> set[int]:
    """Return the stages of ranks that have several micro-batches in flight."""
    live, rows = done.timeline.peak_live, done.task.placement
    pairs = ((stage, rank) for row in rows for stage, rank in enumerate(row))
    return {stage for stage, rank in pairs if live[rank] > 1}


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
    split = SplitTiles(grids, tile, training, options.attention == "ring")
    return (split, *local, *overlap)
