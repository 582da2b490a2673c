"""How a rank starts: as `gemsc run` starts it, or with `load` in a user's own loop."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from gemsc.base.dtypes import HALF
from gemsc.base.elementwise import OptimizerFactory
from gemsc.base.phase import Phase
from gemsc.base.process import is_started_by_mpirun, is_started_by_torch
from gemsc.base.units import parse_seconds
from gemsc.errors import GemscError, say_note
from gemsc.plan import Plan
from gemsc.runtime.checkpoint.folder import saved_seed
from gemsc.runtime.process.binding import share_cores
from gemsc.runtime.process.device import claim_device, exact_arithmetic, num_gpus
from gemsc.runtime.process.failure import install_hooks, is_first, stop_all, watch_exit
from gemsc.runtime.process.status import REPORTED
from gemsc.runtime.process.stop import STOPPED, StopSignal
from gemsc.runtime.process.watch import start_watch
from gemsc.runtime.training.alike import SameBatches, SameCopies, check_same_files
from gemsc.runtime.training.arguments import DEFAULT_TIMEOUT, parse_arguments
from gemsc.runtime.training.callbacks import Callback
from gemsc.runtime.training.loop import Training
from gemsc.runtime.training.program_directory import check_program, check_weights
from gemsc.runtime.training.recording import record_timed_steps, time_steps
from gemsc.runtime.training.run_checks import (
    LabelsThatCount,
    RoundedNumbers,
    SameNumbers,
    StepsOfScheduler,
    UnreadInputs,
)
from gemsc.runtime.training.run_folder import choose_folder, held
from gemsc.runtime.training.trainer import (
    SchedulerFactory,
    Trainer,
)
from gemsc.runtime.training.verification import run_recorded_steps
from gemsc.runtime.transport.choose import (
    JobTransport,
    check_engine,
    start_transport,
)
from gemsc.runtime.transport.launcher import is_first_started
from gemsc.runtime.transport.transport import Transport
from gemsc.source import check_run_constants, split_constants
from gemsc.user_model import load_user_model

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def main(directory: Path, arguments: list[str] | None = None) -> int:
    """Run this rank under mpirun or torchrun; return the exit code."""
    options, device, wrong, code = argparse.Namespace(), None, None, 0
    try:
        options = parse_arguments(arguments)
        device = _claimed(directory, options)
    except GemscError as error:
        wrong = str(error)
    transport = _start(directory, getattr(options, "engine", None))
    if transport is None:
        return 1
    install_hooks(transport)
    kept = ExitStack()  # the run's folder, as long as the first rank lives
    try:
        start_watch(transport, getattr(options, "timeout", 0.0))
        unshared = _share_cores(transport, options)
        wrong = wrong or unshared
        if transport.rank == 0:
            wrong = wrong or _refusal(directory, transport, options, kept)
        refusal = next((r for r in transport.all_gather_object(wrong) if r), None)
        if refusal is not None:
            if transport.rank == 0 and is_first(REPORTED):
                print(refusal, file=sys.stderr, flush=True)  # noqa: T201
            transport.close()
            return 1
        if options.verify_into is not None:
            run_recorded_steps(
                directory,
                transport,
                options.verify_into,
                DTYPES[options.dtype],
                device or torch.device("cpu"),
            )
        elif options.record_into is not None:
            steps = options.steps or 1
            record_timed_steps(directory, transport, options.record_into, steps, device)
        elif options.time_into is not None:
            steps = options.steps or 1
            time_steps(directory, transport, options.time_into, steps, device)
        else:
            options = transport.all_gather_object(options)[0]
            code = train(directory, transport, options, device)
        transport.close()
    except BaseException as error:
        stop_all(error, transport)
    return code


def _claimed(directory: Path, options: argparse.Namespace) -> torch.device | None:
    """Return the device asked for, or that of this rank; None leaves the choice."""
    wanted = None if options.device == "auto" else torch.device(options.device)
    plan = Plan.read(directory / "plan.toml")
    return claim_device(
        wanted,
        deterministic=options.deterministic,
        per_device=options.per_device or plan.per_device,
        copy_ranks=plan.copy_ranks,
    )


def _start(directory: Path, wanted: str | None) -> JobTransport | None:
    """Return the end of the messages; None, and a word, if this rank would be alone."""
    try:
        check_engine(wanted)
        if not (is_started_by_mpirun() or is_started_by_torch()):
            _check_alone(directory, Plan.read(directory / "plan.toml").ranks)
        return start_transport()
    except GemscError as error:  # no rank knows of the others
        if is_first_started():
            print(error, file=sys.stderr, flush=True)  # noqa: T201
    return None


def _check_alone(directory: Path, ranks: int) -> None:
    if ranks > 1:
        raise GemscError(
            f"{directory} has {ranks} ranks, but no mpirun started this one",
            help=f"use mpirun -n {ranks}, srun --mpi=pmix -n {ranks}, "
            f"torchrun --nproc-per-node {ranks}, or `gemsc run`",
        )


def _share_cores(transport: Transport, options: argparse.Namespace) -> str | None:
    """Give this rank its cores; return why not. `options` have nothing if wrong."""
    how, helpers = getattr(options, "bind", "none"), getattr(options, "workers", 0)
    if how == "auto" and num_gpus(options.device):
        how = "none"  # which GPU is near which cores is not known
    try:
        share_cores(transport, how, num_helpers=helpers)
    except GemscError as error:
        return str(error)
    return None


def _refusal(
    directory: Path,
    transport: Transport,
    options: argparse.Namespace,
    kept: ExitStack,
) -> str | None:
    """Return why the program cannot run; else the run's folder is `kept` for it."""
    try:
        plan = check_program(directory, transport.size)
        if (folder := choose_folder(directory, options)) is not None:
            kept.enter_context(held(folder))
        check_weights(directory, plan, options.resume)
    except GemscError as error:
        return str(error)
    return None


