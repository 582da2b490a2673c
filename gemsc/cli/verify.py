"""`gemsc verify`: the ranks of a program against one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from gemsc.base.dtypes import dtype_name
from gemsc.base.files import write_text
from gemsc.base.process import num_cores
from gemsc.base.units import show_long
from gemsc.cli.terminal import Answer, Directory, console, gives_json, tell
from gemsc.codegen.read import read_ranks
from gemsc.errors import GemscError, InternalError
from gemsc.plan import Plan, rank_file
from gemsc.planner.explain import task_of
from gemsc.runtime.process.device import device_named
from gemsc.runtime.training.program_directory import check_program, tell_of_settings
from gemsc.schedules.check import prove
from gemsc.verify.compare import Comparison
from gemsc.verify.field.check import check_program_for_all_inputs
from gemsc.verify.runs import OPTIONS, RunComparison, verify_run
from gemsc.verify.step_size import step_seconds
from gemsc.verify.steps import verify_program
from gemsc.viz.terminal import show_activations

WORDS = {"exact": "exact", "wrong": "NOT EXACT", "undecided": "not decided"}
KINDS = ("gradient", "parameter", "buffer")
MOST_NAMED = 3
DTYPES = {"float64": torch.float64, "float32": torch.float32}
SECONDS = {"float64": 1.0, "float32": 0.4}  # how long steps take, about
LONG = 60.0  # seconds that are announced


@gives_json
def verify_command(
    directory: Directory,
    steps: Annotated[int, typer.Option(help="training steps to compare", min=1)] = 2,
    dtype: Annotated[str, typer.Option(help="float64, float32 or both")] = "both",
    device: Annotated[
        str,
        typer.Option(help="device to compute on: cpu or cuda"),
    ] = "cpu",
    run: Annotated[
        int | None,
        typer.Option(
            help="compare this many steps of `gemsc run` (data, order, evaluation, "
            "saved model) with a plain PyTorch loop",
            min=1,
        ),
    ] = None,
    all_inputs: Annotated[
        bool,
        typer.Option(
            "--all-inputs",
            help="prove one step for all inputs and weights, over a finite field; "
            "starts no ranks",
        ),
    ] = False,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help=f"with --run: {', '.join(OPTIONS)}, as for `gemsc run`"),
    ] = None,
) -> Answer:
    """Compare the ranks with one process: loss, gradients, parameters, buffers."""
    names = list(DTYPES) if dtype == "both" else [dtype]
    if not set(names) <= set(DTYPES):
        raise GemscError(
            f"unknown dtype '{dtype}'", help="choose one of float64, float32, both"
        )
    if arguments and run is None:
        raise GemscError(
            f"unknown argument {arguments[0]}", help="see gemsc verify --help"
        )
    if all_inputs:
        proof = check_program_for_all_inputs(directory)
        tell(str(proof))
        return {"all_inputs": asdict(proof)}, int(proof.verdict != "proved")
    chosen = device_named(device)
    plan = Plan.read(directory / "plan.toml")
    only = "that of the model" if plan.dtype == "float64" else plan.only_dtype
    if only and plan.dtype in names and len(names) > 1:
        names = [plan.dtype]
        tell(f"only in {plan.dtype}: {only}")
    _prove(directory, plan)
    for line in _about(plan, names, steps if run is None and device == "cpu" else 0):
        tell(line)
    if run is not None:
        return _verify_run(directory, names, run, arguments or [], chosen)
    results = {
        name: verify_program(
            directory, dtype=DTYPES[name], num_steps=steps, device=chosen
        )
        for name in names
    }
    _show(
        f"{directory} against one process, {_shown_steps(plan, steps)}: relative error",
        ("dtype", "loss", "gradients", "parameters", "buffers", "equal bits"),
        (
            _row(name, diff, *map(diff.worst_of, KINDS))
            for name, diff in results.items()
        ),
    )
    verdicts = {name: diff.judge(DTYPES[name]) for name, diff in results.items()}
    for name, (kind, tensor) in verdicts.items():
        exact = verdicts.get("float64", ("", ""))[0] == "exact"
        tell(_verdict(name, kind, tensor, results[name], exact))
    if "float32" in results:
        show_activations(plan, results["float32"].activation_bytes, console)
    code = _exit_code([kind for kind, _ in verdicts.values()])
    if code == 0:
        _note_compared(directory)
    compared = {n: _as_data(results[n], *verdicts[n], DTYPES[n]) for n in names}
    return {"exact": code == 0, "steps": steps, "dtypes": compared}, code


def _prove(directory: Path, plan: Plan) -> None:
    """Prove that the ranks' files fit each other as they are now, edited or not.

    What they add up is seen in the step that runs; so are variants of a program, and
    files that do what only a rank can do.

    Raises:
        GemscError: ranks would wait for each other, or a message for its receive.
    """
    check_program(directory, plan.ranks)
    tell_of_settings(directory, plan)
    if plan.variants:
        return
    names = [rank_file(rank) for rank in range(plan.copy_ranks)]
    task = task_of(plan)
    given: Any = {"groups": plan.members, "copies": plan.data, "sums": False}
    try:
        training, evaluation = read_ranks(
            {name: (directory / name).read_text(encoding="utf-8") for name in names}
        )
        prove(evaluation, task.evaluation, **given)
        if task.has_backward:
            prove(training, task, **given)
    except InternalError as error:
        wrong = str(error).removeprefix("wrong program: ")
        if error.__cause__ is not None:  # what was added looks at tensors, say
            tell(f"note: not proved before it runs: {wrong}")
            return
        raise GemscError(
            f"{directory} cannot run as its rank files are: {wrong}",
            help="undo the changes in them, or compile again: "
            f"{plan.command_for(directory)}",
        ) from None


def _shown_steps(plan: Plan, steps: int) -> str:
    names = ", ".join(shape.name for shape in plan.shapes)
    return f"{steps} steps" + f" and one of each shape ({names})" * bool(names)


def _show(title: str, heads: Iterable[str], rows: Iterable[list[str]]) -> None:
    table = Table(title=title)
    for head in heads:
        table.add_column(head)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _as_data(
    diff: Comparison, verdict: str, tensor: str, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the errors of a dtype; `decided_by` is the tensor of the verdict."""
    allowed = min(diff.allowed(tensor, dtype), diff.limit(dtype))
    return {
        "verdict": verdict,
        "decided_by": _with_name((diff.errors[tensor], tensor)),
        "allowed": allowed,
        "loss": diff.loss,
        **{kind: _with_name(diff.worst_of(kind)) for kind in KINDS},
        "equal_bits": diff.equal,
        "tensors": diff.total,
        "activation_bytes": diff.activation_bytes,
    }


