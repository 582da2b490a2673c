"""Memory: what a plan predicts against what the allocator hands out."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from peak_tensors import PeakTensors

from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.transport.local import run_local
from gemsc.runtime.transport.transport import Transport

from .lines import Line, Place, judged
from .subjects import SUBJECTS, compiled, sgd

__all__ = ["MODES", "memory"]

MODES = {
    "plain": {},
    "recompute": {"recompute": ("all",)},
    "offload": {"offload": ("all",)},
}
MICRO_BATCHES = 2
STEPS = 3
LOWEST = 0.95  # of what is predicted for tensors


def memory(name: str, mode: str, place: Place) -> Iterator[Line]:
    """Train a program of one rank; compare its highest bytes with the plan's."""
    subject = SUBJECTS[name]
    folder = place.scratch / "program"
    choices = {"ranks": 1, "micro_batches": MICRO_BATCHES, **MODES[mode]}
    plan = compiled(subject, place, folder, **choices).plan
    inputs, target = subject.data(place, MICRO_BATCHES)

    def train(transport: Transport) -> dict[str, int]:
        trainer = Trainer(folder, transport, optimizer=sgd, device=place.device)
        for _ in range(STEPS):
            trainer.step(inputs, target)
        if not place.has_gpu:
            with PeakTensors() as seen:
                trainer.step(inputs, target)
            batch = sum(tensor.nbytes for tensor in (*inputs, target))  # of the host
            return {"allocated": seen.peak - batch}
        return {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
        }

    (peaks,) = run_local(1, train, timeout=600)
    predicted = plan.peak_bytes[0]
    tensors = predicted - plan.workspace_bytes
    libraries = peaks["allocated"] - tensors
    yield judged(
        f"{name} {mode}",
        LOWEST * tensors <= peaks["allocated"] <= predicted or place.is_tiny,
        f"{peaks['allocated'] / 2**20:.1f} MiB allocated; predicted "
        f"{tensors / 2**20:.1f} of tensors, libraries took {libraries / 2**20:.1f}",
        f"the tensors, and {plan.workspace_bytes / 2**20:.0f} MiB for libraries"
        if not place.is_tiny
        else "none in this size",
        predicted=predicted,
        **peaks,
    )
