"""Cut, place, split and schedule a traced model: what the options decide."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from gemsc.base.grid_shape import GridShape
from gemsc.compilation import Traced
from gemsc.costs.hardware import Hardware, read_hardware
from gemsc.ir.constants import changing_tensors
from gemsc.ir.program import Program
from gemsc.ir.shards import Placed
from gemsc.lowering.tracing import one_thread
from gemsc.options import CompileOptions, choose
from gemsc.passes.annotate import Annotate
from gemsc.passes.balance_stages import BalanceStages
from gemsc.passes.base import Pass
from gemsc.passes.checks.statistics import (
    CheckStatistics,
    check_in_flight,
    telling_what_ties,
)
from gemsc.passes.checks.tiles import CheckTiles
from gemsc.passes.checks.torch_compile import CheckTorchCompile
from gemsc.passes.choose_shards import ChooseShards
from gemsc.passes.constants.make_again import MakeAgain
from gemsc.passes.find_halos import FindHalos
from gemsc.passes.insert_comms import InsertComms
from gemsc.passes.local_batchnorm import LocalBatchnorm
from gemsc.passes.manager import Runs
from gemsc.passes.mark_segments import MarkSegments
from gemsc.passes.overlap_halos import OverlapHalos
from gemsc.passes.place_stages import PlaceStages
from gemsc.passes.split_tiles import SplitTiles
from gemsc.planner.ending import share_updates
from gemsc.planner.fitting import Scheduled, schedule
from gemsc.planner.layout import StageLayout, check_blocks, check_whole, stage_layout
from gemsc.planner.predict import schedule_task
from gemsc.planner.traffic import peak_tile
from gemsc.schedules import SCHEDULES


@one_thread()
def schedule_stages(
    traced: Traced,
    options: CompileOptions,
    run: Runs,
    *,
    every_tile: bool = True,
    hardware: Hardware | None = None,
    placed: Placed | None = None,
) -> Scheduled:
    """Cut, place, split and schedule: what the options decide, before any text.

    Without `every_tile` only the first tile is lowered, and the one that holds most;
    all ranks where they share branches.
    """
    choose("schedule", options.schedule, SCHEDULES)
    hardware = hardware or read_hardware(options.hardware)
    chosen = stage_layout(options)
    names = [block.name for block in traced.program.blocks or ()]
    with telling_what_ties(traced.program):
        check_blocks(options, chosen, traced.program.name, names)
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
    one_graph = (CheckTorchCompile(),) if options.torch_compile else ()
    again = make_again(traced, hardware, chosen)
    cut = run(traced.program, *one_graph, balance, check_statistics, again, mark)
    if any(grid.beside > 1 for grid in chosen.grids):
        link, row = hardware.network.link(0, 1), chosen.rows[0]
        choose_shards = ChooseShards(
            chosen.grids,
            link,
            options.trunk,
            options.whole,
            row,
            placed,
            None if traced.twins is not None else traced.evaluation,
            options.data,
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
    done = schedule(program, tiles, task, chosen, options, hardware)
    check_in_flight(program, _crowded(done))
    return done


def make_again(traced: Traced, hardware: Hardware, chosen: StageLayout) -> MakeAgain:
    """Return the pass that makes constants where they are used, in both graphs."""
    graphs = traced.program, traced.evaluation
    changing = frozenset(chain.from_iterable(map(changing_tensors, graphs)))
    return MakeAgain(hardware.network.link(0, 1), chosen.grids, changing)


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
    return (SplitTiles(grids, tile, training), *local, *overlap)