def train(
    directory: Path,
    transport: Transport,
    options: argparse.Namespace,
    device: torch.device | None = None,
) -> int:
    """Train for the epochs or steps asked for; return the exit code."""
    plan = Plan.read(directory / "plan.toml")
    if not plan.spec:
        raise GemscError(
            f"{directory} was compiled from Python and has no dataset",
            help="call gemsc.load() and trainer.step() in your own loop",
        )
    check_same_files(directory, plan, transport)
    constants = split_constants(options.set)
    user = load_user_model(plan.spec, constants={**plan.constants, **constants})
    check_same_files(directory, plan, transport)  # now with what it imports
    check_run_constants(user.path, constants, plan.constants)
    if user.dataset is None:
        raise GemscError(
            f"{user.path} has no dataset()",
            help="add dataset(), which returns a map-style Dataset of (input, target)",
        )
    if options.seed is None:
        options.seed = saved_seed(options.resume)
    if options.dtype != "float32" and not plan.only_dtype:  # else as the file says
        torch.set_default_dtype(DTYPES[options.dtype])  # also of what forward makes
    trainer = Trainer(
        directory,
        transport,
        optimizer=user.optimizer,
        phases=user.make_phases(),
        device=device,
        dtype=None if options.dtype == "float32" else DTYPES[options.dtype],
        seed=options.seed,
        scheduler=user.scheduler,
        accumulate=options.accumulate,
        clip_norm=options.clip_norm,
        on_nonfinite=options.on_nonfinite,
    )
    training = Training(trainer, user, options)
    trainer.worker.detects_anomalies = options.detect_anomaly
    if options.resume is not None:
        trainer.resume(options.resume)
    trainer.leave_on_signals()
    compared = options.record_run is not None
    with exact_arithmetic(trainer.device if compared else torch.device("cpu")):
        training.run()
    StopSignal.ignore()
    return STOPPED if training.is_interrupted else 0


class DefaultOptimizer(Callback):
    """Says that a loop of one's own named no optimizer, as the file may have one."""

    def on_start(self, trainer: Trainer) -> None:
        """Say it before the first step."""
        if trainer.transport.rank == 0:
            say_note(
                "gemsc.load() got no optimizer=: it trains with SGD, learning rate 0.01"
            )


def load(
    directory: str | Path,
    *,
    optimizer: OptimizerFactory | None = None,
    phases: Sequence[Phase] | None = (),
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    scheduler: SchedulerFactory | None = None,
    accumulate: int = 1,
    clip_norm: float | None = None,
    on_nonfinite: str = "stop",
    deterministic: bool = False,
    per_device: int | None = None,
    callbacks: Iterable[Callback] = (),
    timeout: float | str | None = DEFAULT_TIMEOUT,
) -> Trainer:
    """Return this rank's trainer; call it on every rank, under mpirun or torchrun.

    `optimizer` gets the rank's (name, parameter) pairs; the default is SGD with a
    learning rate of 0.01. `scheduler` gets the optimizer and gives what steps the
    learning rate after each update. `phases` are those that `compile` got, if a step
    has several; None if it shall only evaluate. `dtype`, torch.float64 for example,
    becomes the default dtype, too. `seed`, `accumulate`, `clip_norm`, `on_nonfinite`,
    `deterministic` and `per_device` are those of `gemsc run`; `callbacks` follow the
    training (see `gemsc.Callback`).

    From then on, an uncaught exception on any rank, or `sys.exit` with an error, ends
    all ranks, and so does a rank that leaves while others wait for it. So does a
    `timeout` (seconds, or a text such as "10min"; None for never) in which no rank goes
    on and one waits for others. SIGTERM and SIGUSR1 set
    `trainer.is_leaving`: ask it after each step, save, and `sys.exit(75)`.

    Raises:
        GemscError: the directory holds no program, or one for another number of ranks,
            or its sources have changed; the timeout is no time.
    """
    folder = Path(directory)
    plan = Plan.read(folder / "plan.toml")
    if dtype is torch.float32 and getattr(torch, plan.dtype) in HALF:
        raise GemscError(
            f"{folder} was compiled in {plan.dtype}, which it keeps in float32",
            help="leave out dtype=, or let model() return model.float() and compile",
        )
    device = claim_device(
        device,
        deterministic=deterministic,
        per_device=per_device or plan.per_device,
        copy_ranks=plan.copy_ranks,
    )
    transport = start_transport()
    install_hooks(transport)
    watch_exit(transport)
    is_never = timeout is None or timeout == "never"
    start_watch(transport, 0.0 if is_never else parse_seconds(str(timeout)))
    check_program(folder, transport.size)
    check_same_files(folder, plan, transport)
    share_cores(transport)
    if dtype is not None:
        torch.set_default_dtype(dtype)  # also of what forward makes
    followed = [StepsOfScheduler(), *callbacks, SameBatches(), SameCopies()]
    followed += [SameNumbers(), LabelsThatCount(), RoundedNumbers(), UnreadInputs()]
    if optimizer is None and not phases:
        followed.append(DefaultOptimizer())
    trainer = Trainer(
        folder,
        transport,
        optimizer=optimizer,
        phases=phases,
        device=device,
        dtype=dtype,
        seed=seed,
        scheduler=scheduler,
        accumulate=accumulate,
        clip_norm=clip_norm,
        on_nonfinite=on_nonfinite,
        callbacks=followed,
    )
    trainer.leave_on_signals()
    return trainer
