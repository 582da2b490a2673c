"""Run given batches and write down losses, gradients, buffers: for `gemsc verify`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch

from gemsc.base.dtypes import as_real
from gemsc.base.rng import same_draws
from gemsc.plan import Plan
from gemsc.runtime.process.device import exact_arithmetic
from gemsc.runtime.training.trainer import OptimizerFactory, Trainer
from gemsc.runtime.transport.transport import Transport
from gemsc.runtime.worker.metered import metered
from gemsc.user_model import load_user_model
from gemsc.weights.write import write_tensors

CPU = torch.device("cpu")


def run_recorded_steps(
    directory: Path,
    transport: Transport,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device = CPU,
) -> None:
    """Train on the batches in `folder` (batches.pt) and leave this rank's record."""
    batches = torch.load(folder / "batches.pt", weights_only=True)
    plan = Plan.read(directory / "plan.toml")
    optimizer = None
    if plan.spec:
        optimizer = load_user_model(plan.spec, constants=plan.constants).optimizer
    torch.set_default_dtype(dtype)  # also of what forward makes
    with exact_arithmetic(device), same_draws():
        record_steps(
            directory, transport, folder, batches, dtype, optimizer, device=device
        )


def record_steps(
    directory: Path,
    transport: Transport,
    folder: Path,
    batches: list[tuple[object, object]],
    dtype: torch.dtype,
    optimizer: OptimizerFactory | None = None,
    *,
    measure: bool = True,
    device: torch.device = CPU,
) -> list[float]:
    """Train on `batches`; write gradients of the first step and the last state."""
    trainer = Trainer(
        directory,
        transport,
        dtype=dtype,
        device=device,
        optimizer=optimizer,
        on_nonfinite="warn",  # one process goes on, too
    )
    return recorded(trainer, folder, batches, measure=measure)


def recorded(
    trainer: Trainer,
    folder: Path,
    batches: list[tuple[object, object]],
    *,
    measure: bool = True,
) -> list[float]:
    """Train on `batches`; write gradients of the first step and the last state.

    Each rank writes `gradients{rank}.safetensors`, `state{rank}.safetensors`,
    `losses{rank}.json`, `held{rank}.json`: of what it has parts, what it alone holds,
    and the ranks of its grid, and `memory{rank}.json`: peak bytes of activations and of
    all, zero without `measure`, which takes its time.
    """
    rank = trainer.transport.rank

    def write_gradients() -> None:
        trainer.worker.updates.gather_gradients()
        named = trainer.stages.parameters
        gradients = {n: as_real(p.grad) for n, p in named.items() if p.grad is not None}
        write_tensors(folder / f"gradients{rank}.safetensors", gradients)
        trainer.worker.updates.before = None

    trainer.worker.updates.before = write_gradients
    meter = metered(trainer.worker) if measure else None
    losses = [trainer.step(input, target) for input, target in batches]
    state = {name: as_real(tensor) for name, tensor in trainer.stages.tensors().items()}
    write_tensors(folder / f"state{rank}.safetensors", state)
    (folder / f"losses{rank}.json").write_text(json.dumps(losses))
    parts = {n: asdict(part) for n, part in trainer.program.parts.items()}
    grid = trainer.worker.grid.ranks if trainer.worker.grid is not None else [rank]
    alone = [name for name in state if trainer.program.is_placed(name)]
    held = {"grid": grid, "parts": parts, "alone": alone}
    (folder / f"held{rank}.json").write_text(json.dumps(held))
    (folder / f"memory{rank}.json").write_text(
        json.dumps([meter.peak_bytes, meter.peak_total_bytes] if meter else [0, 0])
    )
    return losses
