"""What a step does otherwise than one process with the whole batch is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gemsc import compile

X, CLASSES = torch.randn(2, 4), torch.tensor([0, 1])


class Counting(nn.Module):
    """Counts its calls, and turns the vectors of a spectral norm."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.second = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        scores: Tensor = self.second(torch.tanh(self.first(x)))
        return scores * (1 + self.calls)


class Normalizing(nn.Module):
    """Has only what is known to move, or stays once it was changed."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 4, max_norm=1.0)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.norm.weight.clamp_(0, 1)
        scores: Tensor = self.norm(x @ self.words(torch.arange(4)))
        return scores


class Perceptual(nn.Module):
    """A loss with a network of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 8)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.net(output), self.net(F.one_hot(target, 4).float()))


def notes(model: nn.Module, word: str, loss: Any = None, **options: Any) -> list[str]:
    loss = loss or nn.CrossEntropyLoss()
    given = {"loss": loss, "example_target": CLASSES, "ranks": 1} | options
    told = compile(model, (X,), **given).plan.notes
    return [note for note in told if word in note]


@pytest.mark.slow(1)
@pytest.mark.parametrize(("data", "count"), [(1, 2), (2, 4)])
def test_what_moves_with_the_micro_batches_is_told(data: int, count: int) -> None:
    how = {"micro_batches": 2, "data": data, "ranks": data}
    (note,) = notes(Counting(), "forward changes", **how)
    assert "._u' and 2 more once for each micro-batch" in note
    assert f": {count} times in a step" in note
    assert f"takes its {2 * count} samples" in note


def test_of_one_micro_batch_and_of_what_is_known_nothing_is_said() -> None:
    assert notes(Counting(), "forward changes", micro_batches=1) == []
    assert notes(Normalizing(), "forward changes", micro_batches=2) == []


def test_statistics_that_replicas_do_not_join_are_told() -> None:
    def net(kind: type[nn.Module]) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), kind(4))

    word, two = "SyncBatchNorm", {"data": 2, "ranks": 2, "micro_batches": 2}
    (note,) = notes(net(nn.SyncBatchNorm), word, **two)
    assert "each micro-batch by itself, as BatchNorm does: there are 4 in" in note
    assert notes(net(nn.SyncBatchNorm), word, micro_batches=1) == []
    assert notes(net(nn.BatchNorm1d), word, **two) == []


def test_a_loss_that_is_trained_is_told() -> None:
    loss = Perceptual()
    (note,) = notes(nn.Linear(4, 4), "parameters of its own", loss)
    assert "'_loss.net.weight' and 1 more: optimizer() gets them" in note
    loss.requires_grad_(False)
    assert notes(nn.Linear(4, 4), "parameters of its own", loss) == []


def test_a_model_of_which_nothing_is_trained_is_told() -> None:
    layer = nn.Linear(4, 4).requires_grad_(False)
    (note,) = notes(layer, "nothing is trained")
    assert note.endswith("all parameters have requires_grad=False")
    assert notes(nn.Linear(4, 4), "nothing is trained") == []
