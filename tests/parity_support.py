"""N ranks on threads against one process: a model traced and compiled once a module."""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path

import torch
from models import MODELS, float32_by_default
from support import run_on_threads

from gemsc.codegen.package import write_directory
from gemsc.compiler import CompiledProgram, Traced, lower, trace
from gemsc.options import CompileOptions
from gemsc.verify.record import StepRecord
from gemsc.verify.steps import compare, reference_steps

__all__ = [
    "FLOAT32",
    "FLOAT64",
    "GRID_PLANS",
    "lowered",
    "options",
    "reference",
    "traced",
    "trained",
    "worst_error",
]

FLOAT64 = 1e-9
FLOAT32 = 1e-4


def options(**choices: object) -> CompileOptions:
    """Return options whose types a table of tests does not know."""
    return CompileOptions(**choices)  # type: ignore[arg-type]


GRID_PLANS = (
    options(ranks=4, tiles="2x2", micro_batches=2),
    options(ranks=2, tiles="2x1", micro_batches=3),
    options(ranks=4, tiles="2x1", micro_batches=4, schedule="1f1b"),
    options(ranks=6, tiles="3x1,2x1", micro_batches=3, schedule="gpipe"),
    options(ranks=4, tiles="2x1,2x1", micro_batches=3),
    options(ranks=4, tiles="2x1", schedule="mast"),
    options(ranks=4, tiles="2x1", schedule="master", times=2),
    options(ranks=4, tiles="2x1,2x1", schedule="chimera", micro_batches=4),
    options(ranks=3, tiles="1x2", micro_batches=3, placement="folded"),
    options(ranks=3, tiles="2x1", schedule="interleaved", micro_batches=4),
    options(ranks=3, tiles="2x1", data=2, micro_batches=2),
    options(ranks=3, tiles="2x1", data=2, schedule="master", times=2),
)


@cache
def traced(name: str) -> Traced:
    """Return a model of `models.py`, recorded."""
    case = MODELS[name]
    with float32_by_default():  # it is kept for tests that want it otherwise
        return trace(
            case.build(),
            case.example_inputs,
            loss=case.loss,
            example_target=case.example_target,
            check=False,
        )


@lru_cache(maxsize=16)  # tests of one program follow each other
def lowered(name: str, options: CompileOptions) -> CompiledProgram:
    """Return the program of a model and options."""
    with float32_by_default():
        return lower(traced(name), options)


@lru_cache(maxsize=16)
def reference(
    name: str, micro_batches: int, dtype: torch.dtype, num_steps: int
) -> StepRecord:
    """Return what one process computes."""
    case = MODELS[name]
    batches = [case.inputs(micro_batches, dtype)] * num_steps
    return reference_steps(case.build(), case.loss, batches, micro_batches, dtype)


def worst_error(
    name: str,
    options: CompileOptions,
    directory: Path,
    dtype: torch.dtype = torch.float64,
    num_steps: int = 1,
) -> float:
    """Return the largest error of some steps on threads against one process."""
    program = lowered(name, options)
    write_directory(program.compilation, directory)
    plan = program.plan
    count = plan.data * plan.micro_batches
    batches = [MODELS[name].inputs(count, dtype)] * num_steps
    record = run_on_threads(directory, plan.ranks, batches, dtype=dtype, measure=False)
    expected = reference(name, count, dtype, num_steps)
    return compare(record, expected).worst


def trained(
    name: str, options: CompileOptions, directory: Path, dtype: torch.dtype
) -> tuple[StepRecord, CompiledProgram]:
    """Return what two measured steps on threads give, and the program."""
    program = lowered(name, options)
    write_directory(program.compilation, directory)
    plan = program.plan
    batch = MODELS[name].inputs(plan.data * plan.micro_batches, dtype)
    record = run_on_threads(directory, plan.ranks, [batch] * 2, dtype=dtype)
    return record, program
