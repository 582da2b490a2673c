"""A loss with a count: the mean over all terms of a step, as one process has it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from program_support import WIDTH, Net, on_ranks, written
from torch import Tensor, nn
from torch.utils.data import Dataset
from training_support import run, simple, user_of

from gemsc.base.nests import Mean, as_loss
from gemsc.errors import GemscError
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.worker.finite import NotFiniteError
from gemsc.runtime.worker.steps import Steps
from gemsc.runtime.worker.updates import Updates
from gemsc.verify.field.check import check_all_inputs

IGNORED = -100
CLASSES = WIDTH
X = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0))
TARGET = torch.tensor([1, IGNORED])


def sgd(params: Any) -> torch.optim.Optimizer:
    """Return one to which the scale of gradients matters, which Adam divides out."""
    return torch.optim.SGD(params, lr=0.5)


def counted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(output, target, ignore_index=IGNORED, reduction="sum")
    return total, (target != IGNORED).sum()


def weighed(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same mean; what is counted are weights, all together less than 1."""
    total, count = counted(output, target)
    return total * 1e-3, count * 1e-3


def mean_of_all(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, ignore_index=IGNORED)


def batches(size: int, count: int, *shape: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches of which each sample ignores another share of its targets."""
    generator = torch.Generator().manual_seed(1)
    pairs = []
    for _ in range(count):
        x = torch.randn(size, WIDTH, *shape, generator=generator)
        target = torch.randint(0, CLASSES, (size, *shape), generator=generator)
        share = torch.arange(size).view(size, *(1 for _ in shape)) / size
        ignored = torch.rand(target.shape, generator=generator) < share
        ignored[0] = False
        pairs.append((x, torch.where(ignored, IGNORED, target)))
    return pairs


def one_process(
    model: nn.Module, data: list[tuple[Tensor, Tensor]], accumulate: int = 1
) -> tuple[list[float], dict[str, Tensor]]:
    """Train on whole batches: those of an update are one batch."""
    optimizer = sgd(model.parameters())
    losses = []
    for first in range(0, len(data), accumulate):
        part = data[first : first + accumulate]
        x, target = (torch.cat(tensors) for tensors in zip(*part, strict=True))
        loss = mean_of_all(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        with torch.no_grad():
            losses += [float(mean_of_all(model(x), target)) for x, target in part]
        optimizer.step()
    return losses, model.state_dict()


def on_all(
    folder: Path,
    data: list[tuple[Tensor, Tensor]],
    ranks: int,
    **options: Any,
) -> list[tuple[list[float], dict[str, Tensor]]]:
    def work(trainer: Trainer) -> tuple[list[float], dict[str, Tensor]]:
        losses = [trainer.step((x,), target) for x, target in data]
        return losses, trainer.state_dict()

    return on_ranks(folder, ranks, work, optimizer=sgd, **options)


def is_alike(
    actual: list[tuple[list[float], dict[str, Tensor]]],
    expected: tuple[list[float], dict[str, Tensor]],
) -> None:
    losses, state = expected
    seen: set[str] = set()
    for of_rank, tensors in actual:
        torch.testing.assert_close(of_rank, losses)
        for name, tensor in tensors.items():
            if tensor.shape == state[name].shape:
                seen.add(name)
                torch.testing.assert_close(tensor, state[name])
    assert seen


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"ranks": 2}, id="1f1b"),
        pytest.param({"ranks": 2, "data": 2}, id="data"),
        pytest.param({"ranks": 2, "data": 2, "shard": "optimizer"}, id="zero"),
        pytest.param({"ranks": 2, "schedule": "mast"}, id="mast"),
        pytest.param({"ranks": 2, "schedule": "zb-h1"}, id="zb-h1"),
    ],
)
def test_the_mean_is_over_all_terms(tmp_path: Path, options: dict[str, Any]) -> None:
    net = Net(simple), (X,), weighed, TARGET
    plan = written(tmp_path, *net, micro_batches=4, **options).plan
    data = batches(plan.batch_size, 3)
    is_alike(on_all(tmp_path, data, plan.ranks), one_process(Net(simple), data))


@pytest.mark.slow
def test_the_steps_of_an_update_are_one_batch(tmp_path: Path) -> None:
    written(tmp_path, Net(simple), (X,), counted, TARGET, ranks=2, micro_batches=2)
    data = batches(4, 4)
    data[1] = (
        data[1][0],
        torch.full_like(data[1][1], IGNORED).index_fill(0, torch.tensor([3]), 2),
    )
    actual = on_all(tmp_path, data, 2, accumulate=2)
    is_alike(actual, one_process(Net(simple), data, accumulate=2))


@pytest.mark.slow(1)
@pytest.mark.parametrize("spoilt", [False, True])
def test_an_update_that_has_begun_goes_on_after_a_resume(
    tmp_path: Path, spoilt: bool
) -> None:
    """Its terms so far count, and that it is to be left out."""
    written(tmp_path, Net(simple), (X,), counted, TARGET, ranks=2, micro_batches=2)
    *before, first, second = batches(4, 4)
    if spoilt:
        first = first[0], torch.full_like(first[1], IGNORED)

    def state(trainer: Trainer) -> dict[str, Tensor]:
        return {name: t.clone() for name, t in trainer.state_dict().items()}

    def whole(trainer: Trainer) -> Any:
        for x, target in (*before, first):
            trainer.step((x,), target)
        trainer.save(tmp_path / "saved")
        middle = state(trainer)
        trainer.step((second[0],), second[1])
        return middle, state(trainer)

    def rest(trainer: Trainer) -> Any:
        trainer.resume(tmp_path / "saved")
        middle = state(trainer)
        trainer.step((second[0],), second[1])
        return middle, state(trainer)

    given = {"optimizer": sgd, "accumulate": 2, "on_nonfinite": "skip"}
    expected = on_ranks(tmp_path, 2, whole, **given)
    for mine, theirs in zip(
        on_ranks(tmp_path, 2, rest, **given), expected, strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    changes = [not torch.equal(a[n], b[n]) for a, b in expected for n in a]
    assert any(changes) != spoilt


class Segments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.a = nn.Conv2d(WIDTH, 8, 3, padding=1)
            self.b = nn.Conv2d(8, CLASSES, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    "options", [{"tiles": "2x1"}, {"shards": 2}, {"tiles": "2x1", "shards": 2}], ids=str
)
def test_each_rank_of_a_split_stage_knows_the_count(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    (x, target), *_ = batches(2, 1, 6, 6)
    ranks = 4 if len(options) > 1 else 2
    given = {"ranks": ranks, "micro_batches": 2, **options}
    written(tmp_path, Segments(), (x,), counted, target, **given)
    data = batches(4, 3, 6, 6)
    is_alike(on_all(tmp_path, data, ranks), one_process(Segments(), data))


class Few(Dataset):
    """Samples of which some have no term at all; 10 of them fill no batch."""

    def __init__(self) -> None:
        ((self.x, self.target),) = batches(10, 1)
        self.target[7] = IGNORED

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.target[index]


@pytest.mark.slow(1)
@pytest.mark.parametrize("loss", [counted, weighed])
def test_held_out_losses_are_means_over_all_terms(tmp_path: Path, loss: Any) -> None:
    written(tmp_path, Net(simple), (X,), loss, TARGET, ranks=2, micro_batches=2)
    losses: list[float] = []

    def on_epoch(trainer: Trainer, epoch: int, figures: dict[str, float]) -> None:
        losses.append(figures["loss"])

    user = user_of(
        loss=loss,
        dataset=Few,
        eval_dataset=Few,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.0),
        on_epoch=on_epoch,
    )
    run(tmp_path, user, "--steps", "1")
    few = Few()
    with torch.no_grad():
        expected = mean_of_all(Net(simple)(few.x), few.target)
    assert len(losses) == 2  # on each rank
    assert losses == pytest.approx([float(expected)] * 2)


@pytest.mark.slow(1)
@pytest.mark.parametrize("mutant", [None, "no division", "a mean of means"])
def test_it_is_proved_for_all_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: str | None
) -> None:
    net = Net(simple), (X,), counted, TARGET
    plan = written(tmp_path, *net, ranks=2, micro_batches=2).plan
    ((x, target),) = batches(plan.batch_size, 1)
    target[:3] = torch.tensor([1, IGNORED, 2])
    apply, own_mean = Updates.apply, Steps.own_mean
    if mutant == "no division":
        monkeypatch.setattr(
            Updates, "apply", lambda self, _, seed: apply(self, None, seed)
        )
    elif mutant == "a mean of means":
        monkeypatch.setattr(
            Steps, "own_mean", lambda self: Mean(*own_mean(self).sums[:1], 2, 1, 2)
        )
    proof = check_all_inputs(tmp_path, net[0], counted, (x,), target, draws=1)
    assert proof.verdict == ("not equal" if mutant else "proved"), proof


def test_a_step_without_terms_is_not_finite(tmp_path: Path) -> None:
    written(tmp_path, Net(simple), (X,), counted, TARGET, ranks=2, micro_batches=2)
    nothing = torch.full((4,), IGNORED)
    with pytest.raises(GemscError, match="the loss is not finite at step 1"):
        on_all(tmp_path, [(torch.randn(4, WIDTH), nothing)], 2)


def test_after_a_loss_that_is_not_finite_terms_are_counted_anew(tmp_path: Path) -> None:
    """A loop of the user's own catches what the step raises, and goes on."""
    written(tmp_path, Net(simple), (X,), counted, TARGET, ranks=2, micro_batches=2)
    ((x, target),) = batches(4, 1)

    def work(trainer: Trainer, *inputs: Tensor) -> dict[str, Tensor]:
        for tensor in inputs:
            with suppress(NotFiniteError):
                trainer.step((tensor,), target)
        return {name: tensor.clone() for name, tensor in trainer.state_dict().items()}

    states = on_ranks(tmp_path, 2, lambda trainer: work(trainer, x / 0, x))
    wanted = on_ranks(tmp_path, 2, lambda trainer: work(trainer, x))
    torch.testing.assert_close(states, wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.zeros(2), r"shape \[2\]; it must be a scalar"),
        ((torch.zeros(2), 1), r"shape \[2\]; it must be a scalar"),
        ((torch.zeros(()), torch.zeros(2)), r"count is a tensor of shape \[2\]"),
        ((torch.zeros(()), "three"), "count is of type str"),
        ((torch.zeros(()), torch.ones((), requires_grad=True)), "depends on param"),
        (3.0, "of type float"),
    ],
)
def test_what_is_no_loss(returned: Any, message: str) -> None:
    with pytest.raises(GemscError, match=message):
        as_loss(returned)


def test_a_count_has_the_digits_that_it_needs() -> None:
    total = torch.tensor(3.0, dtype=torch.bfloat16)
    assert as_loss((total, 1001)).tolist() == [3.0, 1001.0]
