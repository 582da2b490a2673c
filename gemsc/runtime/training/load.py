"""Load a program under mpirun, for users who keep their own training loop."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from gemsc.base.units import parse_seconds
from gemsc.plan import Plan
from gemsc.runtime.process.device import claim_device
from gemsc.runtime.process.failure import install_hooks, watch_exit
from gemsc.runtime.process.watch import start_watch
from gemsc.runtime.training.arguments import DEFAULT_TIMEOUT
from gemsc.runtime.training.callback import Callback
from gemsc.runtime.training.program_directory import check_program
from gemsc.runtime.training.train import share_cores
from gemsc.runtime.training.trainer import (
    OptimizerFactory,
    SchedulerFactory,
    Trainer,
)
from gemsc.runtime.transport.mpi import MpiTransport


def load(
    directory: str | Path,
    *,
    optimizer: OptimizerFactory | None = None,
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
    """Return this rank's trainer; call it on every rank, started with mpirun.

    `optimizer` gets the rank's (name, parameter) pairs; the default is SGD with a
    learning rate of 0.01. `scheduler` gets the optimizer and gives what steps the
    learning rate after each update. `dtype`, torch.float64 for example, becomes the
    default dtype, too. `seed`, `accumulate`, `clip_norm`, `on_nonfinite`,
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
    device = claim_device(
        device,
        deterministic=deterministic,
        per_device=per_device or plan.per_device,
        copy_ranks=plan.copy_ranks,
    )
    transport = MpiTransport()
    install_hooks(transport)
    watch_exit(transport)
    start_watch(transport, _seconds(timeout))
    check_program(folder, transport.size)
    share_cores(transport)
    if dtype is not None:
        torch.set_default_dtype(dtype)  # also of what forward makes
    trainer = Trainer(
        folder,
        transport,
        optimizer=optimizer,
        device=device,
        dtype=dtype,
        seed=seed,
        scheduler=scheduler,
        accumulate=accumulate,
        clip_norm=clip_norm,
        on_nonfinite=on_nonfinite,
        callbacks=callbacks,
    )
    trainer.leave_on_signals()
    return trainer


def _seconds(timeout: float | str | None) -> float:
    """Return seconds, 0 for never.

    Raises:
        GemscError: the text is not a time, or it is negative.
    """
    if timeout is None or timeout == "never":
        return 0.0
    return parse_seconds(str(timeout))
