"""What `verify` says of the errors that it finds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from program_support import Net, X, mse, written

import gemsc
from gemsc.errors import GemscError
from gemsc.verify import Comparison, StepRecord, compare

WIDE, NARROW = torch.float64, torch.float32


def found(errors: dict[str, float], rounding: dict[str, float]) -> Comparison:
    none = (0.0, "")
    return Comparison(0, none, none, none, 0, 0, errors=errors, rounding=rounding)


def test_each_tensor_is_judged_by_its_own_rounding() -> None:
    errors = {"loss": 0.0, "near zero": 30.0, "wrong": 1.8e-3}
    rounding = {"loss": 0.0, "near zero": 50.0, "wrong": 1e-6}
    assert found(errors, rounding).judge(NARROW) == ("wrong", "wrong")
    rounding["wrong"] = 1e-3
    assert found(errors, rounding).judge(NARROW) == ("undecided", "near zero")
    errors["near zero"] = 0.05
    assert found(errors, rounding).judge(NARROW) == ("exact", "near zero")


@pytest.mark.parametrize(
    ("dtype", "error", "rounding", "kind"),
    [
        (NARROW, 0.2, 0.04, "wrong"),
        (NARROW, 0.2, 0.2, "undecided"),
        (NARROW, 0.09, 0.2, "exact"),
        (NARROW, float("inf"), 0.0, "wrong"),
        (WIDE, 1e-8, 0.0, "wrong"),
        (WIDE, 1e-8, 1e-8, "exact"),  # a part of the model is in float32
        (WIDE, 1e-4, 1e-4, "undecided"),
    ],
)
def test_nothing_far_off_is_called_exact(
    dtype: torch.dtype, error: float, rounding: float, kind: str
) -> None:
    assert found({"x": error}, {"x": rounding}).judge(dtype) == (kind, "x")


def test_errors_are_those_of_single_tensors() -> None:
    expected = StepRecord([1.0], {"a": torch.ones(3)}, {"a": torch.ones(3)})
    actual = StepRecord([1.0], {"a": torch.ones(3) * 1.5}, {})
    errors = compare(actual, expected).errors
    assert errors["gradient of a"] == 0.5
    assert errors["parameter a"] == float("inf")
    assert errors["loss"] == 0


@pytest.mark.mpi
def test_a_program_compiled_from_python_is_verified(tmp_path: Path) -> None:
    def forward(self: Net, x: torch.Tensor) -> torch.Tensor:
        h = self.b(self.a(x)) + torch.randn_like(x)
        return self.d(self.c(h.to(x.dtype)))

    model = Net(forward)
    written(tmp_path, model, ranks=2, micro_batches=2)
    given = {"loss": mse, "example_target": X, "num_steps": 1}
    result = gemsc.verify_compiled(tmp_path, model, (X,), **given)
    assert result.judge(WIDE)[0] == "exact"
    path = tmp_path / "rank1.py"
    path.write_text(path.read_text().replace("worker.loss_gradient", "None"))
    with pytest.raises(GemscError, match=r"is wrong in .*: gradient of"):
        gemsc.verify_compiled(tmp_path, model, (X,), **given)
