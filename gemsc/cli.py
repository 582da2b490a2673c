"""The `gemsc` command: arguments and exit codes, nothing else."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import torch
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from gemsc.cli_simulate import simulate_command
from gemsc.codegen.package import check_target
from gemsc.compiler import CompiledProgram, compile, plan, trace
from gemsc.errors import GemscError, InternalError
from gemsc.fingerprint import source_fingerprints
from gemsc.frontend import FRONTENDS
from gemsc.ir.dump import dump
from gemsc.ir.program import Program
from gemsc.options import AUTO, BALANCES, CompileOptions
from gemsc.passes.base import Pass
from gemsc.plan import Plan
from gemsc.planner.candidates import Candidate
from gemsc.planner.edited import EditedPlan
from gemsc.planner.hardware import read_hardware
from gemsc.planner.layout import PLACEMENTS
from gemsc.profiling import (
    calibrate_machine,
    check_output,
    measure_on_ranks,
    write_network,
)
from gemsc.runtime.launch import restart_like_a_rank
from gemsc.runtime.measure import measure
from gemsc.runtime.network import is_rank
from gemsc.runtime.network import main as measure_on_this_rank
from gemsc.runtime.start import start
from gemsc.schedules import SCHEDULES
from gemsc.units import parse_bytes
from gemsc.user_model import UserModel, load_user_model
from gemsc.verify import TOLERANCE, Comparison, verify_program
from gemsc.viz.graph import render
from gemsc.viz.report import write_report
from gemsc.viz.shares import show_shares
from gemsc.viz.tables import opaque_notes, show_activations, show_candidates
from gemsc.viz.tables import show as show_plan
from gemsc.viz.timeline import grid, panels_of, write_timeline
from gemsc.viz.trace import trace_text

__all__ = ["app", "main"]

app = typer.Typer(
    help="Split a PyTorch model over MPI ranks and train it exactly.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()
DEFAULTS = CompileOptions()
INTERRUPTED = 130  # exit code, as after any SIGINT
# typer keeps click to itself: the base class of all errors in a command line
UsageError = cast(type[Exception], typer.BadParameter.__base__)
app.command("simulate")(simulate_command)
DTYPES = {"float64": torch.float64, "float32": torch.float32}

Spec = Annotated[str, typer.Argument(help="path/model.py, or pkg.module:name")]
Directory = Annotated[Path, typer.Argument(help="what `gemsc compile -o` wrote")]
Ranks = Annotated[int, typer.Option(help="processes that share the model")]
Schedule = Annotated[str, typer.Option(help=", ".join(("auto", *SCHEDULES)))]
Data = Annotated[
    str, typer.Option(help="copies of the model that share the batch, or auto")
]
Times = Annotated[int | None, typer.Option(help="master: pairs of runs in one step")]
Chunks = Annotated[int, typer.Option(help="looped placement: stages on each rank")]
MicroBatches = Annotated[
    str, typer.Option(help="example_inputs() in one step, or auto")
]
Balance = Annotated[str, typer.Option(help=", ".join(BALANCES))]
Blocks = Annotated[str, typer.Option(help="explicit: blocks of each stage, 3,4,4,5")]
Cuts = Annotated[
    str, typer.Option(help="explicit: modules that later stages begin with")
]
Placement = Annotated[
    str, typer.Option(help=", ".join(("natural", "auto", *PLACEMENTS)))
]
Frontend = Annotated[str, typer.Option(help=", ".join(FRONTENDS))]
Memory = Annotated[str | None, typer.Option(help="cap of a rank, for example 16GiB")]
HardwareName = Annotated[
    str, typer.Option(help="machine to plan for: a shipped one, or a .toml file")
]
Profile = Annotated[bool, typer.Option(help="time the model's blocks on this machine")]
Recompute = Annotated[
    str, typer.Option(help="off, all, auto or blocks to run again in the backward")
]
Offload = Annotated[
    str, typer.Option(help="off, auto or blocks that keep activations on the host")
]
Tiles = Annotated[
    str, typer.Option(help="split pictures over ranks: 2x2, 4x1, 2x2x2, 2x2,2x1, auto")
]
LocalBatchnorm = Annotated[
    bool,
    typer.Option(
        "--local-batchnorm", help="BatchNorm of each tile alone: cheaper, not exact"
    ),
]
FuseHalos = Annotated[
    str, typer.Option(help="layers that share one wide halo: auto, off or a number")
]
Check = Annotated[bool, typer.Option(help="compare the traced graph with the model")]


@app.command("compile")
def compile_command(
    model: Spec,
    output: Annotated[Path, typer.Option("-o", "--output")] = Path("build/program"),
    plan: Annotated[
        Path | None, typer.Option(help="an edited plan.toml, in place of options")
    ] = None,
    ranks: Ranks = DEFAULTS.ranks,
    data: Data = str(DEFAULTS.data),
    schedule: Schedule = DEFAULTS.schedule,
    micro_batches: MicroBatches = str(DEFAULTS.micro_batches),
    times: Times = DEFAULTS.times,
    chunks: Chunks = DEFAULTS.chunks,
    balance: Balance = DEFAULTS.balance,
    blocks: Blocks = "",
    cuts: Cuts = "",
    placement: Placement = DEFAULTS.placement,
    frontend: Frontend = DEFAULTS.frontend,
    device_memory: Memory = None,
    hardware: HardwareName = DEFAULTS.hardware,
    profile: Profile = DEFAULTS.profile,
    recompute: Recompute = "off",
    offload: Offload = "off",
    check: Check = DEFAULTS.check,
    tiles: Tiles = "",
    local_batchnorm: LocalBatchnorm = DEFAULTS.local_batchnorm,
    fuse_halos: FuseHalos = DEFAULTS.fuse_halos,
    print_after: Annotated[
        str, typer.Option(help="print the program after this pass, or after `all`")
    ] = "",
    time_passes: Annotated[
        bool, typer.Option(help="print each pass's seconds")
    ] = False,
) -> None:
    """Compile a model into a program directory."""
    options = CompileOptions(
        ranks=ranks,
        data=_count(data, "--data"),
        schedule=schedule,
        micro_batches=_count(micro_batches, "--micro-batches"),
        times=times,
        chunks=chunks,
        balance=balance,
        blocks=_numbers(blocks),
        cuts=_names(cuts),
        placement=placement,
        frontend=frontend,
        device_memory=parse_bytes(device_memory) if device_memory else None,
        hardware=hardware,
        profile=profile,
        recompute=_names(recompute),
        offload=_names(offload),
        check=check,
        tiles=tuple(filter(None, tiles.split(","))),
        local_batchnorm=local_batchnorm,
        fuse_halos=fuse_halos,
    )
    check_target(output)
    watch = _Watch(print_after, time_passes)
    program = _compile(load_user_model(model), options, watch, plan)
    watch.finish()
    note = program.write(output)
    _report(program.candidates, program.plan, f" -> {output}")
    if note:
        console.print(f"note: {note}", highlight=False)


@app.command("plan")
def plan_command(
    model: Spec,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="write plan.toml: edit it")
    ] = None,
    ranks: Ranks = DEFAULTS.ranks,
    data: Data = "auto",
    schedule: Schedule = "auto",
    micro_batches: MicroBatches = str(DEFAULTS.micro_batches),
    balance: Balance = "auto",
    placement: Placement = "auto",
    device_memory: Memory = None,
    hardware: HardwareName = DEFAULTS.hardware,
    profile: Profile = DEFAULTS.profile,
    recompute: Recompute = "off",
    offload: Offload = "off",
    tiles: Tiles = "",
    most: Annotated[int, typer.Option(help="candidates to print", min=1)] = 8,
) -> None:
    """Compare ways to train on so many ranks; write no program."""
    options = CompileOptions(
        ranks=ranks,
        data=_count(data, "--data"),
        schedule=schedule,
        micro_batches=_count(micro_batches, "--micro-batches"),
        balance=balance,
        placement=placement,
        device_memory=parse_bytes(device_memory) if device_memory else None,
        hardware=hardware,
        profile=profile,
        recompute=_names(recompute),
        offload=_names(offload),
        tiles=tuple(filter(None, tiles.split(","))),
        check=False,
    )
    candidates, found = _plan(load_user_model(model), options)
    _report(candidates, found, most=most)
    show_plan(found, console)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(found.to_toml(output.parent), encoding="utf-8")
        console.print(
            f"wrote {output}: edit it, then gemsc compile {model} --plan {output}",
            highlight=False,
        )


@app.command(
    "run",
    context_settings={
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,  # what follows the directory is the program's
    },
)
def run_command(
    directory: Directory,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="--epochs, --steps, --save, ...; --help lists all"),
    ] = None,
) -> None:
    """Train: mpirun with the right flags for this machine."""
    raise typer.Exit(start(directory, arguments or []))


@app.command("verify")
def verify_command(
    directory: Directory,
    steps: Annotated[int, typer.Option(help="training steps to compare", min=1)] = 2,
    dtype: Annotated[str, typer.Option(help="float64, float32 or both")] = "both",
) -> None:
    """Compare the ranks with one process: loss, gradients, parameters, buffers."""
    names = list(DTYPES) if dtype == "both" else [dtype]
    if not set(names) <= set(DTYPES):
        raise GemscError(f"unknown dtype '{dtype}'", help="float64, float32 or both")
    table = Table(
        title=f"{directory} against one process, {steps} steps: relative error"
    )
    for column in ("dtype", "loss", "gradients", "parameters", "buffers", "equal bits"):
        table.add_column(column)
    worst_of_all = []
    for name in names:
        found = verify_program(directory, dtype=DTYPES[name], num_steps=steps)
        # both runs round: they may be twice as far apart as one is from the truth
        allowed = max(TOLERANCE[DTYPES[name]], 2 * found.rounding)
        worst_of_all.append((found, allowed, name))
        table.add_row(name, *_row(found))
    console.print(table)
    failed = [(f, t, n) for f, t, n in worst_of_all if not f.worst <= t]
    for found, tolerance, name in worst_of_all:
        verdict = "exact" if found.worst <= tolerance else "NOT EXACT"
        console.print(
            f"{name}: worst {found.worst:.1e}, allowed {tolerance:.0e}: {verdict}",
            highlight=False,
        )
        if found.rounding > TOLERANCE[DTYPES[name]]:
            console.print(
                f"{name}: one process is {found.rounding:.1e} from itself in float64, "
                "by rounding alone",
                highlight=False,
            )
    if "float32" in names:
        measured = worst_of_all[names.index("float32")][0].activation_bytes
        show_activations(Plan.read(directory / "plan.toml"), measured, console)
    raise typer.Exit(1 if failed else 0)


@app.command("show")
def show_command(
    directory: Directory,
    html: Annotated[
        bool, typer.Option("--html", help="write report.html anew instead")
    ] = False,
) -> None:
    """Print why it is cut so, stages, skips, transfers, memory and the order."""
    plan = Plan.read(directory / "plan.toml")
    if html:
        console.print(f"wrote {write_report(plan, directory)}", highlight=False)
        return
    show_plan(plan, console)


@app.command("graph")
def graph_command(
    target: Annotated[str, typer.Argument(help="a model, or a program directory")],
    output: Annotated[Path | None, typer.Option("-o", "--output")] = None,
    ranks: Ranks = DEFAULTS.ranks,
) -> None:
    """Draw the graph: stages as clusters of blocks, skips apart."""
    if Path(target).is_dir():
        Plan.read(Path(target) / "plan.toml")
        path = output or Path(target) / "graph.svg"
        dot = _read_dot(Path(target) / "graph.dot")
    else:
        options = CompileOptions(ranks=ranks, check=False)
        program = _compile(load_user_model(target), options, None)
        path = output or Path("graph.svg")
        dot = program.graph()
    if path.suffix != ".svg":
        raise GemscError(f"cannot draw {path}", help="give -o a name that ends in .svg")
    path.parent.mkdir(parents=True, exist_ok=True)
    note = render(dot, path)
    console.print(f"note: {note}" if note else f"wrote {path}", highlight=False)


@app.command("timeline")
def timeline_command(
    directory: Directory,
    output: Annotated[Path | None, typer.Option("-o", "--output")] = None,
    text: Annotated[bool, typer.Option("--text", help="print it instead")] = False,
    measured: Annotated[
        bool, typer.Option("--measured", help="run some steps and draw them below")
    ] = False,
    steps: Annotated[int, typer.Option(help="training steps to measure", min=1)] = 9,
) -> None:
    """Draw who does what when in one step, as predicted and as measured."""
    plan = Plan.read(directory / "plan.toml")
    if text:
        typer.echo(grid(plan))
        return
    path = output or directory / "timeline.svg"
    if path.suffix != ".svg":
        raise GemscError(f"cannot draw {path}", help="give -o a name that ends in .svg")
    marks = measure(directory, steps) if measured else ()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_timeline(plan, path, marks)
    console.print(f"wrote {path}", highlight=False)
    if marks:
        predicted, measured_step = panels_of(plan, marks)
        trace = directory / "trace.json"
        trace.write_text(trace_text((predicted, measured_step)), encoding="utf-8")
        console.print(f"wrote {trace}: open it at ui.perfetto.dev", highlight=False)
        show_shares(predicted, measured_step, console)


@app.command("profile")
def profile_command(
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="time operators of many shapes")
    ] = False,
    network: Annotated[
        bool, typer.Option("--network", help="time messages and sums between ranks")
    ] = False,
    output: Annotated[Path, typer.Option("-o", "--output")] = Path("hardware.toml"),
    hardware: Annotated[
        str, typer.Option(help="where the figures that are not measured come from")
    ] = "",
    ranks: Annotated[int, typer.Option(help="network: processes to start", min=2)] = 2,
    threads: Annotated[
        int, typer.Option(help="calibrate: threads of one rank", min=1)
    ] = 1,
    quick: Annotated[
        bool, typer.Option("--quick", help="calibrate: seconds, and less exact")
    ] = False,
) -> None:
    """Measure this machine and write a hardware file for `compile --hardware`."""
    if not (calibrate or network):
        raise GemscError(
            "nothing to measure", help="give --calibrate, --network or both"
        )
    check_output(output)
    if network and is_rank():
        if (found := measure_on_this_rank()) is not None:
            write_network(found, output, hardware)
        return
    if calibrate:
        restart_like_a_rank()
        with _progress() as show:
            calibrate_machine(output, hardware, threads, quick=quick, progress=show)
    if network:
        found = measure_on_ranks(ranks)
        write_network(found, output, hardware)
    console.print(f"wrote {output}", highlight=False)


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """Show a bar while something is measured; give what is to be told how far it is."""
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)


def main() -> None:
    """Run the command: exit code 1 for the user's errors, 70 for ours."""
    # torch would print a traceback of its own for every shape that does not fit
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], standalone_mode=False))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(INTERRUPTED)
    except UsageError as error:
        _fail(_in_our_words(error))
    except GemscError as error:
        _fail(error)
    except OSError as error:
        if error.filename is None:
            raise
        path, why = error.filename, (error.strerror or type(error).__name__).lower()
        _fail(GemscError(f"{path}: {why}", help="give a path that can be used"))
    except InternalError as error:
        notes = "".join(f"\nnote: {note}" for note in getattr(error, "__notes__", ()))
        _say(f"internal error: {error}{notes}")
        _say("help: this is a fault of gemsc; please report it")
        sys.exit(70)
    except Exception:
        _say(traceback.format_exc().rstrip())
        _say("internal error: see above")
        _say("help: this is a fault of gemsc; please report it")
        sys.exit(70)


