"""What `gemsc compile` wrote: checked before anything starts, then imported."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from gemsc.base.files import ELSEWHERE
from gemsc.base.fingerprint import changed_definitions, changed_settings
from gemsc.base.phase import Phase
from gemsc.base.process import is_started_by_torch
from gemsc.errors import GemscError, warn
from gemsc.plan import Plan, rank_file
from gemsc.source import run_file, syntax_error

if TYPE_CHECKING:  # what starts ranks loads no PyTorch
    import torch

    from gemsc.runtime.worker.program import RankProgram


def check_dtype(plan: Plan, dtype: torch.dtype | None) -> None:
    """Make sure that a program can run in a dtype; None is the one it was traced in.

    Raises:
        GemscError: it cannot; says why.
    """
    name = str(dtype).removeprefix("torch.")
    if dtype is not None and plan.only_dtype and name != plan.dtype:
        raise GemscError(
            f"{plan.model} can run only in {plan.dtype}: {plan.only_dtype}",
            help=f"use --dtype {plan.dtype}, or take dtypes from tensors: x.dtype",
        )


def check_planned_phases(
    plan: Plan, phases: Sequence[Phase], accumulate: int, *, has_optimizer: bool
) -> None:
    """Make sure that phases are those of a program's steps.

    Raises:
        GemscError: it was compiled with others, an update takes several steps, or there
            is an optimizer beside theirs.
    """
    planned, given = [p.name for p in plan.phases], [p.name for p in phases]
    if planned != given:
        shown = [", ".join(names) or "none" for names in (planned, given)]
        raise GemscError(
            f"the program has the phases {shown[0]}, but is given {shown[1]}",
            help="give the phases of the model's file, and compile again if they have "
            "changed",
        )
    if phases and has_optimizer:
        raise GemscError(
            "optimizer and scheduler cannot be combined with phases",
            help="leave them out: each phase has its own",
        )
    seldom = next((phase for phase in phases if phase.every > 1), None)
    if seldom is not None and accumulate > 1:
        raise GemscError(
            f"phase {seldom.name} has every={seldom.every}, which cannot be combined "
            f"with --accumulate {accumulate}",
            help="leave out --accumulate, and compile with more --micro-batches "
            "instead",
        )


def check_program(directory: Path, num_ranks: int) -> Plan:
    """Read the plan and make sure that it still fits its sources and the launch.

    Raises:
        GemscError: another number of ranks, a file of the program is missing, the
            model's file was edited since, or there is no compiler for --torch-compile.
    """
    plan = Plan.read(directory / "plan.toml")
    if num_ranks != plan.ranks:
        starter, option = "mpirun", "-n"
        if is_started_by_torch():
            starter, option = "torchrun", "--nproc-per-node"
        ways = f"use {starter} {option} {plan.ranks}"
        if plan.spec:  # else there is no dataset to run with
            ways += f", or `gemsc run {directory}`"
        raise GemscError(
            f"{directory} was compiled for {plan.ranks} ranks, but {starter} started "
            f"{num_ranks}",
            help=ways,
        )
    again = f"compile again: {plan.command_for(directory)}"
    if not plan.spec:
        again = f"run your script again that compiles {plan.model} into {directory}"
    changes = changed_definitions(plan.sources, whole=bool(plan.spec))
    if changes:
        raise GemscError(
            f"{directory} was compiled from other code: " + "; ".join(changes),
            help=again,
        )
    names = ["", *plan.variants]
    modules = [rank_file(r, name) for r in range(plan.copy_ranks) for name in names]
    weights = [
        f"{plan.weights}/stage{stage.index}.safetensors" for stage in plan.stages
    ]
    for file in (*modules, *weights):
        if not (directory / file).is_file():
            raise GemscError(f"{directory} has no {file}", help=again)
    if plan.torch_compile:
        check_compiler()
    return plan


def tell_of_settings(directory: Path, plan: Plan) -> None:
    """Say which files of settings, which the model's file reads, are others now."""
    for file in changed_settings(plan.sources):
        warn(
            f"{file} has changed since {directory} was compiled, whose model has the "
            "settings of then",
            help="compile again, unless only the data, the optimizer or hooks use what "
            f"has changed: {plan.command_for(directory)}",
        )


def check_weights(directory: Path, plan: Plan, resumed: object) -> None:
    """Make sure that a program's first weights are there, if none are `resumed`.

    Raises:
        GemscError: it has none, or the user's files are not there any more, or others.
    """
    folder = directory / plan.weights
    if resumed is None and (folder / ELSEWHERE).is_file():
        from gemsc.weights.first import FirstWeights  # loads PyTorch

        FirstWeights(folder).check()


def check_compiler() -> None:
    """Make sure that there is what makes kernels of Inductor's text.

    Raises:
        GemscError: there is no C++ compiler, or there are no headers of Python.
    """
    usual = "clang++" if sys.platform == "darwin" else "g++"
    compiler = os.environ.get("CXX") or usual
    header = Path(sysconfig.get_path("include"), "Python.h")
    if shutil.which(compiler) is None:
        missing = f"a C++ compiler, and there is no {compiler}"
        help = f"install {usual} (apt-get install g++), set CXX to another compiler"
    elif not header.is_file():
        missing = f"Python's headers, and there is no {header}"
        help = "install them (apt-get install python3-dev)"
    else:
        return
    raise GemscError(
        f"the program was compiled with --torch-compile, which needs {missing}",
        help=f"{help}, or compile the model again without --torch-compile",
    )


def load_program(directory: Path, rank: int, name: str = "") -> RankProgram:
    """Return what the file of a rank says of itself; see `rank_file`."""
    module = load_rank_module(directory, rank, name)
    try:
        program: RankProgram = module.PROGRAM
    except AttributeError:
        raise GemscError(
            f"{module.__file__} has no PROGRAM", help="compile again"
        ) from None
    return program


def load_rank_module(directory: Path, rank: int, name: str = "") -> ModuleType:
    """Import the file of a rank of a program directory."""
    path = directory / rank_file(rank, name)
    if not path.exists():
        raise GemscError(
            f"{directory} has no {path.name}",
            help="start as many ranks as the program has: `gemsc run` does",
        )
    own_name = f"gemsc_program_{abs(hash(str(directory)))}_{path.stem}"
    try:
        return run_file(own_name, path, {})
    except SyntaxError as error:  # it was edited
        raise syntax_error(path, error) from error
