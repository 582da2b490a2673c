"""The whole compilation on one page: trace -> passes -> schedule -> check -> text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import fx, nn

from gemsc.codegen.package import rank_modules, write_directory
from gemsc.errors import GemscError
from gemsc.frontend import FRONTENDS
from gemsc.frontend.check import check_against_eager
from gemsc.ir.compilation import Compilation
from gemsc.ir.flow import owned_tensors
from gemsc.ir.program import Program
from gemsc.options import CompileOptions
from gemsc.passes.annotate import Annotate
from gemsc.passes.balance_stages import BalanceStages
from gemsc.passes.base import Pass
from gemsc.passes.canonicalize import Canonicalize
from gemsc.passes.detect_skips import DetectSkips
from gemsc.passes.follow_stages import FollowStages, find_twins
from gemsc.passes.group_blocks import GroupBlocks
from gemsc.passes.insert_comms import InsertComms
from gemsc.passes.manager import Observer, run_passes
from gemsc.passes.place_stages import PlaceStages
from gemsc.plan import Plan
from gemsc.planner.predict import live_micro_batches, make_plan, schedule_task
from gemsc.planner.prove import prove
from gemsc.schedules import SCHEDULES, run
from gemsc.schedules.loops import find_loops
from gemsc.viz.graph import draw, render

__all__ = ["CompiledProgram", "compile"]


@dataclass(frozen=True)
class CompiledProgram:
    """What `compile` returns: look at it, then write it."""

    compilation: Compilation

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
        return render(self.graph(), folder / "graph.svg")


def compile(
    model: nn.Module,
    example_inputs: Any,
    *,
    loss: Callable[..., Any] | None = None,
    example_target: Any = None,
    options: CompileOptions | None = None,
    source: Path | None = None,
    after_each: Observer | None = None,
    **choices: Any,
) -> CompiledProgram:
    """Compile a model for several ranks.

    `example_inputs` is one micro-batch: a tuple of positional or a dict of keyword
    inputs. `example_target` is what `loss(output, target)` takes with them. Choices are
    the fields of `CompileOptions`: `ranks=4, schedule="1f1b", micro_batches=8`.

    The model's parameters, buffers and the random generators stay as they are.

    Raises:
        GemscError: the model or an option cannot be compiled; says where and what to do.
    """
    options = replace(options or CompileOptions(), **choices)
    schedule = SCHEDULES.get(options.schedule)
    if schedule is None:
        raise GemscError(
            f"unknown schedule '{options.schedule}'",
            help=f"choose one of {', '.join(SCHEDULES)}",
        )
    trace = FRONTENDS[options.frontend]
    feed = {"loss": loss, "target": example_target}
    program = trace(model, example_inputs, training=loss is not None, **feed)
    program = run_passes(program, training_passes(options), after_each=after_each)
    if options.check:
        check_against_eager(
            program, model, example_inputs, **feed, training=loss is not None
        )
    evaluation = trace(model, example_inputs, training=False, **feed)
    evaluation, twins = follow(program, evaluation, after_each)

    task = schedule_task(program, options)
    timeline = run(task, schedule.policy)
    prove(program, task, timeline)
    plan = make_plan(program, task, timeline, options, source)
    steps = tuple(find_loops(order) for order in timeline.orders)
    user_path = str(source.resolve()) if source else ""
    return CompiledProgram(
        Compilation(program, evaluation, twins, steps, plan, user_path)
    )


def training_passes(options: CompileOptions) -> tuple[Pass, ...]:
    """Return the passes for the training graph, in order."""
    return (
        Canonicalize(),
        Annotate(),
        DetectSkips(),
        GroupBlocks(),
        BalanceStages(
            num_stages=options.ranks,
            kind=options.balance,
            blocks=options.blocks,
            cuts=options.cuts,
            live=live_micro_batches(options),
        ),
        PlaceStages(kind=options.placement),
        InsertComms(),
    )


def follow(
    program: Program, evaluation: Program, after_each: Observer | None
) -> tuple[Program, dict[fx.Node, fx.Node] | None]:
    """Cut the evaluation graph where the training graph is cut.

    If the two graphs differ in constants only (the usual case) they share one text and
    most transfers; the twins of the training graph's nodes are returned too.
    """
    evaluation = run_passes(evaluation, (Canonicalize(),), after_each=after_each)
    known = program.transfers or ()
    twins = find_twins(program, evaluation)
    if twins is not None:
        comms = InsertComms(outputs=True, known=known)
        return run_passes(program, (comms,), after_each=after_each), twins
    passes = (
        Annotate(training=False),
        FollowStages(program, owned_tensors(program)),
        InsertComms(outputs=True, first_index=len(known)),
    )
    return run_passes(evaluation, passes, after_each=after_each), None
