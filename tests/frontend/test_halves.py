"""A loss that is no mean over samples is told: micro-batches change what it means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gemsc import compile
from gemsc.frontend.halves import loss_of_halves

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([0, 1, 2, 3, 0, 1])


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def with_a_term_of_the_batch(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target) + 0.5 * output.square().mean()


def dice(output: Tensor, target: Tensor) -> Tensor:
    chosen, hot = output.softmax(1), F.one_hot(target, 4)
    return 1 - 2 * (chosen * hot).sum() / (
        chosen.sum() + hot.sum() + chosen[:, 0].sum()
    )


def ignoring(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, ignore_index=2)


def weighted(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, torch.tensor([1.0, 2.0, 3.0, 4.0]))


def summed(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="sum")


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output @ output.T, torch.arange(len(output)))


def counted(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(output, target, reduction="sum"), len(output)


def drawing(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output + torch.randn_like(output), target)


def of_six(output: Tensor, target: Tensor) -> Tensor:
    return output.view(6, 4).logsumexp((0, 1))


@pytest.mark.parametrize("loss", [cross_entropy, with_a_term_of_the_batch])
@pytest.mark.parametrize("size", [1, 2, 5, 6])
def test_means_are_not_told(loss: Callable[..., Any], size: int) -> None:
    assert loss_of_halves(loss, X[:size], CLASSES[:size], size) == ""


@pytest.mark.parametrize("loss", [dice, ignoring, weighted, summed, contrastive])
def test_other_losses_are(loss: Callable[..., Any]) -> None:
    halves = (X[:3], CLASSES[:3]), (X[3:], CLASSES[3:])
    mean = sum(float(loss(*half)) for half in halves) / 2
    assert loss_of_halves(loss, X, CLASSES, 6) == (
        f"{float(loss(X, CLASSES)):.4g} of example_inputs, "
        f"{mean:.4g} as the mean of its halves"
    )


def hardest(output: Tensor, target: Tensor) -> Tensor:
    """The mean over the hardest third of all samples."""
    losses = F.cross_entropy(output, target, reduction="none")
    return losses.topk(max(1, len(losses) // 3)).values.mean()


def siglip(output: Tensor, target: Tensor) -> Tensor:
    near = F.normalize(output[:, :2]) @ F.normalize(output[:, 2:]).T
    same = 2 * torch.eye(len(output), dtype=output.dtype) - 1
    return -F.logsigmoid(same * (10 * near - 10)).sum() / len(output)


def in_its_own_dtype(output: Tensor, target: Tensor) -> Tensor:
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
    return F.cross_entropy(output, target, weight)


def of_float32(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.float(), target)


def test_what_is_small_at_the_start_is_told_by_its_gradients() -> None:
    nearly_equal = 1e-5 * torch.arange(4.0).repeat(6, 1)
    told = loss_of_halves(hardest, nearly_equal, CLASSES.sort().values, 6)
    assert "1.386 of example_inputs as of their halves, but with gradients" in told
    apart = torch.cat([X[:, :2], -X[:, :2]], 1)
    assert loss_of_halves(siglip, apart, CLASSES, 6)


def test_a_loss_that_stays_in_float32_is_asked() -> None:
    assert loss_of_halves(in_its_own_dtype, X, CLASSES, 6)
    many = torch.randn(1024, 4, generator=torch.Generator().manual_seed(1)) * 20
    classes = CLASSES.repeat(200)[:1024]
    assert loss_of_halves(of_float32, many, classes, 1024) == ""


def writing(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.mul_(2), target, reduction="sum")


def test_a_loss_that_writes_to_the_output_is_asked() -> None:
    before = X.clone()
    assert loss_of_halves(writing, X, CLASSES, 6)
    assert torch.equal(X, before)


@pytest.mark.parametrize("loss", [ignoring, weighted])
def test_a_model_that_begins_with_zeros_hides_nothing(loss: Any) -> None:
    def of_two(output: Any, target: Tensor) -> Tensor:
        found: Tensor = loss(output[0] - output[1], target)
        return found

    zeros = torch.zeros_like(X)
    assert loss_of_halves(loss, zeros, CLASSES, 6)
    assert loss_of_halves(of_two, (X, X.clone()), CLASSES, 6)
    assert loss_of_halves(cross_entropy, zeros, CLASSES, 6) == ""


@pytest.mark.parametrize("loss", [dice, summed, contrastive, hardest])
def test_a_single_sample_is_compared_with_a_smaller_one(loss: Any) -> None:
    assert loss_of_halves(loss, X[:1], CLASSES[:1], 1)


def of_a_graph(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output[0], target[0])


def test_a_loss_of_the_nodes_of_the_first_graph_is_that_of_the_only_one() -> None:
    assert loss_of_halves(of_a_graph, X[None], CLASSES[None], 1) == ""
    assert loss_of_halves(of_a_graph, X.view(2, 3, 4), CLASSES.view(2, 3), 2)


@pytest.mark.parametrize("loss", [counted, drawing, of_six])
def test_what_cannot_be_asked(loss: Callable[..., Any]) -> None:
    before = torch.get_rng_state()
    assert loss_of_halves(loss, X, CLASSES, 6) == ""
    if loss is not drawing:
        assert torch.equal(before, torch.get_rng_state())


def test_what_is_no_row_of_each_sample() -> None:
    def total(output: Any, target: Tensor) -> Any:
        return output["scores"].sum() + output["extra"]

    scalar = {"scores": X, "extra": torch.tensor(2.0)}
    assert loss_of_halves(total, scalar, CLASSES, 6)
    assert loss_of_halves(total, {"scores": X.T, "extra": X[0, 0]}, CLASSES, 6) == ""
    assert loss_of_halves(total, {**scalar, "scores": X[0, 0]}, CLASSES, 6) == ""


class Centers(nn.Module):
    """A loss with a buffer of its own, and with what no copy can be made of."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.last: Any = None

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.count += 1
        return F.cross_entropy(output, target, reduction="sum")


def test_a_loss_of_its_own_state_is_left_as_it_is() -> None:
    loss = Centers()
    assert loss_of_halves(loss, X, CLASSES, 6)
    assert loss.count == 0
    loss.last = (nn.Parameter(X) * 2).sum()
    assert loss_of_halves(loss, X, CLASSES, 6) == ""


class Growing(Centers):
    """A mean whose weight grows from call to call."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.count += 1
        return self.count * F.cross_entropy(output, target)


def test_a_loss_that_counts_its_calls_is_asked_as_it_is() -> None:
    assert loss_of_halves(Growing(), X, CLASSES, 6) == ""


def notes(loss: Any, size: int = 6, **options: Any) -> list[str]:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    given = {"loss": loss, "example_target": CLASSES[:size], "ranks": 2} | options
    found = compile(model, (X[:size],), **given).plan.notes
    return [note for note in found if "not a mean over samples" in note]


def test_the_plan_says_what_a_step_makes_of_it() -> None:
    (note,) = notes(summed, micro_batches=3)
    assert "losses of its 3 micro-batches" in note
    assert "of its 18 samples" in note
    assert notes(cross_entropy, micro_batches=3) == []
    assert notes(counted, micro_batches=3) == []  # as it says
    (note,) = notes(summed, micro_batches=1, data=2, ranks=4)
    assert "losses of its 2 micro-batches" in note


def test_one_micro_batch_is_the_batch() -> None:
    assert notes(summed, micro_batches=1) == []
