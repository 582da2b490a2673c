"""Parity: generated ranks against one process, both on this device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gemsc.user_model import UserModel
from gemsc.verify.steps import verify_program

from .lines import Line, Place, judged
from .subjects import SUBJECTS, compiled, unet

__all__ = ["PARITY", "parity"]

EXACT = 1e-9  # relative, in float64


@dataclass(frozen=True)
class Plan:
    """A program; `same_bits` where it adds up in the order of one process."""

    choices: dict[str, Any] = field(default_factory=dict)
    subject: str = "unet"
    same_bits: bool = True


TWO = {"ranks": 2, "micro_batches": 4}
PARITY = {
    "one stage": Plan({"ranks": 1, "micro_batches": 2}),
    "one encoder": Plan({"ranks": 1, "micro_batches": 2}, "encoder"),
    "1f1b": Plan({**TWO, "schedule": "1f1b"}),
    "zb-h1": Plan({**TWO, "schedule": "zb-h1"}),
    "offload": Plan({**TWO, "offload": ("all",)}),
    "mast": Plan({**TWO, "schedule": "mast"}, same_bits=False),
    "data": Plan({"ranks": 2, "data": 2, "micro_batches": 2}, same_bits=False),
    "tiles": Plan({"ranks": 2, "tiles": "2x1", "micro_batches": 2}, same_bits=False),
}


def parity(name: str, place: Place) -> Iterator[Line]:
    """Compare a program with one process, in float64 and in float32 without TF32."""
    plan = PARITY[name]
    subject = SUBJECTS[plan.subject]
    if place.has_gpu and plan.subject == "unet":
        subject = unet(side=128, base=16, batch=2)
    place = replace(place, is_tiny=True)  # weights of the rest go through files
    folder = place.scratch / "program"
    compiled(subject, place, folder, **plan.choices)
    inputs, target = subject.data(place)
    user = UserModel(
        path=folder,
        module=sys.modules[__name__],
        name="model",
        model=subject.build(place),
        example_inputs=inputs,
        loss=subject.loss,
        example_target=target,
    )
    for dtype in (torch.float64, torch.float32):
        outcome = verify_program(folder, dtype=dtype, user=user, device=place.device)
        bits = f"{outcome.equal} of {outcome.total} tensors have equal bits"
        is_exact = outcome.judge(dtype)[0] == "exact"
        if dtype is torch.float64:
            limit = f"{EXACT:.0e}"
        elif plan.same_bits:
            is_exact, limit = outcome.equal == outcome.total, "all bits"
        else:
            limit = "1e-4, or as much as rounding alone"
        yield judged(
            f"{name} {str(dtype).removeprefix('torch.')}",
            is_exact,
            f"worst error {outcome.worst:.1e}, {bits}",
            limit,
            worst=outcome.worst,
            equal=outcome.equal,
            total=outcome.total,
        )
