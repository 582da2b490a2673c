"""From blocks to a schedule: stages, ranks, what tiles run, who does what when."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from gemsc.base.units import show_bytes, show_enough_bytes
from gemsc.compilation import TileProgram, Traced
from gemsc.costs.hardware import read_hardware
from gemsc.errors import GemscError
from gemsc.ir.program import Program
from gemsc.ir.staged import same_stages
from gemsc.options import CompileOptions, choose
from gemsc.passes.base import Pass
from gemsc.passes.follow_stages import find_twins
from gemsc.passes.manager import Observer, run_passes
from gemsc.passes.pipeline import (
    choose_halos,
    evaluation_passes,
    stage_passes,
    tile_programs,
)
from gemsc.passes.spatial.halos import Halos
from gemsc.planner.layout import StageLayout, check_blocks, stage_layout
from gemsc.planner.predict import schedule_task
from gemsc.planner.savings import fit_memory
from gemsc.schedules import SCHEDULES, Policy, Task, Timeline, run, split_last_backwards
from gemsc.search.some_tiles import Splits, fullest_tiles

__all__ = ["Known", "Scheduled", "schedule_stages", "with_evaluation"]


@dataclass(frozen=True)
class Scheduled:
    """A program cut into stages, what each tile of its grids runs, and the schedule.

    `halos` are those with which it was split into tiles.
    """

    program: Program
    tiles: tuple[Program, ...]
    task: Task
    timeline: Timeline
    halos: Halos = field(default_factory=Halos)


@dataclass
class Known:
    """What one search has computed: choices that cut the model alike share it.

    `programs` are those after some passes, `splits` what tiles run, `tasks` what the
    stages of a program cost.
    """

    programs: dict[tuple[Pass, ...], Program] = field(default_factory=dict)
    splits: Splits = field(default_factory=dict)
    tasks: dict[tuple[object, ...], Task] = field(default_factory=dict)


def schedule_stages(
    traced: Traced,
    options: CompileOptions,
    after_each: Observer | None = None,
    *,
    known: Known | None = None,
) -> Scheduled:
    """Cut, place, split and schedule: what the options decide, before any text.

    With `known` only the first and the fullest tile are split, and nothing that is
    known there is computed again.
    """
    schedule = choose("schedule", options.schedule, SCHEDULES)
    chosen = stage_layout(options)
    names = [block.name for block in traced.program.blocks or ()]
    check_blocks(options, chosen, traced.program.name, names)
    passes = stage_passes(options, chosen)
    hardware = read_hardware(options.hardware)
    halos = Halos()
    if known is None:
        program = run_passes(traced.program, passes, after_each=after_each)
        halos = choose_halos(program, options)
        tiles = tile_programs(program, options, halos, after_each=after_each)
        task = schedule_task(tiles, chosen, None, hardware)
    else:
        program = _staged(traced.program, passes, known)
        tiles = fullest_tiles(program, options, known.splits)
        key = (passes, options.local_batchnorm)
        if key not in known.tasks:
            known.tasks[key] = schedule_task(tiles, chosen, None, hardware)
        task = replace(known.tasks[key], micro_batches=chosen.micro_batches)
    policy, cap = schedule.policy, options.device_memory
    timeline = run(task, policy)
    if cap is not None and max(timeline.peak_bytes) > cap:
        if "auto" in (*options.recompute, *options.offload):
            fitted = _fitted(program, tiles, chosen, policy, options)
            program, tiles, task = fitted.program, fitted.tiles, fitted.task
            timeline = fitted.timeline
        else:
            timeline = run(replace(task, memory_cap=cap), policy)
    task = replace(task, memory_cap=cap)
    timeline = split_last_backwards(task, timeline)
    return Scheduled(program, tiles, task, timeline, halos)


def _staged(program: Program, passes: Sequence[Pass], known: Known) -> Program:
    """Run those passes that have not run yet after the same ones before them."""
    done: tuple[Pass, ...] = ()
    for step in passes:
        done = (*done, step)
        if done not in known.programs:
            known.programs[done] = run_passes(program, (step,))
        program = known.programs[done]
    return program


def _fitted(
    program: Program,
    tiles: Sequence[Program],
    chosen: StageLayout,
    policy: Policy,
    options: CompileOptions,
) -> Scheduled:
    """Keep to the memory cap: fewer micro-batches at a time, or less of each.

    What the first tile saves decides for all of a grid.

    Raises:
        GemscError: neither fits; says how much the lowest possible peak is.
    """
    cap = options.device_memory
    assert cap is not None
    hardware = read_hardware(options.hardware)
    kinds = [k for k in ("recompute", "offload") if "auto" in getattr(options, k)]

    def alike(leaner: Program) -> tuple[Program, ...]:
        return tuple(replace(tile, segments=leaner.segments) for tile in tiles)

    def simulate(leaner: Program) -> Timeline:
        return run(schedule_task(alike(leaner), chosen, None, hardware), policy)

    found = []
    task = schedule_task(tiles, chosen, cap, hardware)
    with suppress(GemscError):  # it does not fit one micro-batch, all of it kept
        found.append(Scheduled(program, tuple(tiles), task, run(task, policy)))
    fit = fit_memory(tiles[0], cap, simulate, hardware.device, kinds)
    if fit.fits:
        task = schedule_task(alike(fit.program), chosen, cap, hardware)
        leaner = replace(program, segments=fit.program.segments)
        found.append(Scheduled(leaner, alike(fit.program), task, fit.timeline))
    if not found:
        raise GemscError(
            f"no choice of blocks for --{' and --'.join(kinds)} fits "
            f"{show_bytes(cap)} on each rank: the lowest possible peak is "
            f"{show_enough_bytes(fit.peak_bytes)}",
            help="use more --ranks, smaller micro-batches in example_inputs(), or a "
            "larger --device-memory",
        )
    return min(found, key=lambda each: each.timeline.makespan)


def with_evaluation(
    traced: Traced,
    done: Scheduled,
    options: CompileOptions,
    after_each: Observer | None = None,
) -> tuple[TileProgram, tuple[TileProgram, ...]]:
    """Cut evaluation where training is cut: of the whole, and of what each tile runs.

    Twins stay twins where the two graphs split alike, but for constants.
    """
    twins = traced.twins
    evaluation = run_passes(
        done.program if twins is not None else traced.evaluation,
        evaluation_passes(done.program, twins=twins is not None),
        after_each=after_each,
    )
    whole = TileProgram(done.program, evaluation, twins)
    if len(done.tiles) == 1:
        return whole, (whole,)
    halos = done.halos.for_evaluation(twins)
    if twins is not None:
        evaluation = same_stages(done.program, traced.evaluation, twins)
    splits = tile_programs(
        evaluation, options, halos, training=done.tiles[0], after_each=after_each
    )
    found = []
    for tile, split in zip(done.tiles, splits, strict=True):
        alike = find_twins(tile, split) if twins is not None else None
        if alike is not None:
            split = run_passes(tile, evaluation_passes(tile, twins=True))
        found.append(TileProgram(tile, split, alike))
    return whole, tuple(found)