def _exit_code(kinds: list[str]) -> int:
    # float64 comes first, if it is asked for: float32 alone proves too little
    return 0 if kinds[0] == "exact" and "wrong" not in kinds else 1


def _note_compared(directory: Path) -> None:
    """Let `gemsc run` know of a program that is exact."""
    plan = Plan.read(directory / "plan.toml")
    if plan.unchecked:
        plan = replace(plan, unchecked="")
        write_text(directory / "plan.toml", plan.to_toml(directory))


def _about(plan: Plan, names: list[str], steps: int) -> Iterator[str]:
    """Yield what ranks and one process compute in, and how long, if it is not as usual.

    The `steps` are those on this machine's cores.
    """
    if plan.precision != "float32":
        told = {"float64": "float64: without autocast"}
        told["float32"] = f"float32: within autocast, in {plan.precision}"
        yield "; ".join(told[name] for name in names)
    if plan.torch_compile:
        yield (
            "torch.compile: other kernels than those of one process, so equal up to "
            "rounding; stages that draw random numbers are compared without it"
        )
    once = step_seconds(plan) / max(1, num_cores() // plan.ranks)
    seconds = steps * once * sum(SECONDS[name] for name in names)
    if seconds >= LONG:
        least, first = once * SECONDS[names[0]], f"--steps 1 --dtype {names[0]}"
        less = f"; {first} {show_long(least)}" * (seconds > least)
        yield f"note: on this CPU that takes about {show_long(seconds)}{less}"


def _verify_run(
    directory: Path,
    names: list[str],
    num_steps: int,
    arguments: list[str],
    device: torch.device,
) -> Answer:
    """Compare whole runs."""
    results = {
        name: verify_run(
            directory,
            dtype=DTYPES[name],
            num_steps=num_steps,
            arguments=arguments,
            device=device,
        )
        for name in names
    }
    _show(
        f"run of {directory} against a plain loop: relative error",
        ("dtype", "loss", "evaluation", "saved model", "equal bits"),
        (
            _row(name, diff, diff.evaluation, diff.model)
            for name, diff in results.items()
        ),
    )
    verdicts = {name: diff.judge(DTYPES[name]) for name, diff in results.items()}
    for name, diff in results.items():
        rounding = f" (rounding alone {diff.rounding:.1e})" if diff.rounding else ""
        tell(
            f"{name}: {num_steps} steps, {diff.num_evaluations} evaluations, worst "
            f"{diff.worst:.1e}{rounding}: {WORDS[verdicts[name]]}"
            + _about_noise(name, diff.settled)
            + _about_inside(name, diff)
        )
    code = _exit_code(list(verdicts.values()))
    compared = {
        name: {
            "verdict": verdicts[name],
            "loss": diff.loss,
            "evaluation": _with_name(diff.evaluation),
            "model": _with_name(diff.model),
            "evaluations": diff.num_evaluations,
            "equal_bits": diff.equal,
            "tensors": diff.total,
        }
        for name, diff in results.items()
    }
    return {"exact": code == 0, "steps": num_steps, "dtypes": compared}, code


def _verdict(
    dtype: str, kind: str, tensor: str, diff: Comparison, exact_in_float64: bool
) -> str:
    """Return what to say of whether the ranks compute what one process does."""
    allowed, limit = diff.allowed(tensor, DTYPES[dtype]), diff.limit(DTYPES[dtype])
    words = WORDS[kind]
    if kind == "undecided":
        words += f" in {dtype}" + "; exact in float64" * exact_in_float64
    error = diff.errors[tensor]
    line = f"{dtype}: worst {error:.1e}, allowed {min(allowed, limit):.0e}: {words}"
    if tensor in diff.rounding:
        line += (
            f"\n{dtype}: that is {tensor}; rounding alone changes it by "
            f"{diff.rounding[tensor]:.1e} in one process"
        )
    elif kind == "wrong":
        line += f"\n{dtype}: that is {tensor}"
    if kind == "undecided" and allowed <= limit:
        line += (
            f"\n{dtype}: rounding alone changes the {diff.turned} by "
            f"{diff.rounding[diff.turned]:.1e}: a ReLU or the like decides otherwise"
        )
    return line + _about_noise(dtype, diff.settled) + _about_inside(dtype, diff)


def _about_inside(dtype: str, diff: Comparison | RunComparison) -> str:
    """Return a line about lower precision inside of a model, if there is any."""
    if diff.inside is None:
        return ""
    kind = dtype_name(diff.inside.dtype)
    return f"\n{dtype}: the model computes in {kind} inside: {diff.inside.call}"


def _about_noise(dtype: str, settled: frozenset[str]) -> str:
    """Return a line about parameters that were compared without noise, if any."""
    if not settled:
        return ""
    names = ", ".join(sorted(settled)[:MOST_NAMED])
    names += ", ..." * (len(settled) > MOST_NAMED)
    return (
        f"\n{dtype}: gradients of {names} are zero but for rounding, of which the "
        "optimizer makes steps; what it does without that noise was compared"
    )


def _row(
    name: str, diff: Comparison | RunComparison, *worst: tuple[float, str]
) -> list[str]:
    shown = (f"{error:.1e} {tensor}".rstrip() for error, tensor in worst)
    return [name, f"{diff.loss:.1e}", *shown, f"{diff.equal} of {diff.total}"]


def _with_name(pair: tuple[float, str]) -> dict[str, Any]:
    return {"error": pair[0], "name": pair[1]}
