"""Which figures of `metrics` are means over samples, as evaluations take them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gemsc.compiler import compile
from gemsc.verify.figures import no_means

DRAWN = torch.Generator().manual_seed(0)
SCORES = torch.randn(8, 5, generator=DRAWN)
LABELS = torch.randint(5, (8,), generator=DRAWN)
MASKS = torch.randn(4, 1, 8, 8, generator=DRAWN)
TRUE_MASKS = (torch.rand(4, 1, 8, 8, generator=DRAWN) > 0.5).float()
COUNT = count()


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).float().mean()


def f1(output: Tensor, target: Tensor) -> Tensor:
    guess, target = output > 0, target > 0.5
    both = (guess & target).sum()
    return 2 * both / (guess.sum() + target.sum()).clamp(min=1)


def dice(output: Tensor, target: Tensor, dims: tuple[int, ...]) -> Tensor:
    guess = (output > 0).float()
    return 2 * (guess * target).sum(dims) / (guess + target).sum(dims)


@pytest.mark.parametrize(
    ("metric", "output", "target"),
    [
        (accuracy, SCORES, LABELS),
        (lambda o, t: round(float(accuracy(o, t)), 2), SCORES, LABELS),
        (F.cross_entropy, SCORES, LABELS),
        (F.binary_cross_entropy, MASKS.sigmoid(), TRUE_MASKS),
        (lambda o, t: (o - t).mean(), MASKS, TRUE_MASKS),
        (lambda o, t: o.mean(), MASKS, TRUE_MASKS),
        (lambda o, t: dice(o, t, (1, 2, 3)).mean(), MASKS, TRUE_MASKS),
        (lambda o, t: next(COUNT), SCORES, LABELS),  # who knows?
        (lambda o, t: torch.rand(()), SCORES, LABELS),
        (lambda o, t: t[7], SCORES, LABELS),  # fails for fewer
    ],
)
def test_a_mean_over_samples_is_one(
    metric: Callable[..., Any], output: Tensor, target: Tensor
) -> None:
    def metrics(output: Tensor, target: Tensor) -> dict[str, Any]:
        return {"figure": metric(output, target)}

    assert no_means(metrics, (output, target), len(output), ()) == ""


@pytest.mark.parametrize(
    ("metric", "output", "target"),
    [
        (lambda o, t: F.mse_loss(o, t).sqrt(), MASKS, TRUE_MASKS),
        (lambda o, t: F.mse_loss(o, t).sqrt(), MASKS[:1], TRUE_MASKS[:1]),
        (lambda o, t: (o - t).abs().max(), MASKS, TRUE_MASKS),
        (lambda o, t: dice(o, t, (0, 1, 2, 3)), MASKS, TRUE_MASKS),
        (f1, torch.full((8, 1), 0.01), torch.zeros(8, 1)),  # of a network at its start
        (lambda o, t: F.cross_entropy(o, t).exp(), SCORES, LABELS),
        (lambda o, t: (o.argmax(1) == t).sum(), SCORES, LABELS),
    ],
)
def test_what_is_none_is_told(
    metric: Callable[..., Any], output: Tensor, target: Tensor
) -> None:
    metrics = {"figure": metric}
    told = no_means(metrics, (output, target), len(output), ())
    assert told.startswith("figure: ")
    assert told.endswith(" as the mean of its halves")


def test_samples_count_where_the_model_has_them() -> None:
    def metrics(output: Any, target: Tensor) -> dict[str, Tensor]:
        apart = output["words"].mean((0, 2)) - target
        return {"mean": apart.square().mean(), "root": apart.square().mean().sqrt()}

    scored = {"words": torch.randn(3, 4, 5), "cache": None}, torch.randn(4)
    told = no_means(metrics, scored, 4, [1])
    assert told.startswith("root: ")
    assert "mean: " not in told
    assert no_means(metrics, (scored[0], [*"abcd"]), 4, [1]) == ""


def test_compile_says_which_figures_are_no_means(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def metrics(output: Tensor, target: Tensor) -> dict[str, Tensor]:
        apart = (output - target).abs()
        return {"mean": apart.mean(), "worst": apart.max()}

    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    given = {"loss": F.mse_loss, "example_target": x, "ranks": 1, "micro_batches": 2}
    compile(model, (x,), **given, metrics=metrics)
    told = capsys.readouterr().err
    assert told.startswith("note: metrics: worst: ")
    assert "mean over their batches, which is not that of all samples" in told
