"""Losses and gradients that are not finite: found before the update, and named."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from program_support import Net, X, batch_of, on_ranks, written
from torch import Tensor, nn

from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.worker.finite import NotFiniteError, all_finite, not_finite

NAN = float("nan")
COUNT = 4  # micro-batches of two samples


class Spoils(torch.autograd.Function):
    """Passes on what it gets; its gradient is not finite where the value is above 9."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(max=9.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * torch.where(x > 9, math.inf, 1.0)


def forward(self: Any, x: Tensor) -> Tensor:
    hidden = torch.tanh(self.b(self.norm(self.a(x))))
    result: Tensor = self.d(torch.tanh(self.c(hidden)))
    return result


def program(folder: Path, ranks: int = 2, **options: Any) -> None:
    model = Net(forward, norm=nn.BatchNorm1d(4))
    written(folder, model, ranks=ranks, micro_batches=COUNT, **options)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


def batch(bad: int | None = None, value: float = NAN) -> tuple[Tensor, Tensor]:
    x, target = batch_of((X, X), COUNT)
    if bad is not None:
        x[2 * bad + 1, 2] = value
    return x, target


def states(trainer: Trainer) -> dict[str, Tensor]:
    optimizer = trainer.worker.updates.optimizer
    assert optimizer is not None
    tensors = {n: tensor.clone() for n, tensor in trainer.stages.tensors().items()}
    for number, state in optimizer.state_dict()["state"].items():
        tensors |= {f"{number} {key}": value.clone() for key, value in state.items()}
    return tensors


