"""The whole compilation on one page: trace -> passes -> schedule -> text -> proof."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemsc.codegen.package import rank_modules, write_directory
from gemsc.codegen.read import read_ranks
from gemsc.compilation import Compilation, Traced
from gemsc.costs.hardware import Hardware, read_hardware
from gemsc.costs.optimizer_state import Factory, optimizer_bytes
from gemsc.costs.profile import Progress
from gemsc.errors import GemscError
from gemsc.frontend import FRONTENDS
from gemsc.frontend.check import check_against_eager
from gemsc.frontend.optimizer import check_optimizer
from gemsc.ir.flow import reductions
from gemsc.ir.opaque import Opaque, opaques
from gemsc.ir.program import Program
from gemsc.options import CompileOptions, choose
from gemsc.passes.canonicalize import Canonicalize
from gemsc.passes.follow_stages import find_twins
from gemsc.passes.manager import Observer, run_passes
from gemsc.passes.pipeline import graph_passes
from gemsc.passes.time_blocks import TimeBlocks
from gemsc.plan import Plan
from gemsc.planner.edited import EditedPlan
from gemsc.planner.make_plan import make_plan
from gemsc.schedules import Task
from gemsc.schedules.check import prove
from gemsc.schedules.loops import find_loops
from gemsc.search.auto import settled
from gemsc.search.candidates import Candidate
from gemsc.search.staging import Scheduled, schedule_stages, with_evaluation
from gemsc.viz.graph import draw_graph, render
from gemsc.viz.report import write_report
from gemsc.viz.timeline import write_timeline

__all__ = ["CompiledProgram", "Traced", "compile", "lower", "plan", "trace"]


@dataclass(frozen=True, repr=False)
class CompiledProgram:
    """The result of `compile`: inspect it, then write it.

    `candidates` are the options that were compared where something was `auto`, the best
    first.
    """

    compilation: Compilation
    candidates: tuple[Candidate, ...] = ()

    @property
    def plan(self) -> Plan:
        """Every decision, as plain data."""
        return self.compilation.plan

    def __repr__(self) -> str:
        """Return for example `<Net: 4 ranks, stages of 3, 4, 3, 2 blocks, 1f1b>`."""
        return f"<{self.plan.summary}>"

    def rank_modules(self) -> dict[str, str]:
        """Return the text of each rank's file, by file name."""
        return dict(self.compilation.files)

    def graph(self) -> str:
        """Return the graph of the stages as DOT text."""
        return draw_graph(self.compilation.program, self.plan)

    def write(self, directory: str | Path) -> str | None:
        """Write the program directory; return why graph.svg is missing, if it is."""
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
    inputs. `example_target` is a target of `loss(output, target)` for them. `optimizer`
    takes (name, parameter) pairs; its state counts towards the memory. Choices are
    the fields of `CompileOptions`: `ranks=4, schedule="1f1b", micro_batches=8`. An
    `edited` plan replaces them all. `progress(block, share)` is called while
    `profile=True` measures blocks.

    The model's parameters and buffers and the random generators are left unchanged.

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
            check=options.check,
            hardware=read_hardware(options.hardware),
            profile=options.profile,
            progress=progress,
            after_each=after_each,
        )
        if edited is not None:
            edited.check(traced.program.blocks or ())
        return lower(traced, options, source=source, after_each=after_each)


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
    record = choose("frontend", frontend, FRONTENDS)
    feed = {"loss": loss, "target": example_target}
    trains = loss is not None

    def compare(program: Program) -> None:
        check_against_eager(program, model, example_inputs, **feed, training=trains)

    def prepared(opaque: Mapping[str, Opaque]) -> Program:
        program = record(model, example_inputs, training=trains, opaque=opaque, **feed)
        device = hardware.device if hardware else None
        try:
            program = run_passes(program, graph_passes(device), after_each=after_each)
        except Exception as error:
            if check and not isinstance(error, GemscError):  # is it the model?
                compare(program)
            raise
        parameters = dict(program.module.named_parameters())
        if optimizer is not None and trains:
            check_optimizer(parameters, optimizer)
        state = optimizer_bytes(parameters, optimizer if trains else None)
        program = replace(program, optimizer_bytes=state)
        if check:
            compare(program)
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
    """Cut a traced model into stages, schedule them, write their text and prove it."""
    candidates, options = settled(traced, options)
    done = schedule_stages(traced, options, after_each)
    whole, tiles = with_evaluation(traced, done, options, after_each)
    steps = tuple(find_loops(order) for order in done.timeline.orders)
    compilation = Compilation(whole, tiles, steps, _planned(done, options, source))
    files = rank_modules(compilation)
    prove_files(files, compilation, done.task)
    return CompiledProgram(replace(compilation, files=files), candidates)


def prove_files(files: Mapping[str, str], compilation: Compilation, task: Task) -> None:
    """Prove what the rank files say: training, and evaluation.

    Raises:
        InternalError: the files are wrong; names stage, micro-batch and user's line.
    """
    placement = compilation.program.placement
    assert placement is not None
    training, evaluation = read_ranks(files)
    prove(evaluation, task.evaluation, groups=placement.groups)
    if not task.has_backward:
        return
    shared = reductions(compilation.program, compilation.owned)
    copies = compilation.plan.data
    prove(training, task, groups=placement.groups, shared=shared, copies=copies)


def plan(
    traced: Traced, options: CompileOptions, source: Path | None = None
) -> tuple[tuple[Candidate, ...], Plan]:
    """Return what was compared and the plan of the best, without a program."""
    candidates, options = settled(traced, options)
    return candidates, _planned(schedule_stages(traced, options), options, source)


def _planned(done: Scheduled, options: CompileOptions, source: Path | None) -> Plan:
    hardware = read_hardware(options.hardware)
    parts = done.program, done.tiles, done.task, done.timeline
    return make_plan(*parts, options, source, hardware)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch use one thread: in small work more only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