def _fail(error: GemscError) -> NoReturn:
    _say(str(error))
    sys.exit(1)


def _say(text: str) -> None:
    print(text, file=sys.stderr)  # noqa: T201


def _in_our_words(error: Any) -> GemscError:
    """Return typer's error about the command line as one of ours."""
    command = error.ctx.command_path if error.ctx else "gemsc"
    message = error.format_message().rstrip(".")
    return GemscError(message[:1].lower() + message[1:], help=f"see {command} --help")


@dataclass
class _Watch:
    """Prints programs and times after passes, to stderr."""

    print_after: str
    time_passes: bool
    times: list[tuple[str, float]] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def __call__(self, step: Pass, program: Program, seconds: float) -> None:
        again = " of the evaluation graph" if step.name in self.seen else ""
        self.times.append((step.name + again, seconds))
        self.seen.add(step.name)
        if self.print_after in (step.name, "all"):
            _say(f"--- after {step.name}{again}")
            _say(dump(program))

    def finish(self) -> None:
        if self.print_after and self.print_after not in {*self.seen, "all"}:
            raise GemscError(
                f"--print-after {self.print_after}: there is no such pass",
                help=f"one of {', '.join(sorted(self.seen))}, or all",
            )
        if self.time_passes:
            for name, seconds in self.times:
                _say(f"{seconds * 1e3:8.1f} ms  {name}")


