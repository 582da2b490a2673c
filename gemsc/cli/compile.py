"""`gemsc compile` and `gemsc plan`: from a model's file to a program, or to a plan."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from gemsc.base.files import write_text
from gemsc.base.fingerprint import source_fingerprints
from gemsc.cli.options import (
    DEFAULTS,
    OF_A_PLAN,
    Model,
    is_typed,
    takes_options,
    typed_flags,
)
from gemsc.cli.terminal import (
    Answer,
    console,
    gives_json,
    pass_line,
    progress_bar,
    say,
    tell,
)
from gemsc.codegen.package import check_target
from gemsc.compiler import (
    CompiledProgram,
    compile,
    find_largest,
    plan,
    trace,
    trace_all,
)
from gemsc.costs.hardware import read_hardware
from gemsc.datasets.samples import joins_samples
from gemsc.errors import GemscError, say_note, warn
from gemsc.frontend.closures import reject_model_in_hooks
from gemsc.ir.dump import dump
from gemsc.ir.program import Program
from gemsc.launch.start import not_compared
from gemsc.options import CompileOptions
from gemsc.passes.base import Pass
from gemsc.passes.manager import Observer
from gemsc.plan import Plan
from gemsc.planner.edited import EditedPlan
from gemsc.planner.explain import speed
from gemsc.runtime.process.device import device_named
from gemsc.search.candidates import Candidate, reason
from gemsc.source import meant_by, split_constants, unused
from gemsc.user_model import UserModel, load_user_model
from gemsc.viz.terminal import notes, of_this_machine, show_candidates
from gemsc.viz.terminal import show as show_plan
from gemsc.weights.elsewhere import Elsewhere
from gemsc.weights.initialize import Initialized
from gemsc.weights.load import blank, put

FILES = "Files"
Constants = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="set a constant of the model's file: NAME=VALUE",
        rich_help_panel=FILES,
    ),
]
COMPARED_BYTES = 2**32  # of the weights of a model on the meta device
PLAN_SECONDS = 5.0  # from one line to the next, where nobody watches
COMPARED = (
    *OF_A_PLAN,
    *("ranks", "data", "per_device", "memory_format", "torch_compile"),
    *("device_memory", "profile", "device", "recompute", "offload"),
)


@takes_options()
def compile_command(
    context: typer.Context,
    model: Model,
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", help="folder for the program", rich_help_panel=FILES
        ),
    ] = Path("build/program"),
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="replace the program of another model",
            rich_help_panel=FILES,
        ),
    ] = False,
    plan: Annotated[
        Path | None,
        typer.Option(
            help="edited plan.toml to use instead of options", rich_help_panel=FILES
        ),
    ] = None,
    options: CompileOptions = DEFAULTS,
    print_after: Annotated[
        str, typer.Option(help="print the program after this pass (or `all`)")
    ] = "",
    time_passes: Annotated[
        bool, typer.Option(help="print the time that each pass takes")
    ] = False,
    constants: Constants = None,
) -> None:
    """Compile a model into a program directory."""
    check_target(output)
    edited = _read_edited(plan, typed_flags(context)) if plan is not None else None
    values = split_constants(constants or [])
    if edited is not None:  # goes before the settings of a project
        typed = values if is_typed(context, "constants") else {}
        values = {**edited.plan.constants, **typed}
    user = load_user_model(model, constants=values)
    _say_unused(user)
    if not overwrite:
        _check_same(output, user)
    shows = nullcontext(_say_nothing) if options.profile else pass_line()
    with shows as show_pass:
        watch = _Watch(print_after, time_passes, show_pass)
        program = compiled(user, options, watch, edited)
        watch.finish()
        show_pass("write")
        had_others = any(output.glob("weights-*"))
        note = program.write(output)
    _report(program.candidates, program.plan, f" -> {output}")
    if program.plan.unchecked:
        say(f"note: {not_compared(program.plan, output)}")
    if note:
        tell(f"note: {note}")
    if had_others:
        tell(f"note: {output} starts from the model's weights now: import others again")


@gives_json
@takes_options(
    COMPARED,
    data="auto",
    schedule="auto",
    balance="auto",
    placement="auto",
    shards=("auto",),
    branches=("auto",),
)
def plan_command(
    model: Model,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="write an editable plan.toml")
    ] = None,
    options: CompileOptions = DEFAULTS,
    most: Annotated[int, typer.Option(help="number of candidates to print", min=1)] = 8,
    constants: Constants = None,
) -> Answer:
    """Compare ways to split a model over ranks, without writing a program."""
    user = load_user_model(model, constants=split_constants(constants or []))
    candidates, best = _plan(user, options)
    _report(candidates, best, most=most)
    show_plan(best, console)
    if output is not None:
        write_text(output, best.to_toml(output.parent))
        tell(f"wrote {output}: edit it, then gemsc compile {model} --plan {output}")
    compared = [_as_data(candidate) for candidate in candidates]
    why = reason(candidates) if candidates else ""
    told = {"why": why, "speed": asdict(speed(best)), "candidates": compared}
    return told | {"plan": asdict(best)}, 0


def _as_data(candidate: Candidate) -> dict[str, Any]:
    """Return what is told of a candidate: all but `name` and `options` in its units."""
    return {
        "name": candidate.name,
        "command_line": candidate.options.command_line(),
        "fits": candidate.fits(),
        "problem": candidate.problem,
        "samples_per_second": candidate.samples_per_second,
        "step_seconds": candidate.seconds,
        "peak_bytes": candidate.peak_bytes,
        "sent_bytes": candidate.sent_bytes,
    }


@dataclass
class _Watch:
    """Prints programs, times and progress after passes, to stderr."""

    print_after: str
    time_passes: bool
    show_pass: Callable[..., None]
    times: list[tuple[str, float]] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def __call__(self, step: Pass, program: Program, seconds: float) -> None:
        count = 1 + sum(name.split(" ")[0] == step.name for name, _ in self.times)
        again = f" ({count})" if count > 1 else ""
        self.times.append((step.name + again, seconds))
        self.seen.add(step.name)
        self.show_pass(step.name + again)
        if self.print_after in (step.name, "all"):
            say(f"--- after {step.name}{again}")
            say(dump(program))

    def finish(self) -> None:
        if self.print_after and self.print_after not in {*self.seen, "all"}:
            raise GemscError(
                f"--print-after {self.print_after}: there is no such pass",
                help=f"one of {', '.join(sorted(self.seen))}, or all",
            )
        if self.time_passes:
            for name, seconds in self.times:
                say(f"{seconds * 1e3:8.1f} ms  {name}")


def _report(
    candidates: Sequence[Candidate], plan: Plan, where: str = "", most: int = 8
) -> None:
    """Print what was chosen, and why, where there was a choice."""
    if candidates:
        show_candidates(candidates, console, most)
    tell(f"{plan.summary}{where}")
    for note in (*(of_this_machine(plan) if candidates else ()), *notes(plan)):
        tell(note)


def _say_unused(user: UserModel) -> None:
    """Say what may be a name of ours in other letters, and what is done without it."""
    ours = [field.name for field in fields(user)]
    lacking = [name for name in ours if getattr(user, name) is None]
    for name, at in unused(user.path):
        if name in lacking:  # it is None
            continue
        if name not in ours and (meant := meant_by(name, lacking)):
            help = f"if it is for gemsc, call it {meant}"
            warn(f"nothing uses {name}", at=at, help=help)
        elif name in ("sampler", "batch_sampler"):
            help = "gemsc makes the batches; docs/models.md has a dataset that samples "
            warn(f"nothing uses {name}", at=at, help=f"{help}by weights")
        elif name == "collate" and not joins_samples(user.collate):
            help = "if it is for gemsc, let it take (samples, number)"
            what = "nothing uses collate, which takes no number of a shape"
            warn(what, at=at, help=help)
    if user.loss is not None and user.optimizer is None:
        text = "it trains with SGD, learning rate 0.01"
        say_note(f"no optimizer() in {user.path.name}: {text}")


def compiled(
    user: UserModel,
    options: CompileOptions,
    watch: Observer | None = None,
    edited: EditedPlan | None = None,
) -> CompiledProgram:
    """Return what a user's model is compiled to."""
    with _prepared(user, options) as given:
        shapes = user.make_shapes()
        if len(shapes) > 1:
            given["example_inputs"] = shapes
            given["example_target"] = user.make_targets(shapes)
        given["model"], elsewhere = _with_weights(given["model"], user, options)
        reject_model_in_hooks(vars(user), given["model"], user.line_of)
        # of whole cases they get something else
        scores = user.eval_dataset is not None and user.eval_windows is None
        given["metrics"] = user.make_metrics() if scores else None
        program = compile(
            **given,
            elsewhere=elsewhere,
            options=options,
            source=user.path,
            after_each=watch,
            edited=edited,
        )
    return program.with_plan(**_source(program.plan, user))


