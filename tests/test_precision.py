"""Mixed precision: stages within autocast, weights in float32, one loss scale."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from program_support import Net, X, batch_of, mse, on_ranks, written
from support import run_on_threads
from torch import Tensor, nn

from gemsc.errors import GemscError
from gemsc.runtime.training.trainer import Trainer
from gemsc.verify.precision import Precision
from gemsc.verify.steps import Comparison, compare, reference_steps


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
) -> Comparison:
    """Train on threads and in one process, both in a precision."""
    target = torch.tensor([0, 1])
    choices = {"ranks": 2, "micro_batches": micro_batches, **options}
    program = written(
        directory,
        Picture(),
        PICTURES,
        classes,
        target,
        precision=precision,
        **choices,
    )
    batch = batch_of((PICTURES, target), micro_batches)
    batches = [batch] * steps
    record = run_on_threads(directory, program.plan.ranks, batches, dtype=dtype)
    own = Precision.of(program.plan, dtype)
    expected = reference_steps(
        Picture(), classes, batches, micro_batches, dtype, precision=own
    )
    return compare(record, expected)


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
    found = trained(tmp_path, precision, **options)
    assert found.equal == found.total > 0
    text = (tmp_path / "rank0.py").read_text()
    assert f"precision=torch.{precision}" in text
    assert f"torch.{precision}, gradient=True" in text  # so it travels


def test_in_float64_there_is_no_autocast(tmp_path: Path) -> None:
    assert trained(tmp_path, "bfloat16", torch.float64, steps=1).worst < 1e-12


def test_casts_of_weights_count_where_they_wait_for_the_backward(
    tmp_path: Path,
) -> None:
    """A fake BatchNorm saves its statistics in bfloat16, a real one in float32."""
    target = torch.tensor([0, 1])
    program = written(
        tmp_path, Picture(), PICTURES, classes, target, precision="bfloat16"
    )
    batch = batch_of((PICTURES, target), 4)
    record = run_on_threads(tmp_path, 2, [batch] * 2, dtype=torch.float32)
    assert record.activation_bytes == pytest.approx(program.plan.activation_bytes, 0.01)


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
        scaler.load_state_dict(states[0])
        assert scaler.state_dict() == states[0]
        return moved, states

    for moved, states in on_ranks(tmp_path, 2, steps):
        assert moved == [True, False, True]
        assert [state["factor"] for state in states] == [2.0**16, 2.0**15, 2.0**15]
        assert [state["skipped"] for state in states] == [0, 1, 1]


@pytest.mark.parametrize(
    ("precision", "dtype", "message"),
    [
        ("fp8", torch.float32, "unknown precision 'fp8'"),
        ("float16", torch.float64, "parameter a.weight is in float64"),
        ("bfloat16", torch.complex64, "parameter a.weight is in complex64"),
    ],
)
def test_refused(
    precision: str, dtype: torch.dtype, message: str, tmp_path: Path
) -> None:
    model = Net(lambda self, x: self.d(self.a(x)))
    model.a.weight.data = model.a.weight.data.to(dtype)
    with pytest.raises(GemscError, match=message):
        written(tmp_path, model, (X.to(dtype),), mse, X, precision=precision)
