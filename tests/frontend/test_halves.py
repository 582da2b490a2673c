"""A loss that is no mean over samples is told: micro-batches change what it means."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gemsc import compile
from gemsc.frontend.halves import loss_of_halves, of_two_samples

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


def beside_its_accuracy(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    hits = output.argmax(1) == target
    return F.cross_entropy(output, target), hits.float().mean()


def drawing(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output + torch.randn_like(output), target)


def of_six(output: Tensor, target: Tensor) -> Tensor:
    return output.view(6, 4).logsumexp((0, 1))


@pytest.mark.parametrize("loss", [cross_entropy, with_a_term_of_the_batch])
@pytest.mark.parametrize("size", [1, 2, 5, 6])
def test_means_are_not_told(loss: Callable[..., Any], size: int) -> None:
    assert loss_of_halves(loss, X[:size], CLASSES[:size], size) == ""


def test_terms_that_cancel_leave_no_more_than_their_rounding() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.LayerNorm(32))
    told = [of_two(model, X[n:], loss=lambda output: output.mean()) for n in range(4)]
    assert told == [""] * 4  # means of 1e-8, or of minus that

    def rounded(output: Tensor, target: Tensor) -> Tensor:
        return output.float().mean()

    output = torch.randn(2, 7)
    output -= output.mean(1, keepdim=True)
    assert loss_of_halves(rounded, output, CLASSES[:2], 2) == ""


@pytest.mark.parametrize("loss", [dice, ignoring, weighted, summed, contrastive])
def test_other_losses_are(loss: Callable[..., Any]) -> None:
    halves = (X[:3], CLASSES[:3]), (X[3:], CLASSES[3:])
    mean = sum(float(loss(*half)) for half in halves) / 2
    assert loss_of_halves(loss, X, CLASSES, 6) == (
        "the loss is not a mean over samples: "
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


def test_a_mask_beside_the_output_trains_nothing() -> None:
    mask = torch.ones(6, 4)
    mask[:, 1] = 0
    mask[::2, [0, 1]] = mask[::2, [1, 0]]  # as many of each sample

    def loss(output: tuple[Tensor, Tensor]) -> Tensor:
        return (output[0].square() * output[1]).sum() / output[1].sum()

    assert loss_of_halves(loss, (X.clone().requires_grad_(), mask), None, 6) == ""
    both = X.clone().requires_grad_(), mask.requires_grad_()
    assert "gradients that differ" in loss_of_halves(loss, both, None, 6)


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
        scalar: Tensor = loss(output[0] - output[1], target)
        return scalar

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


@pytest.mark.parametrize("loss", [ignoring, weighted])
@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("size", [1, 6])
def test_the_first_samples_may_have_one_label(
    loss: Callable[..., Any], label: int, size: int
) -> None:
    of_two = partial(loss) if loss is weighted else partial(one_of_two, loss)
    same = torch.full((size, 2), label)
    told = loss_of_halves(of_two, X[:size, :, None].expand(-1, 4, 2), same, size)
    assert " of example_inputs with other targets, " in told
    assert not loss_of_halves(cross_entropy, X[:size], same[:, 0], size)


def one_of_two(loss: Callable[..., Any], output: Tensor, target: Tensor) -> Any:
    """The loss of rows whose second half does not count, if the label is not 1."""
    return loss(output, torch.where(target == 1, target, target.new_tensor([0, 2])))


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
    told = compile(model, (X[:size],), **given).plan.notes
    return [note for note in told if "not a mean over samples" in note]


def test_the_plan_says_what_a_step_makes_of_it() -> None:
    (note,) = notes(summed, micro_batches=3)
    assert "losses of its 3 micro-batches" in note
    assert "of its 18 samples" in note
    assert notes(cross_entropy, micro_batches=3) == []
    assert notes(counted, micro_batches=3) == []  # as it says
    (note,) = notes(summed, micro_batches=1, data=2, ranks=4)
    assert "losses of its 2 micro-batches" in note


@pytest.mark.parametrize("size", [6, 1])
def test_a_pair_that_is_no_sum_and_count_is_told(size: int) -> None:
    model, given = nn.Linear(4, 4), {"ranks": 1, "micro_batches": 1}
    told = []
    for loss in (beside_its_accuracy, counted):
        given |= {"loss": loss, "example_target": CLASSES[:size]}
        told += compile(model, (X[:size],), **given).plan.notes
    (note,) = (note for note in told if "pair" in note)
    assert note.startswith("the loss returns a pair that is not a sum and a count: ")
    assert "if that is something else, such as an accuracy, and a count as" in note


def test_one_micro_batch_is_the_batch() -> None:
    assert notes(summed, micro_batches=1) == []


class Pairs(nn.Module):
    """How similar each sample's first half is to each one's second half."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        left: Tensor = self.left(x)
        return left @ self.right(x).T