def _with_weights(
    model: nn.Module, user: UserModel, options: CompileOptions
) -> tuple[nn.Module, Elsewhere | None]:
    """Return a model with weights to compare with, and where its ranks find them.

    Those of a model on the meta device stay where they are: in the files of `weights`,
    or made by `init`. It has them itself where it is small enough to be compared.
    """
    elsewhere = Elsewhere.of(model)
    if not elsewhere.absent:
        user.fill(model)
        return model, None
    is_compared = options.check and elsewhere.bytes <= COMPARED_BYTES
    if (place := user.weight_files()) is not None:
        elsewhere = elsewhere.in_files(place)
        if is_compared or options.profile:
            user.fill(model)
        else:
            user.check_files(elsewhere)
    elif user.init is not None:
        elsewhere = replace(elsewhere, is_made=True)
        if is_compared:
            made = Initialized(*user.initialized())
            put(model, {name: made.tensor(name) for name in elsewhere.absent})
    return model, elsewhere


def _plan(
    user: UserModel, options: CompileOptions
) -> tuple[tuple[Candidate, ...], Plan]:
    """Return what was compared and the best plan; evaluation is not looked at.

    A model on the meta device needs no weights.
    """
    with (
        pass_line(PLAN_SECONDS, PLAN_SECONDS) as line,
        _prepared(user, options) as given,
    ):
        if options.profile:
            user.fill(given["model"])
        else:
            blank(given["model"])
        show = _say_nothing if options.profile else line
        traced_as = partial(
            trace,
            progress=given.pop("progress"),
            after_each=lambda step, program, seconds: show(step.name),
            frontend=options.frontend,
            precision=options.precision,
            memory_format=options.memory_format,
            check=False,
            evaluates=False,
            hardware=read_hardware(options.hardware),
            profile=options.profile,
            device=torch.device(options.device) if options.device else None,
        )
        graphs = trace_all(traced_as, **given)
        traced = graphs[find_largest(graphs)]
        candidates, best = plan(traced, options, user.path, tell=line)
    return candidates, replace(best, **_source(best, user))


