"""From stages to a schedule that keeps to the memory of a rank."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from gemsc.base.units import show_bytes, show_enough_bytes
from gemsc.costs.hardware import Hardware
from gemsc.errors import GemscError
from gemsc.ir.program import Program
from gemsc.options import CompileOptions
from gemsc.planner.layout import StageLayout
from gemsc.planner.predict import schedule_task
from gemsc.planner.savings import fit_memory
from gemsc.schedules import SCHEDULES, Policy, Task, Timeline, run, split_last_backwards


@dataclass(frozen=True)
class Scheduled:
    """A program cut into stages, what each tile of its grids runs, and the schedule."""

    program: Program
    tiles: tuple[Program, ...]
    task: Task
    timeline: Timeline


def schedule(
    program: Program,
    tiles: tuple[Program, ...],
    task: Task,
    chosen: StageLayout,
    options: CompileOptions,
    hardware: Hardware,
) -> Scheduled:
    """Return who does what when. `task` is what the stages of the tiles cost.

    Raises:
        GemscError: it does not fit the memory cap.
    """
    policy, cap = SCHEDULES[options.schedule].policy, options.rank_memory
    timeline = run(task, policy)
    if cap is not None and max(timeline.peak_bytes) > cap:
        if "auto" in (*options.recompute, *options.offload):
            fitted = _fitted(program, tiles, chosen, policy, options, hardware)
            program, tiles, task = fitted.program, fitted.tiles, fitted.task
            timeline = fitted.timeline
        else:
            timeline = run(replace(task, memory_cap=cap), policy)
    task = replace(task, memory_cap=cap)
    if not options.torch_compile:  # a compiled backward is in one part
        timeline = split_last_backwards(task, timeline)
    return Scheduled(program, tiles, task, timeline)


def _fitted(
    program: Program,
    tiles: tuple[Program, ...],
    chosen: StageLayout,
    policy: Policy,
    options: CompileOptions,
    hardware: Hardware,
) -> Scheduled:
    """Keep to the memory cap: fewer micro-batches at a time, or less of each.

    What the first tile saves decides for all of a grid.

    Raises:
        GemscError: neither fits; says what the lowest peak found is.
    """
    cap = options.rank_memory
    assert cap is not None
    kinds = [k for k in ("recompute", "offload") if "auto" in getattr(options, k)]

    def alike(fitted: Program) -> tuple[Program, ...]:
        return tuple(replace(tile, segments=fitted.segments) for tile in tiles)

    def simulate(fitted: Program) -> Timeline:
        return run(schedule_task(alike(fitted), chosen, None, hardware), policy)

    found = []
    task = schedule_task(tiles, chosen, cap, hardware)
    with suppress(GemscError):  # it does not fit one micro-batch, all of it kept
        found.append(Scheduled(program, tiles, task, run(task, policy)))
    fit = fit_memory(tiles[0], cap, simulate, hardware.device, kinds)
    if fit.fits:
        task = schedule_task(alike(fit.program), chosen, cap, hardware)
        fitted = replace(program, segments=fit.program.segments)
        found.append(Scheduled(fitted, alike(fit.program), task, fit.timeline))
    if not found:
        raise GemscError(
            f"no choice of blocks for --{' and --'.join(kinds)} fits "
            f"{show_bytes(cap)} on each rank: the lowest peak found is "
            f"{show_enough_bytes(fit.peak_bytes)}",
            help="use more --ranks, smaller micro-batches in example_inputs(), or a "
            "larger --device-memory",
        )
    return min(found, key=lambda each: each.timeline.makespan)
