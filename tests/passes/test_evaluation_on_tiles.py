"""Networks that are another graph in evaluation, on tiles."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from program_support import on_ranks, written
from torch import Tensor, nn

from gemsc.runtime.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("in_double")


class TwoGraphs(nn.Module):
    """A second output in training, a wider window of the input in evaluation."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 2, 3, padding=1)
        self.second = nn.Conv2d(2, 1, 3, padding=1)
        self.window = window

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.second(self.first(x).relu())
        if self.training:
            return y, y.mean()
        return (y + F.avg_pool2d(x, self.window, 1, self.window // 2),)


def loss(outputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
    return sum((output.square().mean() for output in outputs), target.sum() * 0)


@pytest.mark.slow(1)
@pytest.mark.parametrize("window", [1, 3, 9])
def test_training_and_evaluation_may_want_other_halos_of_the_input(
    window: int, tmp_path: Path
) -> None:
    """Training has 2 rows beyond its own: both convolutions share one exchange."""
    model, x = TwoGraphs(window), torch.randn(2, 1, 12, 12)
    target = torch.zeros(2)
    options = {"ranks": 4, "tiles": "2x2", "micro_batches": 1, "fuse_halos": 2}
    written(tmp_path, model, (x,), loss, target, **options)
    (expected,) = model.eval()(x)

    def work(trainer: Trainer) -> Tensor | None:
        return trainer.evaluate((x,), target).output

    outputs = on_ranks(tmp_path, 4, work, dtype=torch.float64)
    ((output,),) = (output for output in outputs if output is not None)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-12)


class TwoHeads(nn.Module):
    """Two outputs of one list of layers: their nodes have one base name."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.heads = nn.ModuleList(nn.Conv2d(4, 2, 1) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.first(x).relu()
        return tuple(head(y) for head in self.heads)


@pytest.mark.slow(1)
@pytest.mark.parametrize("split", [{"tiles": "2x1"}, {"shards": "2"}], ids=str)
def test_outputs_of_one_name_are_gathered_apart(
    split: dict[str, str], tmp_path: Path
) -> None:
    model, x = TwoHeads(), torch.randn(2, 1, 12, 12)
    target = torch.zeros(2)
    written(tmp_path, model, (x,), loss, target, ranks=2, micro_batches=1, **split)
    expected = model.eval()(x)

    def work(trainer: Trainer) -> tuple[Tensor, ...] | None:
        return trainer.evaluate((x,), target).output

    (gathered, _) = on_ranks(tmp_path, 2, work, dtype=torch.float64)
    for output, of_model in zip(gathered or (), expected, strict=True):
        torch.testing.assert_close(output, of_model, rtol=1e-9, atol=1e-12)


class Drops(nn.Module):
    """A dropout of which the model is told to leave it, and one that drops."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.rests, self.drops = nn.Dropout(0.5).eval(), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = 100 * (self.rests(self.first(x)) - self.first(x))
        return y, self.drops(torch.ones_like(y))


def test_dropout_rests_in_evaluation_and_in_a_frozen_layer(tmp_path: Path) -> None:
    model, x, target = Drops(), torch.randn(2, 1, 12, 12), torch.zeros(2)
    options = {"ranks": 2, "tiles": "2x1", "micro_batches": 1}
    written(tmp_path, model, (x,), loss, target, **options)

    def work(trainer: Trainer) -> tuple[float, tuple[Tensor, ...] | None]:
        trained = trainer.step((x,), target)
        return trained, trainer.evaluate((x,), target).output

    ((trained, outputs), _) = on_ranks(tmp_path, 2, work, dtype=torch.float64)
    assert outputs is not None
    still, whole = outputs
    assert not still.any()
    assert (whole == 1).all()
    assert abs(trained - 2) < 0.5  # half of them are 0, and the others 2
