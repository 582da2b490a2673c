"""What a step and an evaluation gave in the ranks and in the model, compared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gemsc.verify.compare import StepRecord
from gemsc.verify.field.locate import (
    first_cause,
)
from gemsc.verify.field.numbers import Field


@dataclass(frozen=True)
class AllInputs:
    """What was found: `verdict` is "proved", "not equal" or "not decided"."""

    verdict: str
    why: str = ""
    num_gradients: int = 0
    num_buffers: int = 0
    degree: int = 0
    bound: float = 1.0
    chooses: bool = False  # a maximum or a comparison, which leaves numbers out
    seconds: float = 0.0
    wrong: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        if self.verdict == "proved":
            but = ", but for what maxima and comparisons leave out"
            return (
                f"all inputs: proved for forward, {self.num_gradients} gradients, "
                f"{self.num_buffers} buffers, evaluation; wrong with probability below "
                f"{self.bound:.0e} (degree {self.degree}){but * self.chooses}; "
                f"{self.seconds:.0f} s"
            )
        words = {"not equal": "NOT EQUAL"}.get(self.verdict, self.verdict)
        return f"all inputs: {words}: {self.why}"


@dataclass(frozen=True)
class _Evaluated:
    """The loss of an evaluation, the mean of so many terms, and the outputs."""

    loss: float = 0.0
    terms: float = 1.0
    outputs: Mapping[str, Tensor] = field(default_factory=dict)


def _compared(
    steps: tuple[StepRecord, StepRecord],
    evaluations: tuple[_Evaluated, _Evaluated],
    drawn: Field,
) -> AllInputs:
    """Compare what a step and an evaluation of the ranks and of the model gave."""
    actual, expected = steps
    losses = {
        "the loss": ([step.losses[0] for step in steps], expected.terms[0]),
        "evaluation: the loss": (
            [evaluation.loss for evaluation in evaluations],
            evaluations[1].terms,
        ),
    }
    wrong = [
        name
        for name, (pair, terms) in losses.items()
        if not all(map(math.isfinite, pair))
        or len({round(loss * terms) % drawn.p for loss in pair}) > 1
    ]
    mine, theirs = (evaluation.outputs for evaluation in evaluations)
    groups: tuple[tuple[str, Mapping[str, Tensor], Mapping[str, Tensor]], ...] = (
        ("the gradient of ", actual.gradients, expected.gradients),
        ("buffer ", actual.state, _buffers(expected)),
        ("evaluation: ", mine, theirs),
    )
    for kind, held, wanted in groups:
        for name, tensor in wanted.items():
            if name not in held:
                wrong.append(f"{kind}{name} is missing")
            elif held[name].shape != tensor.shape or not torch.equal(
                drawn.of(held[name].clone()), drawn.of(tensor.clone())
            ):
                wrong.append(f"{kind}{name}")
    wrong += [
        f"the gradient of {name}, which has none"
        for name, tensor in actual.gradients.items()
        if name not in expected.gradients and bool((drawn.of(tensor) != 0).any())
    ]
    wrong += [f"the copies of {name}" for name in sorted(actual.unequal)]
    counts = len(expected.gradients), len(_buffers(expected))
    if wrong:
        return AllInputs("not equal", first_cause(wrong), *counts, wrong=tuple(wrong))
    return AllInputs("proved", "", *counts)


def _buffers(record: StepRecord) -> dict[str, Tensor]:
    return {n: t for n, t in record.state.items() if n not in record.gradients}
