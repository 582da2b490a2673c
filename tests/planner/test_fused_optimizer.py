"""The note on an optimizer that would be faster with `fused=True`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gemsc
from gemsc.plan import FUSED


def notes(optimizer: Any, width: int = 512, **options: Any) -> list[str]:
    def make(pairs: Any) -> Any:
        return optimizer(pairs)

    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    program = gemsc.compile(
        model,
        (torch.randn(2, width),),
        loss=nn.MSELoss(),
        example_target=torch.randn(2, width),
        optimizer=make,
        check=False,
        **options,
    )
    return [note for note in program.plan.notes if FUSED in note]


@pytest.mark.slow(1)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_is_told_what_fused_would_save(kind: Any) -> None:
    (note,) = notes(kind, ranks=1)
    assert note.startswith(f"{kind.__name__} is about six times as fast on a CPU")
    # two states of 4 bytes of each of 1.05 million parameters
    assert "save about 5.8 ms of each step" in note
    (half,) = notes(kind, ranks=2)
    assert "save about 2.9 ms of each step" in half


@pytest.mark.slow(3)
@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.SGD,
        lambda pairs: torch.optim.Adam(pairs, fused=True),
        lambda pairs: torch.optim.Adam(pairs, fused=False),
        lambda pairs: torch.optim.Adam(pairs, foreach=True),
        lambda pairs: torch.optim.Adam(pairs, differentiable=True),
        lambda pairs: torch.optim.Adam(pairs, lr=torch.tensor(0.1)),
    ],
    ids=["sgd", "fused", "not wanted", "foreach", "differentiable", "tensor"],
)
def test_others_are_left_alone(optimizer: Any) -> None:
    assert notes(optimizer) == []


@pytest.mark.slow
def test_a_gpu_needs_no_such_note() -> None:
    assert notes(torch.optim.Adam, hardware="a100") == []


@pytest.mark.slow
def test_what_saves_little_is_not_worth_a_line() -> None:
    assert notes(torch.optim.Adam, width=8) == []
