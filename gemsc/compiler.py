"""The whole compilation on one page: trace -> passes -> schedule -> text -> proof."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemsc.base.elementwise import OptimizerFactory
from gemsc.base.examples import Examples
from gemsc.base.nests import tensor_leaves
from gemsc.base.phase import Phase
from gemsc.codegen.package import rank_modules, write_directory
from gemsc.codegen.read import read_ranks
from gemsc.compilation import Compilation, Traced
from gemsc.costs.hardware import read_hardware
from gemsc.costs.profile import Progress
from gemsc.costs.sharing import SharedDevice
from gemsc.errors import GemscError, InternalError
from gemsc.ir.flow import reductions
from gemsc.ir.invariants import drawn_alike, lost_nothing
from gemsc.ir.shards import Placed
from gemsc.lowering.evaluation import evaluate
from gemsc.lowering.stages import schedule_stages
from gemsc.lowering.tracing import trace
from gemsc.lowering.variants import (
    as_family,
    find_largest,
    followed,
    knowing_all,
    of_shapes,
    options_of,
    trace_all,
    with_blocks_of,
    with_one_ownership,
)
from gemsc.options import AUTO, CompileOptions
from gemsc.passes.branches.forks import most_branches
from gemsc.passes.manager import Observer, Runs
from gemsc.passes.share_device import share
from gemsc.plan import COMPARED, Plan
from gemsc.planner.edited import EditedPlan
from gemsc.planner.fitting import Scheduled
from gemsc.planner.make_plan import make_plan
from gemsc.schedules import Task
from gemsc.schedules.check import prove
from gemsc.schedules.loops import find_loops
from gemsc.search.auto import Tell, settled, telling_what_fits
from gemsc.search.candidates import Candidate, image_sizes
from gemsc.search.sharing import choose_sharing, sharing_note
from gemsc.verify.first_step import first_step
from gemsc.verify.step_size import fewer, smaller
from gemsc.viz.graph import draw_graph, render
from gemsc.viz.report import write_report
from gemsc.viz.timeline import write_timeline
from gemsc.weights.elsewhere import Elsewhere
from gemsc.weights.keras_model import as_module
from gemsc.weights.on_meta import check_buffers, is_on_meta, standing

__all__ = [
    "CompiledProgram",
    "Traced",
    "compile",
    "find_largest",
    "lower",
    "plan",
    "schedule_stages",
    "settled_options",
    "trace",
    "trace_all",
]


def compile(
    model: nn.Module,
    example_inputs: Any,
    *,
    loss: Callable[..., Any] | None = None,
    example_target: Any = None,
    optimizer: OptimizerFactory | None = None,
    phases: Sequence[Phase] = (),
    metrics: Any = None,
    options: CompileOptions | None = None,
    source: Path | None = None,
    after_each: Observer | None = None,
    progress: Progress = lambda name, share: None,
    edited: EditedPlan | None = None,
    elsewhere: Elsewhere | None = None,
    **choices: Any,
) -> CompiledProgram:
    """Compile a model for several ranks.

    `example_inputs` is one micro-batch: a tuple of positional or a dict of keyword
    inputs. `example_target` is a target of `loss(output, target)` for them. `optimizer`
    takes (name, parameter) pairs; its state counts towards the memory. Where batches
    may have several shapes, inputs and target are lists, of one for each. Where a step
    has several `phases`, they have losses and optimizers of their own. Choices are the
    fields of `CompileOptions`: `ranks=4, schedule="1f1b", micro_batches=8`. An `edited`
    plan replaces them all. `metrics`, as in a model's file, are tried on the examples:
    if they fail, a warning says so. `progress(block, share)` is called while
    `profile=True` measures blocks.

    What the model has on the meta device the program has not either: its ranks find it
    `elsewhere`, or it is imported later. Without weights nothing is compared with it.

    The model's parameters and buffers and the random generators are left unchanged; a
    `memory_format` changes how they lie in memory, its `train()` what it freezes.

    Raises:
        GemscError: the model or an option cannot be compiled; it says where and why.
    """
    model, loss = as_module(model), as_module(loss)
    options = replace(options or CompileOptions(), **choices)
    has_weights = not is_on_meta(model)
    is_held = elsewhere is None and has_weights
    elsewhere = None if is_held else elsewhere or Elsewhere.of(model)
    check_buffers(model)
    with standing(model), edited.lines() if edited else nullcontext():
        if edited is not None:
            options = edited.options()
        traced_as = partial(
            trace,
            frontend=options.frontend,
            precision=options.precision,
            memory_format=options.memory_format,
            check=options.check and has_weights,
            is_limited=not is_held,
            hardware=read_hardware(options.hardware),
            profile=options.profile,
            device=torch.device(options.device) if options.device else None,
            progress=progress,
            after_each=after_each,
            constants={},
        )
        given = model, example_inputs
        feed = {"loss": loss, "example_target": example_target, "phases": phases}
        graphs = trace_all(traced_as, *given, **feed, optimizer=optimizer)
        examples = Examples.of(example_inputs, example_target)
        how: dict[str, Any] = {"source": source, "after_each": after_each}
        if edited is None:
            program = lower(graphs, options, examples=examples, **how)
        else:
            program = _lower_as(edited, graphs, examples, **how)
        program = program.with_plan(numbers=_numbers(examples))
        if options.check:
            facts = {"unchecked": "the model has no weights here"}
            if has_weights:
                facts = first_step(program.compilation, *given, **feed, metrics=metrics)
                is_compared = facts["unchecked"] in COMPARED
                steps = () if is_compared else smaller(program.plan, model, examples)
                for few, size in steps:
                    step = program.plan, model, few, size, feed
                    if less := _smaller_step(*step, traced_as, graphs, metrics):
                        facts |= less
                        break
            program = program.with_plan(**facts)
        held = replace(program.compilation, elsewhere=elsewhere)
        return replace(program, compilation=held)


def _numbers(examples: Examples) -> list[dict[str, Any]]:
    """Return the numbers of the examples, which the program has as constants."""
    if len(examples.inputs) > 1:  # they may tell the shapes apart
        return []
    sources = {"input": examples.inputs[0], "target": examples.targets[0]}
    numbers = tensor_leaves(sources, kind=(bool, int, float))
    return [{"path": list(path), "value": value} for path, value in numbers]


def _lower_as(
    edited: EditedPlan, graphs: Mapping[str, Traced], examples: Examples, **how: Any
) -> CompiledProgram:
    """Return the program of a plan."""
    first, options = graphs[find_largest(graphs)].program, edited.options()
    edited.check(first.blocks or ())
    whole = *options.whole, *edited.taken_out(first)
    given = {"placed": edited.placed(), "examples": examples, **how}
    program = lower(graphs, replace(options, whole=whole), **given)
    edited.check_shared(program.plan)
    edited.say_ignored(program.plan)
    return program


def _smaller_step(
    plan: Plan,
    model: nn.Module,
    few: Examples,
    size: str,
    feed: Mapping[str, Any],
    traced_as: Callable[..., Traced],
    graphs: Mapping[str, Traced],
    metrics: Any = None,
) -> dict[str, Any]:
    """Compare a step of less, compiled by the same plan, with the same blocks.

    Return what the program's plan says of it: nothing, where none can be compared.
    """
    inputs, target = few.given
    given = {**feed, "example_target": target}
    how: dict[str, Any]
    how = {"check": False, "profile": False, "after_each": None, "constants": {}}
    try:
        with redirect_stderr(StringIO()):  # what it warns of has been said
            traced = trace_all(partial(traced_as, **how), model, inputs, **given)
            traced = with_blocks_of(graphs, traced)
            small = _lower_as(EditedPlan.of(fewer(plan)), traced, few)
    except (GemscError, InternalError):  # less does not fit, or does something else
        return {}
    facts = first_step(small.compilation, model, inputs, **given, metrics=metrics)
    if facts["unchecked"] not in COMPARED:
        return {}
    note = f"compared with the model in a step of {size}"
    return {**facts, "notes": [*plan.notes, note]}


def lower(
    traced: Traced | Mapping[str, Traced],
    options: CompileOptions,
    *,
    placed: Placed | None = None,
    examples: Examples | None = None,
    source: Path | None = None,
    after_each: Observer | None = None,
) -> CompiledProgram:
    """Cut a traced model into stages, schedule them, write their text and prove it.

    It may have several graphs, by name, "" for its own: all are cut where the one is
    that costs most. `placed` are the branches of each rank, where a plan has them; its
    plan tells of the shapes of `examples`.
    """
    graphs = {"": traced} if isinstance(traced, Traced) else traced
    run, graphs = Runs(after_each), knowing_all(graphs)
    largest = find_largest(graphs)
    candidates, options = settled_options(graphs[largest], options, run)
    lowered: dict[str, Compilation] = {}
    tasks: dict[str, Task] = {}
    for name in sorted(graphs, key=largest.__ne__):
        like = followed(graphs, lowered, name)
        cut = partial(schedule_stages, graphs[name], run=run, placed=placed, like=like)
        adapted = options_of(graphs, name, options)
        with telling_what_fits(adapted, cut):
            done = cut(adapted)
        whole, tiles = evaluate(graphs[name], done, adapted, run)
        lost_nothing(whole.program, [t.program for t in tiles])
        for programs in zip(*((t.program, t.evaluation) for t in tiles), strict=True):
            drawn_alike(programs)
        lost_nothing(whole.evaluation, [t.evaluation for t in tiles], draws=False)
        steps = tuple(find_loops(order) for order in done.timeline.orders)
        plan = _planned(graphs[name], done, adapted, source, run)
        lowered[name] = Compilation(whole, tiles, steps, plan, name=name)
        tasks[name] = done.task
    for name, compilation in with_one_ownership(lowered, largest).items():
        files = rank_modules(compilation)
        prove_files(files, compilation, tasks[name])
        lowered[name] = replace(compilation, files=files)
    in_order = {name: lowered[name] for name in graphs}
    program = CompiledProgram(as_family(in_order, largest), candidates)
    facts = of_shapes(program.compilation, examples) if examples else {}
    return program.with_plan(**facts)


def plan(
    traced: Traced,
    options: CompileOptions,
    source: Path | None = None,
    *,
    tell: Tell = lambda text: None,
) -> tuple[tuple[Candidate, ...], Plan]:
    """Return what was compared and the plan of the best, without a program.

    `tell` is told how far the comparison is.
    """
    run = Runs()
    candidates, options = settled_options(traced, options, run, tell)
    with telling_what_fits(options, partial(schedule_stages, traced, run=run)):
        done = schedule_stages(traced, options, run, lowered="unlike")
    return candidates, _planned(traced, done, options, source, run)


def settled_options(
    traced: Traced,
    options: CompileOptions,
    run: Runs,
    tell: Tell = lambda text: None,
) -> tuple[tuple[Candidate, ...], CompileOptions]:
    """Return what was compared where something is `auto`, and the options to take."""
    stage = partial(schedule_stages, traced, run=run)
    sizes, has_branches = image_sizes(traced.program), "branches" in options.open_splits
    most = most_branches(traced.program) if has_branches else 1
    settle = partial(settled, sizes=sizes, most_branches=most, stage=stage, tell=tell)
    if options.per_device == AUTO:
        return choose_sharing(options, _shared(traced, options, run), settle, stage)
    return settle(options)


def _shared(traced: Traced, options: CompileOptions, run: Runs) -> SharedDevice:
    name, program = options.hardware, traced.program
    step = options.micro_batches, options.copy_ranks
    return run.once(
        ("shared", id(program), name, *step),
        lambda: share(program, read_hardware(name).device, *step),
    )


def _planned(
    traced: Traced,
    done: Scheduled,
    options: CompileOptions,
    source: Path | None,
    run: Runs,
) -> Plan:
    hardware = read_hardware(options.hardware)
    parts = done.program, done.tiles, done.task, done.timeline
    plan = make_plan(*parts, options, source, hardware)
    if options.per_device == 1:
        return plan
    note = sharing_note(_shared(traced, options, run), options.per_device)
    return replace(plan, notes=[*plan.notes, note])


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

    def with_plan(self, **changes: Any) -> CompiledProgram:
        """Return the program with other entries in its plan."""
        plan = replace(self.plan, **changes)
        return replace(self, compilation=replace(self.compilation, plan=plan))

    def __repr__(self) -> str:
        """Return for example `<Net: 4 ranks, stages of 3, 4, 3, 2 blocks, 1f1b>`."""
        return f"<{self.plan.summary}>"

    def rank_modules(self) -> dict[str, str]:
        """Return the text of each rank's file, by file name."""
        return self.compilation.all_files()

    def graph(self) -> str:
        """Return the graph of the stages as DOT text."""
        return draw_graph(self.compilation.shown, self.plan)

    def write(self, directory: str | Path) -> str | None:
        """Write the program directory; return why graph.svg is missing, if it is."""
        folder = Path(directory)
        write_directory(self.compilation, folder)
        write_timeline(self.plan, folder / "timeline.svg")
        missing = render(self.graph(), folder / "graph.svg")
        write_report(self.plan, folder, self.candidates, with_graph=missing is None)
        return missing


def prove_files(files: Mapping[str, str], compilation: Compilation, task: Task) -> None:
    """Prove what the rank files say: training, and evaluation.

    Raises:
        InternalError: the files are wrong; names stage, micro-batch and user's line.
    """
    placement = compilation.program.require_placement()
    training, evaluation = read_ranks(files)
    prove(evaluation, task.evaluation, groups=placement.groups)
    if not task.has_backward:
        return
    shared = reductions(compilation.program, compilation.owned)
    prove(
        training,
        task,
        groups=placement.groups,
        shared=shared,
        weights=compilation.owned,
        copies=compilation.plan.data,
    )