def _report(
    candidates: Sequence[Candidate], plan: Plan, where: str = "", most: int = 8
) -> None:
    """Print what was chosen, and why where there was a choice."""
    if candidates:
        show_candidates(candidates, console, most)
    stages = ", ".join(f"{len(stage.blocks)}" for stage in plan.stages)
    console.print(
        f"{plan.model}: {plan.ranks} ranks, stages of {stages} blocks, "
        f"{plan.schedule}, {plan.micro_batches} micro-batches{where}",
        highlight=False,
    )
    for note in opaque_notes(plan):
        console.print(note, highlight=False)


Hook = Callable[[Pass, Program, float], None]


def _compile(
    user: UserModel,
    options: CompileOptions,
    watch: Hook | None,
    plan_path: Path | None = None,
) -> CompiledProgram:
    edited = _read_edited(plan_path, options) if plan_path is not None else None
    with _prepared(user, options) as given:
        program = compile(
            **given,
            options=options,
            source=user.path,
            after_each=watch,
            edited=edited,
        )
    plan = _with_source(program.plan, user)
    return replace(program, compilation=replace(program.compilation, plan=plan))


def _plan(
    user: UserModel, options: CompileOptions
) -> tuple[tuple[Candidate, ...], Plan]:
    """Return what was compared and the best plan; evaluation is not looked at."""
    with _prepared(user, options) as given:
        traced = trace(
            **given,
            frontend=options.frontend,
            check=False,
            evaluates=False,
            hardware=read_hardware(options.hardware),
            profile=options.profile,
        )
    candidates, found = plan(traced, options, user.path)
    return candidates, _with_source(found, user)


