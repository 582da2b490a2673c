"""--detect-anomaly names the line that first gives what is not finite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from program_support import Net, X, batch_of, on_ranks, written
from torch import Tensor

from gemsc.errors import GemscError
from gemsc.runtime.training.trainer import Trainer


def logarithm(self: Net, x: Tensor) -> Tensor:
    x = self.b(self.a(x))
    x = torch.log(-x.square())  # forward
    return self.d(self.c(x))


def root(self: Net, x: Tensor) -> Tensor:
    x = self.b(self.a(x))
    x = torch.sqrt(x * 0)  # backward: its gradient at 0
    return self.d(self.c(x))


class Square(torch.autograd.Function):
    """Its backward divides by zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 0


def own(self: Net, x: Tensor) -> Tensor:
    x = Square.apply(self.b(self.a(x)))  # type: ignore[no-untyped-call]
    x = x + 1
    return self.d(self.c(x))


def masked(self: Net, x: Tensor) -> Tensor:
    x = self.b(self.a(x))
    x = torch.softmax(x.masked_fill(x > 10, -torch.inf).log_softmax(1).exp().log(), 1)
    return self.d(self.c(x))


def first_step(forward: Callable[..., Any], directory: Path) -> None:
    written(directory, Net(forward), ranks=2, micro_batches=2)
    batch = batch_of(((X,), X), 2)

    def step(trainer: Trainer) -> None:
        trainer.worker.detects_anomalies = True
        trainer.step(*batch)

    on_ranks(directory, 2, step)


@pytest.mark.parametrize(
    ("forward", "line", "what"),
    [
        (logarithm, "x = torch.log(-x.square())", "log gives NaN"),
        (root, "x = torch.sqrt(x * 0)", "SqrtBackward0 gives infinity in backward"),
        (own, "x = Square.apply(self.b(self.a(x)))", "SquareBackward gives infinity"),
    ],
)
def test_the_line_is_named(
    forward: Callable[..., Any], line: str, what: str, tmp_path: Path
) -> None:
    with pytest.raises(GemscError, match=what) as caught:
        first_step(forward, tmp_path)
    (_, named), (_, generated) = caught.value.notes_at
    assert named.startswith("test_anomaly.py:")
    assert line in named
    assert "rank" in generated


@pytest.mark.slow
def test_infinity_on_purpose_is_none(tmp_path: Path) -> None:
    first_step(masked, tmp_path)
