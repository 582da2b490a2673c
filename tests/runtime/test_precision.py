"""Mixed precision: stages within autocast, weights in float32, one loss scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from program_support import WIDTH, Net, X, batch_of, mse, on_ranks, written
from threads import run_on_threads
from torch import Tensor, nn
from training_support import pairs, run, simple, user_of

from gemsc.errors import GemscError
from gemsc.plan import Plan
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.worker import finite
from gemsc.verify.compare import StepRecord, compare
from gemsc.verify.one_process import reference_steps
from gemsc.verify.precision import Precision


class Picture(nn.Module):
    """Convolutions and norms, a skip over two stages, and a part in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.down = nn.Sequential(nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.first(x)
        x = self.up(self.down(skip))
        with torch.autocast("cpu", enabled=False):
            x = (x.to(self.head.weight.dtype) + skip).relu()
        return self.head(x.mean((2, 3)))


PICTURES = (torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)),)


def classes(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


def trained(
    directory: Path,
    precision: str,
    dtype: torch.dtype = torch.float32,
    *,
    steps: int = 2,
    micro_batches: int = 3,
    **options: object,
) -> tuple[StepRecord, StepRecord, Plan]:
    """Train on threads and in one process, both in a precision."""
    target = torch.tensor([0, 1])
    choices = {"ranks": 2, "micro_batches": micro_batches, **options}
    given = Picture(), PICTURES, classes, target
    plan = written(directory, *given, precision=precision, **choices).plan
    batches = [batch_of((PICTURES, target), micro_batches)] * steps
    record = run_on_threads(directory, plan.ranks, batches, dtype=dtype)
    chosen = Precision.of(plan, dtype)
    expected = reference_steps(
        Picture(), classes, batches, micro_batches, dtype, precision=chosen
    )
    return record, expected, plan


def distance(one: StepRecord, other: StepRecord) -> float:
    """Return how far all gradients are from those of another step, in the L2 norm."""
    pairs = [(one.gradients[n].double(), t) for n, t in other.gradients.items()]
    square = sum(float((a - b).square().sum()) for a, b in pairs)
    return square**0.5


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("bfloat16", {"schedule": "zb-h1"}),
        ("float16", {"recompute": ("all",)}),
    ],
)
def test_stages_compute_what_one_process_computes_within_autocast(
    precision: str, options: dict[str, object], tmp_path: Path
) -> None:
    """Predicted memory has statistics of norms in half, and each weight's cast."""
    record, expected, plan = trained(tmp_path, precision, **options)
    comparison = compare(record, expected)
    assert comparison.equal == comparison.total > 0
    assert record.activation_bytes == pytest.approx(plan.activation_bytes, 0.07)
    text = (tmp_path / "rank0.py").read_text()
    assert f"precision=torch.{precision}" in text
    assert f"torch.{precision}, gradient=True" in text  # so it travels


@pytest.mark.slow(1)
@pytest.mark.parametrize("options", [{"tiles": "2x1"}, {"shards": "2"}])
def test_grids_are_as_near_to_float64_as_one_process(
    options: dict[str, object], tmp_path: Path
) -> None:
    steps = {"steps": 1, "micro_batches": 1, **options}
    record, expected, _ = trained(tmp_path / "half", "bfloat16", **steps)
    ranks, exact, _ = trained(tmp_path / "whole", "bfloat16", torch.float64, **steps)
    assert compare(ranks, exact).worst < 1e-12  # where there is no autocast
    assert 0 < distance(record, exact) < 1.5 * distance(expected, exact)


class Overflows(torch.autograd.Function):
    """Nothing, but for a gradient that is infinite when it is asked for."""

    now = False

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * (torch.inf if Overflows.now else 1.0)


def test_an_overflow_on_one_rank_leaves_out_the_update_of_all(tmp_path: Path) -> None:
    """The infinite gradient is that of the first layer: the last rank has none."""

    def forward(self: Net, x: Tensor) -> Tensor:
        x = Overflows.apply(self.a(x))  # type: ignore[no-untyped-call]
        return self.d(self.c(self.b(x)))

    written(tmp_path, Net(forward), ranks=2, micro_batches=2, precision="float16")
    batch = batch_of(((X,), X), 2)

    def steps(trainer: Trainer) -> tuple[list[bool], list[dict[str, float]]]:
        scaler = trainer.worker.updates.scaler
        assert scaler is not None
        moved, states = [], []
        for overflows in (False, True, False):
            before = {n: t.clone() for n, t in trainer.state_dict().items()}
            if trainer.transport.rank == 0:
                Overflows.now = overflows
            trainer.step(*batch)
            after = trainer.state_dict()
            moved.append(not all(torch.equal(before[n], after[n]) for n in after))
            states.append(scaler.state_dict())
        output = trainer.evaluate(*batch).output
        assert output is None or output.dtype is torch.float32  # for metrics
        trainer.save(tmp_path / "saved")
        scaler.load_state_dict(states[0])
        assert scaler.state_dict() == states[0]
        trainer.resume(tmp_path / "saved")
        assert scaler.state_dict() == states[2]
        return moved, states

    for moved, states in on_ranks(tmp_path, 2, steps):
        assert moved == [True, False, True]
        assert [state["factor"] for state in states] == [2.0**16, 2.0**15, 2.0**15]
        assert [state["skipped"] for state in states] == [0, 1, 1]