@contextmanager
def _prepared(user: UserModel, options: CompileOptions) -> Iterator[dict[str, Any]]:
    """Give what compiling and planning take of a user's model; show a profile's way."""
    device_named(options.device or "cpu")
    inputs = user.make_inputs()
    bar = progress_bar() if options.profile else nullcontext(_say_nothing)
    with bar as progress, user.lines():
        yield {
            "model": user.make_unfilled(),
            "example_inputs": inputs,
            "loss": user.make_loss() if user.loss is not None else None,
            "example_target": user.make_target(inputs),
            "optimizer": user.optimizer,
            "phases": user.make_phases(),
            "progress": progress,
        }


def _source(plan: Plan, user: UserModel) -> dict[str, Any]:
    """Return the entries of a plan that say where its model comes from."""
    files = (str(user.path), *sorted(user.settings))
    sources = plan.sources | {file: source_fingerprints(Path(file)) for file in files}
    given = [f"{name}={text}" for name, text in user.constants.items()]
    words = "".join(f" --set {shlex.quote(text)}" for text in given)
    return {
        "spec": user.spec,
        "sources": sources,
        "constants": dict(user.constants),
        "command": plan.command + words,
    }


def _check_same(folder: Path, user: UserModel) -> None:
    """Refuse to replace the program of another model; a damaged one is nobody's."""
    try:
        held = Plan.read(folder / "plan.toml")
    except GemscError:
        return
    file, _, name = held.spec.partition(":")
    if name != user.spec.partition(":")[2] or os.path.realpath(
        file
    ) != os.path.realpath(user.path):
        raise GemscError(
            f"{folder} holds the program of another model: {held.spec or held.model}",
            help="name another folder with -o, or replace it with --overwrite",
        )


def _say_nothing(what: str, share: float = 1.0) -> None:
    pass


def _read_edited(path: Path, typed: Sequence[str]) -> EditedPlan:
    if typed:
        raise GemscError(
            f"{' '.join(typed)} cannot be combined with --plan, which decides "
            "everything",
            help=f"edit {path} instead",
        )
    if not path.is_file():
        raise GemscError(
            f"--plan {path}: there is no such file",
            help="give a plan.toml that `gemsc plan -o` or `gemsc compile` wrote",
        )
    return EditedPlan.read(path)
