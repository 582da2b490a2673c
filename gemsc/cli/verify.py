"""`gemsc verify`: the ranks of a program against one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from gemsc.base.files import write_text
from gemsc.cli.terminal import Answer, Directory, console, gives_json, with_name
from gemsc.errors import GemscError
from gemsc.plan import Plan
from gemsc.runtime.process.device import device_named
from gemsc.verify.field.check import check_program_for_all_inputs
from gemsc.verify.runs import OPTIONS, verify_run
from gemsc.verify.steps import Comparison, verify_program
from gemsc.viz.terminal import show_activations

JUDGED = {"exact": "exact", "NOT EXACT": "wrong", "not decided": "undecided"}
DTYPES = {"float64": torch.float64, "float32": torch.float32}


@gives_json
def verify_command(  # noqa: C901
    directory: Directory,
    steps: Annotated[int, typer.Option(help="training steps to compare", min=1)] = 2,
    dtype: Annotated[str, typer.Option(help="float64, float32 or both")] = "both",
    device: Annotated[
        str,
        typer.Option(help="device for both: cpu, or cuda for the GPU"),
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
        console.print(str(proof), highlight=False, soft_wrap=True)
        return {"all_inputs": asdict(proof)}, int(proof.verdict != "proved")
    chosen = device_named(device)
    plan = Plan.read(directory / "plan.toml")
    if plan.only_dtype and plan.dtype in names and len(names) > 1:
        names = [plan.dtype]
        console.print(f"only in {plan.dtype}: {plan.only_dtype}", highlight=False)
    for line in _about(plan, names):
        console.print(line, highlight=False)
    if run is not None:
        return _verify_run(directory, names, run, arguments or [], chosen)
    table = Table(
        title=f"{directory} against one process, {steps} steps: relative error"
    )
    for column in ("dtype", "loss", "gradients", "parameters", "buffers", "equal bits"):
        table.add_column(column)
    results = {}
    for name in names:
        found = verify_program(
            directory, dtype=DTYPES[name], num_steps=steps, device=chosen
        )
        results[name] = found
        table.add_row(name, *_row(found))
    console.print(table)
    verdicts = {name: found.judge(DTYPES[name]) for name, found in results.items()}
    for name, (kind, tensor) in verdicts.items():
        exact = verdicts.get("float64", ("", ""))[0] == "exact"
        text = _verdict(name, kind, tensor, results[name], exact)
        console.print(text, highlight=False)
    if "float32" in results:
        measured = results["float32"].activation_bytes
        show_activations(plan, measured, console)
    code = _ended(directory, [kind for kind, _ in verdicts.values()])
    compared = {n: _as_data(results[n], *verdicts[n], DTYPES[n]) for n in names}
    return {"exact": code == 0, "steps": steps, "dtypes": compared}, code


def _as_data(
    found: Comparison, verdict: str, tensor: str, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the errors of a dtype; `decided_by` is the tensor of the verdict."""
    allowed = min(found.allowed(tensor, dtype), found.limit(dtype))
    return {
        "verdict": verdict,
        "decided_by": with_name((found.errors[tensor], tensor)),
        "allowed": allowed,
        "loss": found.loss,
        "gradient": with_name(found.gradient),
        "parameter": with_name(found.parameter),
        "buffer": with_name(found.buffer),
        "equal_bits": found.equal,
        "tensors": found.total,
        "activation_bytes": found.activation_bytes,
    }


def _ended(directory: Path, kinds: list[str]) -> int:
    """Return the exit code; let `gemsc run` know of a program that is exact."""
    # float64 comes first, if it is asked for: float32 alone proves too little
    if kinds[0] != "exact" or "wrong" in kinds:
        return 1
    plan = Plan.read(directory / "plan.toml")
    if plan.unchecked:
        plan = replace(plan, unchecked="")
        write_text(directory / "plan.toml", plan.to_toml(directory))
    return 0


def _about(plan: Plan, names: list[str]) -> Iterator[str]:
    """Yield what ranks and one process compute in, where that is not as usual."""
    if plan.precision != "float32":
        told = {"float64": "float64: without autocast"}
        told["float32"] = f"float32: within autocast, in {plan.precision}"
        yield "; ".join(told[name] for name in names)
    if plan.torch_compile:
        yield (
            "torch.compile: other kernels than those of one process, so equal up to "
            "rounding; stages that draw random numbers are compared without it"
        )


def _verify_run(
    directory: Path,
    names: list[str],
    num_steps: int,
    arguments: list[str],
    device: torch.device,
) -> Answer:
    """Compare whole runs."""
    verdicts: list[str] = []
    lines = []
    compared = {}
    table = Table(title=f"run of {directory} against a plain loop: relative error")
    for column in ("dtype", "loss", "evaluation", "saved model", "equal bits"):
        table.add_column(column)
    for name in names:
        found = verify_run(
            directory,
            dtype=DTYPES[name],
            num_steps=num_steps,
            arguments=arguments,
            device=device,
        )
        equal = f"{found.equal} of {found.total}"
        parts = map(_with_name, (found.evaluation, found.model))
        table.add_row(name, f"{found.loss:.1e}", *parts, equal)
        verdicts.append(found.judge(DTYPES[name]))
        compared[name] = {
            "verdict": JUDGED[verdicts[-1]],
            "loss": found.loss,
            "evaluation": with_name(found.evaluation),
            "model": with_name(found.model),
            "evaluations": found.num_evaluations,
            "equal_bits": found.equal,
            "tensors": found.total,
        }
        rounding = f" (rounding alone {found.rounding:.1e})" if found.rounding else ""
        lines.append(
            f"{name}: {num_steps} steps, {found.num_evaluations} evaluations, worst "
            f"{found.worst:.1e}{rounding}: {verdicts[-1]}"
        )
    console.print(table)
    for line in lines:
        console.print(line, highlight=False)
    code = 0 if verdicts[0] == "exact" and "NOT EXACT" not in verdicts else 1
    return {"exact": code == 0, "steps": num_steps, "dtypes": compared}, code


def _verdict(
    dtype: str, kind: str, tensor: str, found: Comparison, exact_in_float64: bool
) -> str:
    """Return what to say of whether the ranks compute what one process does."""
    allowed, limit = found.allowed(tensor, DTYPES[dtype]), found.limit(DTYPES[dtype])
    words = {"exact": "exact", "wrong": "NOT EXACT"}.get(
        kind, f"not decided in {dtype}" + "; exact in float64" * exact_in_float64
    )
    error = found.errors[tensor]
    line = f"{dtype}: worst {error:.1e}, allowed {min(allowed, limit):.0e}: {words}"
    if tensor in found.rounding:
        line += (
            f"\n{dtype}: that is {tensor}; rounding alone changes it by "
            f"{found.rounding[tensor]:.1e} in one process"
        )
    elif kind == "wrong":
        line += f"\n{dtype}: that is {tensor}"
    if found.inside is not None:
        kind = str(found.inside.dtype).removeprefix("torch.")
        line += f"\n{dtype}: the model computes in {kind} inside: {found.inside.call}"
    return line


def _row(found: Comparison) -> list[str]:
    return [
        f"{found.loss:.1e}",
        _with_name(found.gradient),
        _with_name(found.parameter),
        _with_name(found.buffer),
        f"{found.equal} of {found.total}",
    ]


def _with_name(pair: tuple[float, str]) -> str:
    error, name = pair
    return f"{error:.1e} {name}" if name else f"{error:.1e}"
