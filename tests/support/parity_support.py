"""N ranks on threads against one process: a model traced and compiled once a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from branch_models import BRANCH_MODELS
from models import MODELS, float32_by_default
from norm_models import NORM_MODELS
from shard_models import SHARD_MODELS
from threads import run_on_threads
from tower_models import TOWER_MODELS

from gemsc.base.rng import same_draws
from gemsc.codegen.package import write_directory
from gemsc.compiler import CompiledProgram, Traced, lower, trace
from gemsc.options import CompileOptions
from gemsc.verify.compare import StepRecord, compare
from gemsc.verify.one_process import reference_steps

__all__ = [
    "FLOAT32",
    "FLOAT64",
    "GRID_PLANS",
    "NETWORKS",
    "cells",
    "draws_of",
    "lowered",
    "options",
    "reference",
    "traced",
    "trained",
    "worst_error",
]

Draws = Callable[[], AbstractContextManager[None]]
Column = tuple[str, int, str]  # schedule or what it goes with, ranks, trunk

FLOAT64 = 1e-9
FLOAT32 = 1e-4
NETWORKS = MODELS | SHARD_MODELS | TOWER_MODELS | BRANCH_MODELS | NORM_MODELS


def options(**choices: object) -> CompileOptions:
    """Return options whose types a table of tests does not know."""
    return CompileOptions(**choices)  # type: ignore[arg-type]


GRID_PLANS = (
    options(ranks=4, tiles="2x2", micro_batches=2),
    options(ranks=2, tiles="2x1", micro_batches=3),
    options(ranks=4, tiles="2x1", micro_batches=4, schedule="1f1b"),
    options(ranks=6, tiles="3x1,2x1", micro_batches=3, schedule="gpipe"),
    options(ranks=4, tiles="2x1,2x1", micro_batches=3),
    options(ranks=4, tiles="2x1", schedule="mast", micro_batches=2),
    options(ranks=4, tiles="2x1", schedule="master", times=2),
    options(ranks=4, tiles="2x1,2x1", schedule="chimera", micro_batches=4),
    options(ranks=3, tiles="1x2", micro_batches=3, placement="folded"),
    options(ranks=3, tiles="2x1", schedule="interleaved", micro_batches=4),
    options(ranks=6, tiles="2x1", data=2, micro_batches=2),
    options(ranks=6, tiles="2x1", data=2, schedule="master", times=2),
)


@cache
def traced(name: str) -> Traced:
    """Return a model of one of the tables, recorded."""
    case = NETWORKS[name]
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
    name: str,
    micro_batches: int,
    dtype: torch.dtype,
    num_steps: int,
    draws: Draws = nullcontext,
) -> StepRecord:
    """Return what one process computes."""
    case = NETWORKS[name]
    batches = [case.inputs(micro_batches, dtype)] * num_steps
    model = case.build()
    with draws():
        return reference_steps(model, case.loss, batches, micro_batches, dtype)


def worst_error(
    name: str,
    options: CompileOptions,
    directory: Path,
    dtype: torch.dtype = torch.float64,
    num_steps: int = 1,
    draws: Draws = nullcontext,
) -> float:
    """Return the largest error of some steps on threads against one process.

    Steps of networks that draw numbers are comparable in `draws()` of `same_draws`.
    """
    program = lowered(name, options)
    write_directory(program.compilation, directory)
    plan = program.plan
    count = plan.data * plan.micro_batches
    batches = [NETWORKS[name].inputs(count, dtype)] * num_steps
    record = run_on_threads(
        directory, plan.ranks, batches, dtype=dtype, measure=False, draws=draws
    )
    expected = reference(name, count, dtype, num_steps, draws)
    return compare(record, expected).worst


def trained(
    name: str, options: CompileOptions, directory: Path, dtype: torch.dtype
) -> tuple[StepRecord, CompiledProgram]:
    """Return what two measured steps on threads give, and the program."""
    program = lowered(name, options)
    write_directory(program.compilation, directory)
    plan = program.plan
    batch = NETWORKS[name].inputs(plan.data * plan.micro_batches, dtype)
    record = run_on_threads(directory, plan.ranks, [batch] * 2, dtype=dtype)
    return record, program


def draws_of(name: str) -> Draws:
    """Return how a network of this name draws random numbers."""
    return same_draws if "dropout" in name else nullcontext


def cells(
    names: Iterable[str],
    columns: Callable[[str], list[Column]],
    chosen: Callable[[str], list[Column]],
) -> list[Any]:
    """Return all columns of networks as test cases; those not chosen run nightly."""
    return [
        pytest.param(
            name,
            column,
            id=f"{name} {column}",
            marks=() if column in chosen(name) else pytest.mark.nightly,
        )
        for name in names
        for column in columns(name)
    ]