@contextmanager
def _prepared(user: UserModel, options: CompileOptions) -> Iterator[dict[str, Any]]:
    """Give what compiling and planning take of a user's model; show a profile's way."""
    if options.profile:
        restart_like_a_rank()
    inputs = user.make_inputs()
    with _progress() if options.profile else nullcontext(_say_nothing) as progress:
        yield {
            "model": user.make_model(),
            "example_inputs": inputs,
            "loss": user.make_loss() if user.loss is not None else None,
            "example_target": user.make_target(inputs),
            "optimizer": user.optimizer,
            "progress": progress,
        }


def _with_source(plan: Plan, user: UserModel) -> Plan:
    """Return the plan with where its model comes from."""
    sources = {**plan.sources, str(user.path): source_fingerprints(user.path)}
    return replace(plan, spec=user.spec, sources=sources)


def _say_nothing(what: str, share: float) -> None:
    pass


def _read_dot(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise GemscError(f"there is no {path}", help="compile again") from None


def _names(text: str) -> tuple[str, ...]:
    """Read names between commas; `off` is none."""
    return () if text == "off" else tuple(filter(None, text.split(",")))


def _read_edited(path: Path, options: CompileOptions) -> EditedPlan:
    if options != DEFAULTS:
        raise GemscError(
            f"{options.command_line()} beside --plan, which decides everything",
            help=f"change {path} instead",
        )
    return EditedPlan.read(path)


def _count(text: str, flag: str) -> int:
    if text == "auto":
        return AUTO
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise GemscError(
            f"{flag} is {text}", help=f"give {flag} a value of 1 or more, or auto"
        )
    return count


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise GemscError(
            f"--blocks {text} is no list of numbers", help="write --blocks 3,4,4,5"
        ) from None


def _row(found: Comparison) -> list[str]:
    def with_name(pair: tuple[float, str]) -> str:
        error, name = pair
        return f"{error:.1e} {name}" if name else f"{error:.1e}"

    return [
        f"{found.loss:.1e}",
        with_name(found.gradient),
        with_name(found.parameter),
        with_name(found.buffer),
        f"{found.equal} of {found.total}",
    ]