def is_same(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    return before.keys() == after.keys() and all(
        torch.equal(before[name], after[name]) for name in before
    )


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"schedule": "master"},
        {"shard": "optimizer", "schedule": "master"},
        {"ranks": 4, "data": 2},
    ],
)
def test_the_first_bad_loss_stops_before_the_update(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    program(tmp_path, **options)

    def work(trainer: Trainer) -> tuple[NotFiniteError, bool]:
        trainer.step(*batch())
        before = states(trainer)
        with pytest.raises(NotFiniteError) as caught:
            trainer.step(*batch(bad=3))
        after = {n: t for n, t in states(trainer).items() if "norm." not in n}
        return caught.value, is_same({n: before[n] for n in after}, after)

    for error, kept in on_ranks(
        tmp_path, options.get("ranks", 2), work, optimizer=adam
    ):
        # batch normalization keeps micro-batches apart
        # each replica was given the same part
        where = "micro-batches 3, 7" if "data" in options else "micro-batch 3"
        assert error.message == f"the loss is nan at step 2, in {where}"
        assert error.help is not None
        assert "if all labels of a micro-batch are ignored" in error.help
        assert kept


def test_a_step_that_fails_takes_those_before_it_of_its_update_along(
    tmp_path: Path,
) -> None:
    """Their gradients are gone: the next update has as many steps as any."""
    program(tmp_path)

    def work(trainer: Trainer) -> list[int]:
        trainer.step(*batch())
        with pytest.raises(NotFiniteError):
            trainer.step(*batch(bad=3))
        counts = []
        for _ in range(4):
            trainer.step(*batch())
            counts.append(trainer.worker.variants.num_updates)
        return counts

    counts = on_ranks(tmp_path, 2, work, optimizer=adam, accumulate=2)
    assert counts == [[0, 1, 1, 2]] * 2


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_bad_gradient_of_one_rank_stops_all(
    tmp_path: Path, clip_norm: float | None
) -> None:
    model = Net(lambda net, x: net.d(torch.tanh(net.c(net.b(spoils(net.a(x)))))))
    written(tmp_path, model, micro_batches=COUNT)

    def work(trainer: Trainer) -> tuple[str, bool]:
        trainer.step(*batch())
        before = states(trainer)
        with pytest.raises(NotFiniteError) as caught:
            trainer.step(*batch(1, 1e4))
        kept = is_same(before, states(trainer))
        forgotten = all(p.grad is None for p in trainer.stages.parameters.values())
        return caught.value.message, kept and forgotten

    outcomes = on_ranks(tmp_path, 2, work, optimizer=adam, clip_norm=clip_norm)
    says = "the gradient of 'a.weight', 'a.bias' is not finite at step 2"
    assert outcomes == [(says, True)] * 2


def spoils(x: Tensor) -> Tensor:
    result: Tensor = Spoils.apply(x)  # type: ignore[no-untyped-call]
    return result


class Seen(nn.Module):
    """It depends on data, and puts another buffer in the place of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().sum()) > 1e9:
            return -x
        self.count = self.count + 1
        return x


def counted(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():  # a weight that follows the data
        self.slow.weight.lerp_(x.mean(0).expand(4, 4), 0.5)
        slow = self.slow(x)
    return forward(self, self.seen(x)) + slow


@pytest.mark.slow
def test_a_step_that_is_skipped_leaves_nothing_behind(tmp_path: Path) -> None:
    slow = nn.Linear(4, 4).requires_grad_(False)
    model = Net(counted, norm=nn.BatchNorm1d(4), seen=Seen(), slow=slow)
    written(tmp_path, model, micro_batches=COUNT)

    def run(trainer: Trainer, *batches: Any) -> tuple[list[float], dict[str, Tensor]]:
        losses = [trainer.step(*pair) for pair in batches]
        return losses, states(trainer)

    options: Any = {"optimizer": adam, "on_nonfinite": "skip"}
    with_bad = on_ranks(
        tmp_path, 2, lambda t: run(t, batch(), batch(2), batch()), **options
    )
    without = on_ranks(tmp_path, 2, lambda t: run(t, batch(), batch()), **options)
    for (losses, state), (wanted, right) in zip(with_bad, without, strict=True):
        assert math.isnan(losses[1])
        assert [losses[0], losses[2]] == wanted
        assert is_same(state, right)


@pytest.mark.slow
def test_of_accumulated_steps_a_bad_one_takes_all(tmp_path: Path) -> None:
    program(tmp_path)

    def work(trainer: Trainer) -> bool:
        before = {n: p.clone() for n, p in trainer.stages.parameters.items()}
        trainer.step(*batch(bad=0))
        trainer.step(*batch())
        after = {**trainer.stages.parameters}
        kept = is_same(before, after)
        trainer.step(*batch())
        trainer.step(*batch())
        return kept and not is_same(before, after)

    options: Any = {"accumulate": 2, "on_nonfinite": "skip", "optimizer": adam}
    assert on_ranks(tmp_path, 2, work, **options) == [True, True]


def test_a_good_step_after_a_bad_one_keeps_its_statistics(tmp_path: Path) -> None:
    """Nothing is wrong with it, though its update is left out."""
    program(tmp_path)

    def work(trainer: Trainer, *batches: Any) -> dict[str, Tensor]:
        for pair in batches:
            trainer.step(*pair)
        assert trainer.worker.problem is None
        return {n: t.clone() for n, t in trainer.stages.tensors().items()}

    options: Any = {"on_nonfinite": "skip", "optimizer": adam}
    bad = batch(bad=0), batch()
    actual = on_ranks(tmp_path, 2, lambda t: work(t, *bad), accumulate=2, **options)
    wanted = on_ranks(tmp_path, 2, lambda t: work(t, batch()), accumulate=2, **options)
    assert all(map(is_same, actual, wanted))


def test_with_a_warning_training_goes_on(tmp_path: Path) -> None:
    program(tmp_path)

    def work(trainer: Trainer) -> tuple[float, bool]:
        loss = trainer.step(*batch(bad=0))
        assert trainer.worker.problem is not None
        assert list(trainer.worker.problem.losses) == [0]
        named = trainer.stages.parameters.values()
        return loss, any(not p.isfinite().all() for p in named)

    for loss, spoilt in on_ranks(tmp_path, 2, work, on_nonfinite="warn"):
        assert math.isnan(loss)
        assert spoilt


def test_with_a_warning_a_bad_gradient_is_clipped_as_in_one_process(
    tmp_path: Path,
) -> None:
    """Its norm is no number, and so is what all gradients are multiplied by."""
    model = Net(lambda net, x: net.d(torch.tanh(net.c(net.b(spoils(net.a(x)))))))
    written(tmp_path, model, micro_batches=1)
    x = torch.tensor([[1.0, 1.0, -1e4, 1.0], [1.0, -1.0, -1e4, 1.0]])
    inputs, target = x, X  # gradients of infinity less infinity
    torch.nn.functional.mse_loss(model(inputs), target).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    wanted = dict(model.named_parameters())
    assert all(parameter.isnan().all() for parameter in wanted.values())

    def work(trainer: Trainer) -> dict[str, Tensor]:
        trainer.step(inputs, target)
        return {n: p.detach() for n, p in trainer.stages.parameters.items()}

    for weights in on_ranks(tmp_path, 2, work, on_nonfinite="warn", clip_norm=1.0):
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, wanted[name].detach(), equal_nan=True)


def test_a_count_that_is_infinite_is_found(tmp_path: Path) -> None:
    """The mean is 0, and so is each gradient: nothing would be trained."""

    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return (output - target).square().sum(), (target * 0 + 1000).exp().sum()

    model = Net(forward, norm=nn.BatchNorm1d(4))
    written(tmp_path, model, (X,), loss, ranks=2, micro_batches=1)

    def work(trainer: Trainer) -> str:
        with pytest.raises(NotFiniteError) as caught:
            trainer.step(X, X)
        return caught.value.message

    says = "the loss is inf at step 1, in micro-batch 0"
    assert on_ranks(tmp_path, 2, work) == [says, says]


def test_gradients_of_any_kind_are_looked_at() -> None:
    kinds = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)
    named = {str(kind): nn.Parameter(torch.ones(3, 2, dtype=kind)) for kind in kinds}
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    named["none"] = nn.Parameter(torch.ones(1))
    assert all_finite(named.values())
    for name, parameter in named.items():
        if parameter.grad is None:
            continue
        parameter.grad[1, 1] = math.inf
        assert not all_finite(named.values())
        assert not_finite(named) == [name]
        parameter.grad[1, 1] = 1