class BesideOthers(nn.Module):
    """Adds the deviation over the batch, as discriminators do; or only in training."""

    def __init__(self, in_training: bool = False, draws: bool = False) -> None:
        super().__init__()
        self.layer, self.in_training, self.draws = nn.Linear(4, 4), in_training, draws

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.draws:
            x = F.dropout(x, 0.5, self.training)
        if self.training or not self.in_training:
            x = x + 0.01 * x.std(0, correction=0).mean()
        return x


class OwnLoss(nn.Module):
    """Computes its loss itself, a mean over the labels that count."""

    def __init__(self, ignored: int) -> None:
        super().__init__()
        self.layer, self.ignored = nn.Linear(4, 4), ignored

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        scores = self.layer(x).flatten(0, 1)
        return F.cross_entropy(scores, labels.flatten(), ignore_index=self.ignored)


class Apart(nn.Module):
    """Returns samples in dimension 1, a table, and counts its calls."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        x = self.drop(self.layer(self.norm(x))) * self.calls
        return x.T, self.calls.expand(3)


def of_two(model: nn.Module, *inputs: Tensor, loss: Any = None) -> str:
    with torch.no_grad():
        return of_two_samples(lambda: copy.deepcopy(model).train(), inputs, loss, None)


def test_a_model_that_mixes_samples_is_told() -> None:
    shapes = "forward mixes samples: it returns [2, 2] for two, [1, 1] for one"
    assert of_two(Pairs(), X) == shapes
    values = "forward mixes samples: what it returns for one differs by "
    assert of_two(BesideOthers(), X).startswith(values)
    told = of_two(BesideOthers(in_training=True), X)
    assert told.startswith(values.replace("samples", "samples in training"))
    assert of_two(BesideOthers(draws=True), X).startswith(values)  # in evaluation
    assert of_two(BesideOthers(in_training=True, draws=True), X) == ""
    not_alone = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False))
    assert of_two(not_alone, X).startswith(values)  # of two and two


def test_a_model_that_does_not_is_not() -> None:
    assert of_two(Apart(), X) == ""
    assert of_two(Pairs(), X[:1]) == ""
    first = Model(lambda self, x: self.layer(x[0])[None])  # of a graph
    assert of_two(first, X, loss=lambda output: output[0].mean()) == ""


class Model(nn.Module):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self._forward = nn.Linear(4, 4), forward

    def forward(self, x: Tensor) -> Any:
        return self._forward(self, x)


def balance(self: Model, x: Tensor) -> Tensor:
    """A loss that is small where a batch goes to all experts, as of Switch."""
    shares = self.layer(x).softmax(1)
    chosen = F.one_hot(shares.argmax(1), 4).float()
    return 4 * (chosen.mean(0) * shares.mean(0)).sum()


def test_a_balance_of_experts_is_told() -> None:
    told = of_two(Model(balance), X * 3, loss=lambda output: output)
    assert told.startswith("the loss is not a mean over samples: ")


def test_a_loss_that_the_model_computes_is_asked() -> None:
    labels = torch.tensor([[0, 0, 1], [0, 1, 2]])
    x = torch.randn(2, 3, 4)
    told = of_two(OwnLoss(0), x, labels, loss=lambda output: output)
    assert told.startswith("the loss is not a mean over samples: ")
    assert told.endswith(" as the mean of each")
    assert of_two(OwnLoss(-100), x, labels, loss=lambda output: output) == ""


def test_compile_says_that_a_step_has_less_to_compare() -> None:
    def compiled(micro_batches: int, data: int = 1) -> str:
        loss = lambda output, target: contrastive(output, target)  # noqa: E731
        program = compile(
            Pairs(), X, ranks=data, loss=loss, example_target=CLASSES,
            micro_batches=micro_batches, data=data,
        )  # fmt: skip
        return " ".join(program.plan.notes)

    told = (
        "forward mixes samples: it returns [2, 2] for two, [1, 1] for one. A step "
        "takes the mean of the losses of its 2 micro-batches, which is not the loss of "
        "its 12 samples together. If it should be that, let example_inputs() have all "
        "samples of a step, with --micro-batches 1"
    )
    assert told in compiled(2)
    assert told + " --data 1" in compiled(1, data=2)
    assert "mixes" not in compiled(1)
