"""The whole compilation on one page: trace -> passes -> schedule -> check -> text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import fx, nn

from gemsc.codegen.package import rank_modules, write_directory
from gemsc.compilation import Compilation, TileProgram
from gemsc.errors import GemscError
from gemsc.frontend import FRONTENDS
from gemsc.frontend.check import check_against_eager
from gemsc.ir.opaque import Opaque, opaques
from gemsc.ir.program import Program
from gemsc.ir.staged import same_stages
from gemsc.options import CompileOptions
from gemsc.passes.canonicalize import Canonicalize
from gemsc.passes.follow_stages import find_twins
from gemsc.passes.manager import Observer, run_passes
from gemsc.passes.pipeline import (
    choose_halos,
    evaluation_passes,
    graph_passes,
    stage_passes,
    tile_programs,
)
from gemsc.passes.some_tiles import Splits, fullest_tiles
from gemsc.passes.spatial.halos import Halos
from gemsc.passes.time_blocks import TimeBlocks
from gemsc.plan import Plan
from gemsc.planner.advice import nothing_fits
from gemsc.planner.candidates import Candidate, alternatives, is_open, ranked
from gemsc.planner.edited import EditedPlan
from gemsc.planner.grids import picture_sizes
from gemsc.planner.hardware import Hardware, read_hardware
from gemsc.planner.layout import Layout, layout
from gemsc.planner.optimizer_state import Factory, optimizer_bytes
from gemsc.planner.predict import (
    make_plan,
    micro_batch_size,
    reduced_bytes,
    schedule_task,
    sent_bytes,
)
from gemsc.planner.profile import Progress
from gemsc.planner.prove import prove
from gemsc.planner.savings import fit_memory
from gemsc.schedules import SCHEDULES, Policy, Task, Timeline, run
from gemsc.schedules.loops import find_loops
from gemsc.units import show_bytes
from gemsc.viz.graph import draw, render
from gemsc.viz.report import write_report
from gemsc.viz.timeline import write_timeline

__all__ = ["CompiledProgram", "Traced", "compile", "lower", "trace"]

Choice = TypeVar("Choice")


@dataclass(frozen=True)
class CompiledProgram:
    """What `compile` returns: look at it, then write it.

    `candidates` are what was compared where something was `auto`, best first.
    """

    compilation: Compilation
    candidates: tuple[Candidate, ...] = ()

    @property
    def plan(self) -> Plan:
        """Every decision, as plain data."""
        return self.compilation.plan

    def rank_modules(self) -> dict[str, str]:
        """Return the text of each rank's file, by file name."""
        return rank_modules(self.compilation)

    def graph(self) -> str:
        """Return the picture of the stages as DOT text."""
        return draw(self.compilation.program)

    def write(self, directory: str | Path) -> str | None:
        """Write the program directory; return why there is no graph.svg, if so."""
        folder = Path(directory)
        write_directory(self.compilation, folder)
        write_timeline(self.plan, folder / "timeline.svg")
        missing = render(self.graph(), folder / "graph.svg")
        write_report(self.plan, folder, self.candidates, with_graph=missing is None)
        return missing


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
    inputs. `example_target` is what `loss(output, target)` takes with them. `optimizer`
    takes (name, parameter) pairs; its state counts towards the memory. Choices are
    the fields of `CompileOptions`: `ranks=4, schedule="1f1b", micro_batches=8`. An
    `edited` plan decides them all. `progress(block, share)` is told how far
    `profile=True` has come.

    The model's parameters, buffers and the random generators stay as they are.

    Raises:
        GemscError: the model or an option cannot be compiled; says where and why.
    """
    options = replace(options or CompileOptions(), **choices)
    if edited is not None:
        options = edited.options()
    traced = trace(
        model,
        example_inputs,
        loss=loss,
        example_target=example_target,
        optimizer=optimizer,
        frontend=options.frontend,
        check=options.check,
        hardware=read_hardware(options.hardware),
        profile=options.profile,
        progress=progress,
        after_each=after_each,
    )
    if edited is not None:
        edited.check(traced.program.blocks or ())
    return lower(traced, options, source=source, after_each=after_each)


@dataclass(frozen=True)
class Traced:
    """A model as a graph cut into blocks, for any number of ranks.

    `evaluation` is the graph in evaluation mode; `twins` maps nodes of the one to nodes
    of the other if they differ in constants only.
    """

    program: Program
    evaluation: Program
    twins: dict[fx.Node, fx.Node] | None


def trace(
    model: nn.Module,
    example_inputs: Any,
    *,
    loss: Callable[..., Any] | None = None,
    example_target: Any = None,
    optimizer: Factory | None = None,
    frontend: str = "record",
    check: bool = True,
    evaluates: bool = True,
    hardware: Hardware | None = None,
    profile: bool = False,
    progress: Progress = lambda name, share: None,
    after_each: Observer | None = None,
) -> Traced:
    """Trace a model in both modes and find its blocks: what no plan changes.

    Seconds are those of the hardware's device, the shipped default if None; or measured
    here if `profile`. Without `evaluates` the result can be planned, not compiled.
    """
    record = _choose("frontend", frontend, FRONTENDS)
    feed = {"loss": loss, "target": example_target}
    trains = loss is not None

    def prepared(opaque: Mapping[str, Opaque]) -> Program:
        program = record(model, example_inputs, training=trains, opaque=opaque, **feed)
        device = hardware.device if hardware else None
        program = run_passes(program, graph_passes(device), after_each=after_each)
        parameters = dict(program.module.named_parameters())
        state = optimizer_bytes(parameters, optimizer if trains else None)
        program = replace(program, optimizer_bytes=state)
        if check:
            check_against_eager(program, model, example_inputs, **feed, training=trains)
        if profile:
            timed = TimeBlocks(example_inputs, example_target, progress=progress)
            program = run_passes(program, (timed,), after_each=after_each)
        return program

    with _one_thread():
        program = prepared({})
        if not evaluates:
            return Traced(program, program, None)
        known = opaques(program.module)
        evaluation = record(model, example_inputs, training=False, opaque=known, **feed)
        found = opaques(evaluation.module)
        if found.keys() != known.keys():  # what is not cut in one mode is in neither
            program = prepared(found)
        evaluation = run_passes(evaluation, (Canonicalize(),), after_each=after_each)
    return Traced(program, evaluation, find_twins(program, evaluation))


def lower(
    traced: Traced,
    options: CompileOptions,
    *,
    source: Path | None = None,
    after_each: Observer | None = None,
) -> CompiledProgram:
    """Cut a traced model into stages, schedule them, prove the schedule."""
    candidates, options = _settled(traced, options)
    done = schedule_stages(traced, options, after_each)
    program, task, timeline = done.program, done.task, done.timeline
    evaluation = run_passes(
        program if traced.twins is not None else traced.evaluation,
        evaluation_passes(program, twins=traced.twins is not None),
        after_each=after_each,
    )
    whole = TileProgram(program, evaluation, traced.twins)
    tiles = _with_evaluation(traced, whole, done.tiles, options, after_each)
    prove(tiles[0].program, tiles[0].evaluation, task, timeline)
    hardware = read_hardware(options.hardware)
    plan = make_plan(program, done.tiles, task, timeline, options, source, hardware)
    steps = tuple(find_loops(order) for order in timeline.orders)
    compilation = Compilation(whole, tiles, steps, plan)
    return CompiledProgram(compilation, candidates)


def plan(
    traced: Traced, options: CompileOptions, source: Path | None = None
) -> tuple[tuple[Candidate, ...], Plan]:
    """Return what was compared and the plan of the best, without a program."""
    candidates, options = _settled(traced, options)
    done = schedule_stages(traced, options)
    hardware = read_hardware(options.hardware)
    parts = done.program, done.tiles, done.task, done.timeline
    return candidates, make_plan(*parts, options, source, hardware)


def _settled(
    traced: Traced, options: CompileOptions
) -> tuple[tuple[Candidate, ...], CompileOptions]:
    """Return the candidates, if anything is open, and options that leave nothing so."""
    for name in ("recompute", "offload"):
        if "auto" in getattr(options, name) and options.device_memory is None:
            raise GemscError(
                f"--{name} auto needs to know how much memory a rank has",
                help="add --device-memory 16GiB",
            )
    if not is_open(options):
        return (), options
    candidates = search(traced, options)
    return candidates, candidates[0].options


@dataclass(frozen=True)
class Scheduled:
    """A program cut into stages, what each tile of its grids runs, and the schedule."""

    program: Program
    tiles: tuple[Program, ...]
    task: Task
    timeline: Timeline


def schedule_stages(
    traced: Traced,
    options: CompileOptions,
    after_each: Observer | None = None,
    *,
    known: Splits | None = None,
) -> Scheduled:
    """Cut, place, split and schedule: what the options decide, before any text.

    With `known` only the first and the fullest tile are split, if not known there.
    """
    schedule = _choose("schedule", options.schedule, SCHEDULES)
    chosen = layout(options)
    passes = stage_passes(options, chosen)
    program = run_passes(traced.program, passes, after_each=after_each)
    if known is None:
        halos = choose_halos(program, options)
        tiles = tile_programs(program, options, halos, after_each=after_each)
    else:
        tiles = fullest_tiles(program, options, known)
    network = read_hardware(options.hardware).network
    task = schedule_task(tiles, chosen, None, network)
    timeline = run(task, schedule.policy)
    cap = options.device_memory
    if cap is None or max(timeline.peak_bytes) <= cap:
        return Scheduled(program, tiles, replace(task, memory_cap=cap), timeline)
    if "auto" in (*options.recompute, *options.offload):
        return _fitted(program, chosen, schedule.policy, options)
    task = replace(task, memory_cap=cap)
    return Scheduled(program, tiles, task, run(task, schedule.policy))


def _with_evaluation(
    traced: Traced,
    whole: TileProgram,
    tiles: tuple[Program, ...],
    options: CompileOptions,
    after_each: Observer | None,
) -> tuple[TileProgram, ...]:
    """Return what each tile runs, with its evaluation.

    Twins stay twins where the two graphs split alike, but for constants.
    """
    if len(tiles) == 1:
        return (whole,)
    evaluation, halos = whole.evaluation, Halos()
    if traced.twins is not None:
        halos = choose_halos(whole.program, options).of_twin(traced.twins)
        evaluation = same_stages(whole.program, traced.evaluation, traced.twins)
    splits = tile_programs(
        evaluation, options, halos, training=tiles[0], after_each=after_each
    )
    found = []
    for tile, split in zip(tiles, splits, strict=True):
        twins = find_twins(tile, split) if traced.twins is not None else None
        if twins is not None:
            split = run_passes(tile, evaluation_passes(tile, twins=True))
        found.append(TileProgram(tile, split, twins))
    return tuple(found)


def _fitted(
    program: Program, chosen: Layout, policy: Policy, options: CompileOptions
) -> Scheduled:
    """Keep to the memory cap: fewer micro-batches at a time, or less of each.

    Raises:
        GemscError: neither fits; says how much the leanest needs.
    """
    cap = options.device_memory
    assert cap is not None
    network = read_hardware(options.hardware).network
    kinds = [k for k in ("recompute", "offload") if "auto" in getattr(options, k)]

    def simulate(leaner: Program) -> Timeline:
        return run(schedule_task((leaner,), chosen, None, network), policy)

    found = []
    task = schedule_task((program,), chosen, cap, network)
    with suppress(GemscError):  # it does not fit one micro-batch, all of it kept
        found.append(Scheduled(program, (program,), task, run(task, policy)))
    fit = fit_memory(program, cap, simulate, kinds)
    if fit.fits:
        task = schedule_task((fit.program,), chosen, cap, network)
        found.append(Scheduled(fit.program, (fit.program,), task, fit.timeline))
    if not found:
        raise GemscError(
            f"no choice of blocks for --{' and --'.join(kinds)} fits "
            f"{show_bytes(cap)} on each rank: the leanest needs "
            f"{show_bytes(fit.peak_bytes)}",
            help="use more --ranks, smaller micro-batches in example_inputs(), or a "
            "larger --device-memory",
        )
    return min(found, key=lambda each: each.timeline.makespan)


def search(traced: Traced, options: CompileOptions) -> tuple[Candidate, ...]:
    """Return all that agrees with the options, best first.

    What does not fit the memory cap is tried again with some blocks recomputed.

    Raises:
        GemscError: nothing fits; says what would.
    """
    known: Splits = {}
    choices = alternatives(options, picture_sizes(traced.program))
    found = [assess(traced, each, known) for each in choices]
    leaner = [each.options for each in found if each.may_recompute()]
    found += [assess(traced, replace(o, recompute=("auto",))) for o in leaner]
    found = ranked(found)
    while options.open_tiles and found[0].fits():
        exact = assess(traced, found[0].options)  # of all tiles
        found[0] = exact
        if exact.fits():
            break
        found = ranked(found)
    if not found[0].fits():
        raise nothing_fits(found, lambda other: assess(traced, other))
    return tuple(found)


def assess(
    traced: Traced, options: CompileOptions, known: Splits | None = None
) -> Candidate:
    """Return what is predicted for one choice.

    With `known` by the first and the fullest tile of a grid only; it keeps what they
    run, for other choices that cut the model alike.
    """
    uncapped = replace(options, device_memory=None)
    try:
        done = schedule_stages(traced, uncapped, known=known)
    except GemscError as error:
        return Candidate(options, problem=error.message)
    if options.device_memory and max(done.timeline.peak_bytes) > options.device_memory:
        with suppress(GemscError):  # there may be an order that holds less at a time
            done = schedule_stages(traced, options, known=known)
    peaks, sums = done.timeline.peak_bytes, reduced_bytes(done.program, options.data)
    link = read_hardware(options.hardware).network.intra
    fullest = max(range(len(peaks)), key=lambda group: peaks[group])
    size = micro_batch_size(done.program)
    return Candidate(
        options,
        seconds=done.timeline.makespan + link.seconds(2 * max(sums)),
        samples=options.data * sum(done.task.micro_batches) * size,
        micro_batch_size=size,
        peak_bytes=peaks[fullest],
        activation_bytes=done.timeline.peak_activation_bytes[fullest],
        bubble=done.timeline.bubble,
        sent_bytes=sent_bytes(done.tiles[0], done.task) + sum(sums),
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch use one thread: in small work more only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _choose(what: str, name: str, table: Mapping[str, Choice]) -> Choice:
    if name not in table:
        raise GemscError(
            f"unknown {what} '{name}'", help=f"choose one of {', '.join(table)}"
        )
    return table[name]
