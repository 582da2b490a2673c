"""What a rank writes down for `gemsc verify`: of given batches, or of a whole run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gemsc.base.boxes import Box
from gemsc.base.dtypes import as_real
from gemsc.base.elementwise import OptimizerFactory
from gemsc.base.phase import Phase
from gemsc.base.rng import same_draws
from gemsc.plan import Plan
from gemsc.runtime.data.shared import Digests
from gemsc.runtime.memory.meter import ActivationMeter
from gemsc.runtime.process.device import exact_arithmetic
from gemsc.runtime.training.callbacks import Callback
from gemsc.runtime.training.step_report import StepReport
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.transport.transport import Transport
from gemsc.runtime.worker.program import Run
from gemsc.runtime.worker.worker import Worker
from gemsc.user_model import load_user_model
from gemsc.weights.write import write_tensors

CPU = torch.device("cpu")
NEAR_ZERO = "near_zero.txt"  # beside the batches: see `without_noise`


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
    optimizer, phases = None, tuple[Phase, ...]()
    if plan.spec:
        user = load_user_model(plan.spec, constants=plan.constants)
        optimizer, phases = user.optimizer, user.make_phases()
    if not plan.only_dtype:  # else it is what the file says
        torch.set_default_dtype(dtype)  # also of what forward makes
    limit = folder / NEAR_ZERO
    with exact_arithmetic(device), same_draws():
        record_steps(
            *(directory, transport, folder, batches, dtype, optimizer),
            phases=phases,
            device=device,
            near_zero=float(limit.read_text()) if limit.exists() else 0.0,
        )


def record_steps(
    directory: Path,
    transport: Transport,
    folder: Path,
    batches: list[tuple[object, object]],
    dtype: torch.dtype,
    optimizer: OptimizerFactory | None = None,
    *,
    phases: Sequence[Phase] = (),
    measure: bool = True,
    device: torch.device = CPU,
    near_zero: float = 0.0,
) -> list[float]:
    """Train on `batches`; write gradients of the first step and the last state."""
    trainer = Trainer(
        directory,
        transport,
        dtype=dtype,
        device=device,
        optimizer=optimizer,
        phases=phases,
        on_nonfinite="warn",  # one process goes on, too
    )
    return recorded(trainer, folder, batches, measure=measure, near_zero=near_zero)


def without_noise(gradients: Iterable[Tensor | None], near_zero: float) -> None:
    """Set to zero what is no larger: gradients that are zero but for rounding."""
    for gradient in gradients:
        if gradient is not None:
            gradient.masked_fill_(gradient.abs() <= near_zero, 0.0)


def drop_noise(worker: Worker, near_zero: float) -> None:
    """Set to zero what is `near_zero` in the gradients of the update that comes."""
    if near_zero:
        parameters = worker.updates.parameters.values()
        without_noise((parameter.grad for parameter in parameters), near_zero)


def recorded(
    trainer: Trainer,
    folder: Path,
    batches: list[tuple[object, object]],
    *,
    measure: bool = True,
    near_zero: float = 0.0,
) -> list[float]:
    """Train on `batches`; write gradients of the first step and the last state.

    What is `near_zero` in a gradient is zero for the optimizer. Of a step in phases,
    the losses are those of all phases, one after the other. Each rank writes
    `gradients{rank}.safetensors`, `state{rank}.safetensors`, `losses{rank}.json`,
    `held{rank}.json`: of what it has parts, what it alone holds, and the ranks of its
    grid, and `memory{rank}.json`: peak bytes of activations and of all, zero without
    `measure`, which takes its time.
    """
    rank, of_phases = trainer.transport.rank, dict[str, Tensor]()

    def write_gradients() -> None:
        updates = trainer.worker.updates
        updates.gather_gradients()
        named = trainer.worker.stages.parameters
        gradients = {n: as_real(p.grad) for n, p in named.items() if p.grad is not None}
        write_tensors(folder / f"gradients{rank}.safetensors", of_phases | gradients)
        if trainer.phases:
            of_phases.update({name: grad.clone() for name, grad in gradients.items()})
        updates.before = partial(drop_noise, trainer.worker, near_zero)
        updates.before()

    for variant in trainer.worker.variants.values():
        variant.updates.before = write_gradients
    meter = metered(trainer.worker) if measure else None
    trainer.add_callbacks([losses := Losses()])
    for input, target in batches:
        trainer.step(input, target)
    with trainer.worker.updates.whole_weights():
        tensors = trainer.stages.tensors()
        state = {name: as_real(tensor) for name, tensor in tensors.items()}
        write_tensors(folder / f"state{rank}.safetensors", state)
    (folder / f"losses{rank}.json").write_text(json.dumps(losses.losses))
    parts = {n: asdict(part) for n, part in trainer.program.parts.items()}
    grid = trainer.worker.grid.ranks if trainer.worker.grid is not None else [rank]
    alone = [name for name in state if trainer.program.is_placed(name)]
    held = {"grid": grid, "parts": parts, "alone": alone}
    (folder / f"held{rank}.json").write_text(json.dumps(held))
    (folder / f"memory{rank}.json").write_text(
        json.dumps([meter.peak_bytes, meter.peak_total_bytes] if meter else [0, 0])
    )
    return losses.losses


class Losses(Callback):
    """Keeps the losses of all steps, and of all phases of each."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        """Keep the losses of the step."""
        self.losses += report.losses.values() or [report.loss]


def metered(worker: Worker) -> ActivationMeter:
    """Return a meter that follows all that this worker does from now on."""
    meter = ActivationMeter(worker.stages.own_tensors, lambda: _others(worker))
    take, forward, backward = worker.input, worker.run, worker.backward

    def metered_input(name: str, m: int) -> Tensor:
        return take(name, m).clone()  # as on a device: a micro-batch at a time

    def metered_run(run: Run, m: int, *inputs: Tensor) -> Any:
        with meter.forward(inputs):
            return forward(run, m, *inputs)

    def metered_backward(
        run: Run, m: int, *gradients: Tensor | None
    ) -> tuple[Tensor, ...]:
        worker.mail.release_arrived()
        meter.sample()
        # memory grows when the first backward of a step makes the gradients, and when
        # something is deferred, recomputed or brought back
        parameters = worker.stages[run].parameters()
        is_first = all(parameter.grad is None for parameter in parameters)
        meter.closely = is_first or meter.brings_back or worker.defers(run, m)
        result = backward(run, m, *gradients)
        meter.sample()
        return result

    for method in (metered_input, metered_run, metered_backward):
        setattr(worker, method.__name__.removeprefix("metered_"), method)
    return meter


def _others(worker: Worker) -> Iterator[Tensor]:
    """Yield all that the rank holds besides activations."""
    yield from worker.stages.own_tensors()
    for parameter in worker.stages.parameters.values():
        if parameter.grad is not None:
            yield parameter.grad
    for parameter in worker.updates.parameters.values():  # perhaps rows of their own
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    if worker.updates.optimizer is not None:
        states = worker.updates.optimizer.state_dict()["state"]
        yield from (leaf for leaf in tree_leaves(states) if isinstance(leaf, Tensor))
    yield from worker.mail.buffers()


FILE = "run.json"
Figures = dict[str, tuple[float, float]]  # mean, and the samples or terms in it


@dataclass
class RunRecord:
    """Losses of all steps, figures of all evaluations, and the samples of each batch.

    A run that is not verified keeps nothing.
    """

    is_kept: bool = True
    losses: list[float] = field(default_factory=list)
    samples: list[Digests] = field(default_factory=list)
    figures: list[Figures] = field(default_factory=list)
    eval_samples: list[Digests] = field(default_factory=list)

    @classmethod
    def begin(cls, worker: Worker, folder: Path | None) -> RunRecord:
        """Return that of a run which is about to begin, if there is a folder for it.

        What a limit there calls near zero in a gradient is zero for the optimizer.
        """
        if folder is not None and (limit := folder / NEAR_ZERO).exists():
            near_zero = float(limit.read_text())
            for variant in worker.variants.values():
                variant.updates.before = partial(drop_noise, worker, near_zero)
        return cls(is_kept=folder is not None)

    def draws(self) -> AbstractContextManager[None]:
        """Let a run that is verified draw the numbers that the plain loop draws."""
        return same_draws() if self.is_kept else nullcontext()

    def add_step(self, loss: float, samples: Digests) -> None:
        """Note the loss of a step, and what all ranks read for it."""
        if self.is_kept:
            self.losses.append(loss)
            self.samples.append(samples)

    def add_evaluated(self, samples: Digests) -> None:
        """Note what all ranks read for a batch of an evaluation."""
        if self.is_kept:
            self.eval_samples.append(samples)

    def add_figures(self, figures: Figures) -> None:
        """Note what an evaluation has found."""
        if self.is_kept:
            self.figures.append(figures)

    def write(self, folder: Path) -> None:
        """Write the record into a folder."""
        parts = {
            "losses": self.losses,
            "samples": [[*digests.items()] for digests in self.samples],
            "figures": self.figures,
            "eval_samples": [[*digests.items()] for digests in self.eval_samples],
        }
        (folder / FILE).write_text(json.dumps(parts))

    @classmethod
    def read(cls, folder: Path) -> RunRecord:
        """Read what `write` wrote."""
        parts = json.loads((folder / FILE).read_text())
        for name in ("samples", "eval_samples"):
            parts[name] = [
                {(index, _box(box)): text for (index, box), text in digests}
                for digests in parts[name]
            ]
        return cls(**parts)


def _box(box: list[list[int]] | None) -> Box | None:
    return None if box is None else tuple((start, stop) for start, stop in box)