def chained(net: Net, x: Tensor) -> Tensor:
    result: Tensor = net.d(torch.tanh(net.c(torch.tanh(net.b(net.a(x))))))
    return result


def of_positive(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A sum and its count, another one in each micro-batch."""
    taken = target > 0
    return ((output - target) ** 2 * taken).sum(), taken.sum()


def of_many(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The same mean as of so many pixels that the sum alone overflows."""
    total, count = of_positive(output, target)
    return total * 2**18, count * 2**18


@pytest.mark.slow(2)
@pytest.mark.parametrize("loss", [mse, of_positive, of_many])
def test_the_factor_of_the_loss_is_gone_when_gradients_are_clipped(
    loss: Callable[[Tensor, Tensor], Any], tmp_path: Path
) -> None:
    choices = {"ranks": 2, "micro_batches": 2, "precision": "float16"}
    written(tmp_path, Net(chained), loss=loss, **choices)
    data = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(2))
    options = {"accumulate": 2, "clip_norm": 0.1}

    def work(trainer: Trainer) -> tuple[float | None, dict[str, Tensor]]:
        while not trainer.worker.updates.count:
            for part in data:
                trainer.step(part, part)
        return trainer.gradient_norm, trainer.state_dict()

    model, whole = Net(chained), data.flatten(0, 1)
    terms = loss(model(whole), whole)
    (terms[0] / terms[1] if isinstance(terms, tuple) else terms).backward()
    wanted = float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    for norm, state in on_ranks(tmp_path, 2, work, **options):
        assert norm == pytest.approx(wanted, rel=0.01)
        for name, tensor in state.items():
            step, real = tensor - before[name], model.get_parameter(name) - before[name]
            torch.testing.assert_close(step, real, rtol=0.05, atol=1e-5)


def test_the_factor_grows_after_as_many_good_updates_as_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(finite, "INTERVAL", 2)
    scale, powers = finite.LossScale(), []
    for is_overflow in (False, False, False, True, False, False, False, False):
        assert scale.take(is_overflow=is_overflow)
        powers.append(int(math.log2(scale.factor)))
    assert powers == [16, 17, 17, 16, 16, 17, 17, 18]


def test_the_loss_of_a_last_batch_is_in_the_precision_of_the_others(
    tmp_path: Path,
) -> None:
    def product(output: Tensor, target: Tensor) -> Tensor:
        scale = torch.full((WIDTH, WIDTH), 1 / 3).to(output.dtype)  # half of it
        return ((output @ scale).float() * scale[0] - target).square().mean()

    choices = {"ranks": 2, "micro_batches": 2, "precision": "bfloat16"}
    written(tmp_path, Net(simple), loss=product, **choices)
    held, losses = pairs(2, seed=1), []  # of four
    user = user_of(
        loss=product,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
        eval_dataset=lambda: held,
        on_epoch=lambda trainer, epoch, figures: losses.append(figures["loss"]),
    )
    run(tmp_path, user)
    x, target = held.tensors
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = product(Net(simple)(x), target)
    assert losses == [expected.item()] * 2


def test_complex_weights_are_as_they_are_in_bfloat16(tmp_path: Path) -> None:
    def forward(self: Any, x: Any) -> Any:
        waves = torch.fft.rfft(self.a(x).float())
        return self.d(torch.fft.irfft(waves * self.wave, x.shape[-1]))

    model = Net(forward)
    model.wave = nn.Parameter(torch.randn(X.shape[-1] // 2 + 1, dtype=torch.cfloat))
    written(tmp_path, model, (X,), mse, X, precision="bfloat16")  # which compares


@pytest.mark.parametrize(
    ("precision", "dtype", "message"),
    [
        ("fp8", torch.float32, "unknown precision 'fp8'"),
        ("float16", torch.float64, "parameter a.weight is in float64"),
        ("bfloat16", torch.complex128, "parameter a.weight is in complex128"),
        ("float16", torch.complex64, "parameter a.weight is in complex64"),
    ],
)
def test_refused(
    precision: str, dtype: torch.dtype, message: str, tmp_path: Path
) -> None:
    model = Net(lambda self, x: self.d(self.a(x)))
    model.a.weight.data = model.a.weight.data.to(dtype)
    with pytest.raises(GemscError, match=message):
        written(tmp_path, model, (X.to(dtype),), mse, X, precision=precision)
