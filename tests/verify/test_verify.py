"""What `verify` says of the errors that it finds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import typer
from command_line import MODEL, compile_here, gemsc_here
from plan_support import made_up_plan
from program_support import Net, X, adding, mse, written
from rich.console import Console
from torch import nn

import gemsc
from gemsc.cli import verify as cli
from gemsc.errors import GemscError
from gemsc.messages.message import Input
from gemsc.runtime.worker.steps import BatchShape
from gemsc.user_model import UserModel
from gemsc.verify import steps
from gemsc.verify.compare import (
    TOLERANCE,
    Comparison,
    StepRecord,
    compare,
    near_zero,
    nearer,
    noisy,
)
from gemsc.verify.one_process import reference_steps
from gemsc.verify.precision import FULL, LowPrecision, Precision
from gemsc.verify.steps import _Subject, user_model_of, verify_program
from gemsc.viz.terminal import show_activations

WIDE, NARROW = torch.float64, torch.float32


def compared(errors: dict[str, float], rounding: dict[str, float]) -> Comparison:
    return Comparison({"loss": 0.0} | errors, rounding=rounding)


def test_each_tensor_is_judged_by_its_own_rounding() -> None:
    errors = {"loss": 0.0, "near zero": 30.0, "wrong": 1.8e-3}
    rounding = {"loss": 0.0, "near zero": 50.0, "wrong": 1e-6}
    assert compared(errors, rounding).judge(NARROW) == ("wrong", "wrong")
    rounding["wrong"] = 1e-3
    assert compared(errors, rounding).judge(NARROW) == ("undecided", "near zero")
    errors["near zero"] = 0.05
    assert compared(errors, rounding).judge(NARROW) == ("exact", "near zero")


@pytest.mark.parametrize(
    ("name", "error", "moved", "kind"),
    [
        ("gradient of b", 1.8e-2, 4.8e-2, "undecided"),
        ("parameter b", 0.5, 4.8e-2, "undecided"),
        ("gradient of b", 1.8e-2, 9e-3, "wrong"),  # no gate turns
        ("loss", 1e-2, 4.8e-2, "wrong"),  # it does not move so much
        ("copies of b", float("inf"), 4.8e-2, "wrong"),
    ],
)
def test_where_gates_turn_a_few_roundings_set_no_bound(
    name: str, error: float, moved: float, kind: str
) -> None:
    rounding = {"loss": 0.0, "gradient of a": moved, "parameter a": 2.0, name: 1e-5}
    before = compared({name: error}, rounding)
    assert before.judge(NARROW) == ("wrong", name)
    turned = before.with_gates()
    assert turned.judge(NARROW) == (kind, name)
    said = cli._verdict("float32", kind, name, turned, True)
    reason = "rounding alone changes the gradient of a by 4.8e-02: a ReLU or the like"
    assert (reason in said) == (kind == "undecided")


def test_a_rank_that_keeps_nothing_has_no_ratio() -> None:
    """As the first of a network that begins with augmentation on its GPU."""
    console = Console(file=StringIO(), width=200)
    plan: Any = SimpleNamespace(activation_bytes=[0, 10], data=1, by_rank=list)
    show_activations(plan, [0, 20], console)
    assert isinstance(console.file, StringIO)
    assert "measured / predicted 2.000 to 2.000" in console.file.getvalue()


@pytest.mark.parametrize(
    ("dtype", "error", "rounding", "kind"),
    [
        (NARROW, 0.2, 0.02, "wrong"),
        (NARROW, 0.03, 0.01, "exact"),
        (NARROW, 0.05, 0.01, "wrong"),
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
    assert compared({"x": error}, {"x": rounding}).judge(dtype) == (kind, "x")


def test_errors_are_those_of_single_tensors() -> None:
    ones = {"a": torch.ones(3), "b": torch.ones(3)}
    expected = StepRecord([1.0], ones, {"a": torch.ones(3)})
    other = {"a": torch.ones(3) * 1.5, "b": torch.ones(1)}  # of another shape
    actual = StepRecord([1.0], other, {})
    errors = compare(actual, expected).errors
    assert errors["gradient of a"] == 0.5
    assert errors["gradient of b"] == float("inf")
    assert errors["parameter a"] == float("inf")
    assert errors["loss"] == 0


def test_an_optimizer_of_one_process_makes_its_numbers_in_the_dtype_of_ranks() -> None:
    made = []

    def optimizer(params: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.NAdam(params))  # it keeps a product for each weight
        return made[-1]

    batches = [((X,), torch.ones(2, 3))]
    reference_steps(nn.Linear(4, 3), mse, batches, 1, WIDE, optimizer)
    for state in made[0].state.values():
        assert {value.dtype for value in state.values()} == {WIDE}


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, output: Any, target: Any) -> Any:
        return mse(output * self.weight, target)


def test_a_loss_of_one_process_draws_the_weights_that_the_ranks_have() -> None:
    numbers = {"ranks": 2, "data": 1, "micro_batches": 1}
    plan: Any = SimpleNamespace(**numbers, precision="float32", only_dtype="")
    model, batch = nn.Linear(4, 3), ((X,), torch.ones(2, 3))
    user = UserModel(Path(), torch, "model", model, X, loss=Weighted)
    subject = _Subject(Path(), plan, user, model, [batch], NARROW, torch.device("cpu"))
    wanted = user.make_loss()(model(X), batch[1])
    assert subject.in_one_process().losses == pytest.approx([wanted.item()])


@pytest.mark.parametrize("losses", [[math.nan, 1.0], [1.0, math.nan]])
def test_a_loss_that_is_no_number_is_wrong_in_any_step(losses: list[float]) -> None:
    diff = compare(StepRecord(losses, {}, {}), StepRecord([1.0, 1.0], {}, {}))
    assert diff.judge(WIDE) == ("wrong", "loss")


def test_half_precision_excuses_gradients_alone() -> None:
    small, gradients = torch.tensor([1e-3]), {"large": X, "small": X}
    expected = StepRecord([1.0], gradients, {"large": torch.ones(1), "small": small})
    actual = replace(expected, state={**expected.state, "small": small + 5e-4})
    diff = compare(actual, expected, last_bit=2**-7)
    assert diff.judge(NARROW) == ("wrong", "parameter small")


def test_noise_excuses_updates_made_of_it_and_buffers_alone() -> None:
    off = {"parameter noisy": 1.0, "buffer mean": 1.0, "parameter other": 0.0}
    first = compared(off, {})
    assert first.is_about({"noisy"}, WIDE)
    assert not compared(off | {"parameter other": 1.0}, {}).is_about({"noisy"}, WIDE)
    assert not compared(off | {"parameter noisy": 0.0}, {}).is_about({"noisy"}, WIDE)
    again = compared({name: 0.5 for name in off}, {})
    assert first.with_updates_of(again, {"noisy"}).errors == {
        "loss": 0.0, "parameter noisy": 0.5, "buffer mean": 0.5, "parameter other": 0.0
    }  # fmt: skip


@dataclass(frozen=True)
class Noisy:
    """Steps whose second element is noise, and whose third is as large as its limit.

    `near_zero`, it is left out; the third is, on one side.
    """

    plan: Any
    dtype: torch.dtype = NARROW
    precision: Precision = FULL
    near_zero: float = 0.0

    def step(self, state: list[float]) -> StepRecord:
        gradient = torch.tensor([1.0, 1e-9, 1e-7])
        return StepRecord([1.0], {"w": gradient}, {"w": torch.tensor(state)})

    def in_one_process(self) -> StepRecord:
        return self.step([1.0, 1.0, 2.0 if self.near_zero else 1.0])

    def on_ranks(self) -> StepRecord:
        return self.step([1.0, 1.0 if self.near_zero else 2.0, 1.0])


def test_an_element_as_large_as_the_limit_of_noise_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steps, "_ranks", Noisy.on_ranks)
    subject: Any = Noisy(SimpleNamespace(stages=(), torch_compile=False))
    diff = steps._verify(subject)
    assert diff.judge(NARROW)[0] == "exact"
    assert diff.settled == {"w"}

    class Wrong(Noisy):
        def on_ranks(self) -> StepRecord:
            return self.step([1.5, 1.0, 1.0])

    monkeypatch.setattr(steps, "_ranks", Wrong.on_ranks)
    monkeypatch.setattr(steps, "_inside", lambda subject: None)
    monkeypatch.setattr(steps, "_other_roundings", lambda subject, inside: ())
    assert steps._verify(cast(Any, Wrong(subject.plan))).judge(NARROW)[0] == "wrong"


def test_of_two_pairs_what_has_no_number_or_another_shape_is_the_first() -> None:
    nan, one, count = torch.tensor([math.nan]), torch.ones(1), torch.tensor(3)
    first = {"nan": nan, "count": count, "shape": X}, {"nan": one, "count": count}
    second = {"nan": one, "count": count + 1}, {"nan": one, "count": count, "shape": X}
    mine, theirs = nearer(first, second)
    assert mine["nan"].isnan()
    assert theirs["nan"] == 1
    assert mine["count"] == 3
    assert "shape" not in theirs


def test_a_gradient_is_noisy_where_any_element_of_it_is() -> None:
    gradients = {"one": torch.tensor([1.0, 1e-9, 0.0]), "none": torch.tensor([1.0, 0])}
    record = StepRecord([1.0], gradients, {})
    assert noisy(record, NARROW) == {"one"}
    assert near_zero(record, NARROW) == pytest.approx(1e-7)  # of the largest


def test_the_largest_rounding_counts() -> None:
    once = compared({}, {"x": 0.1}).with_rounding({"x": 0.2, "y": 0.3})
    assert once.with_rounding({"x": 0.15}).rounding == {"x": 0.2, "y": 0.3}


def test_a_gradient_of_parts_that_cancel_has_their_rounding() -> None:
    """In bfloat16 each tile rounds its part of a sum that is zero."""
    large = {"weight": torch.ones(3)}
    expected = StepRecord([1.0], {**large, "bias": torch.tensor([1e-5])}, {})
    for error, last_bit, kind in (
        (1.6e-4, 2**-7, "exact"), (1e-3, 2**-7, "wrong"), (1.6e-4, 0.0, "wrong"),
    ):  # fmt: skip
        gradients = {**large, "bias": expected.gradients["bias"] + error}
        actual = StepRecord([1.0], gradients, {})
        diff = compare(actual, expected, last_bit=last_bit)
        assert diff.judge(torch.float32)[0] == kind
        inside = LowPrecision(torch.bfloat16, "linear")
        if last_bit:
            diff = compare(actual, expected).with_inside(inside, actual, expected)
            assert diff.judge(torch.float32)[0] == kind


def test_a_mask_hides_no_error_in_another_buffer() -> None:
    masks = {"huge": torch.tensor([0.0, -3e38]), "mask": torch.tensor([0.0, -math.inf])}
    expected = StepRecord([1.0], {}, {"mean": torch.tensor([0.5]), **masks})
    actual = StepRecord([1.0], {}, {"mean": torch.tensor([0.6]), **masks})
    errors = compare(actual, expected).errors
    assert errors["buffer mean"] == pytest.approx(0.2)
    assert errors["buffer mask"] == errors["buffer huge"] == 0
    actual.state["mask"] = torch.zeros(2)
    assert compare(actual, expected).errors["buffer mask"] == math.inf
    shown, given = ({"mean": r.state["mean"], **masks} for r in (actual, expected))
    diff = compare(replace(actual, outputs=shown), replace(expected, outputs=given))
    assert diff.errors["evaluation's mean"] == pytest.approx(0.2)


def test_what_is_nan_or_should_be_zero_is_wrong() -> None:
    nan, zero = torch.full((2,), math.nan), torch.zeros(2)
    expected = StepRecord([1.0], {"a": nan, "b": zero}, {})
    actual = StepRecord([1.0], {"a": nan, "b": zero + 1}, {})
    errors = compare(actual, expected).errors
    assert errors["gradient of a"] == math.inf
    assert errors["gradient of b"] > 1


def exit_code(
    found_in: Callable[[torch.dtype], Comparison], dtype: str, patch: pytest.MonkeyPatch
) -> int:
    """Return how the command ends for a program in a dtype."""
    plan = SimpleNamespace(
        dtype=dtype,
        only_dtype="",
        precision="float32",
        torch_compile=False,
        unchecked="",
        shapes=(),
    )
    patch.setattr(cli, "verify_program", lambda _, dtype, **__: found_in(dtype))
    patch.setattr(cli.Plan, "read", lambda path: plan)
    patch.setattr(cli, "show_activations", lambda *given: None)
    patch.setattr(cli, "_prove", lambda *given: None)
    patch.setattr(cli, "_about", lambda *given: ())
    try:
        cli.verify_command(directory=Path("program"), as_json=False)
    except typer.Exit as raised:
        return raised.exit_code
    return 0


def test_a_model_in_float64_is_verified_in_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def ask(dtype: torch.dtype) -> Comparison:
        asked.append(dtype)
        return compared({"x": 0.0}, {})

    assert exit_code(ask, "float64", monkeypatch) == 0
    assert asked == [WIDE]


@pytest.mark.parametrize(
    ("float64", "float32", "code"),
    [
        ("exact", "exact", 0),
        ("exact", "undecided", 0),
        ("exact", "wrong", 1),
        ("undecided", "exact", 1),
        ("wrong", "exact", 1),
    ],
)
def test_the_exit_code_asks_float64_to_be_exact(
    float64: str, float32: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {WIDE: float64, NARROW: float32}
    errors = {
        "exact": compared({"x": 0.0}, {}),
        "wrong": compared({"x": 1.0}, {}),
        "undecided": compared({"x": 1.0}, {"x": 1.0}),
    }
    assert exit_code(lambda dtype: errors[kinds[dtype]], "float32", monkeypatch) == code


def test_what_is_not_decided_is_not_exact_from_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = compared({"x": 1.0}, {"x": 1.0})
    monkeypatch.setattr(steps, "verify_program", lambda *given, **named: hidden)
    with pytest.raises(GemscError, match="is undecided in"):
        gemsc.verify_compiled(tmp_path, nn.Linear(2, 2), (X,), loss=mse)


@pytest.mark.parametrize(
    ("size", "compiles", "lower", "last_bit"),
    [
        (2, False, torch.bfloat16, 2**-7),
        (1, True, torch.bfloat16, 2**-7),
        (1, False, torch.bfloat16, 0.0),
        (2, True, None, 0.0),
    ],
)
def test_a_last_bit_is_excused_where_ranks_add_up_or_kernels_differ(
    size: int, compiles: bool, lower: torch.dtype | None, last_bit: float
) -> None:
    grid, precision = SimpleNamespace(size=size), SimpleNamespace(dtype=lower)
    stages = [SimpleNamespace(grid=SimpleNamespace(size=1)), SimpleNamespace(grid=grid)]
    plan = SimpleNamespace(stages=stages, torch_compile=compiles)
    subject: Any = SimpleNamespace(plan=plan, precision=precision)
    assert steps._last_bit(subject) == last_bit


@pytest.mark.parametrize("error", [1e-12, 1e-3])
def test_kernels_are_excused_by_what_they_lose_where_that_is_rounding(
    error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = StepRecord([1.0], {}, {"w": torch.ones(1, dtype=WIDE)})
    subject: Any = steps._Subject(*[None] * 5, dtype=NARROW, device=steps.CPU)
    monkeypatch.setattr(steps, "_ranks", lambda of: replace(one, losses=[1 + error]))
    monkeypatch.setattr(steps._Subject, "in_one_process", lambda of: one)
    lost = steps._lost_by_kernels(subject)
    assert lost == (
        {}
        if error > 1e-9
        else pytest.approx({"loss": 2**29 * error, "buffer w": 0}, rel=1e-3)
    )


SEND = "    worker.send(X, m, x_2)  # to rank 1\n"
FIRST = "    for m in range(NUM_MICRO_BATCHES):\n        forward_stage0(worker, m)\n"
EDITS = [  # of the first rank's file: what was there, what is there now, what is said
    (FIRST, "", "error: build cannot run as its rank files are: rank 0 does an"),
    (SEND, "", "rank 1 receives what rank 0 does not send, x float32[2, 16], tag 0"),
    ("    worker.update()\n", "", "rank 0 does not end its step with the update"),
    (
        SEND,
        f"    print(x.shape)\n{SEND}",
        "note: not proved before it runs: rank 0 fai",
    ),
    (SEND, f"    worker.status\n{SEND}", "note: not proved before it runs: rank 0"),
    (SEND, f"    m += 0\n{SEND}", "error: it runs"),
]


@pytest.mark.slow(3)
@pytest.mark.parametrize(("old", "new", "said"), EDITS)
def test_the_files_are_proved_as_they_are_now(
    old: str,
    new: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def runs(*given: Any, **named: Any) -> None:
        raise GemscError("it runs")

    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    schedule = "--schedule", "gpipe", "--micro-batches", 2, "--no-check"
    compile_here("model.py", "--ranks", 2, *schedule, "-o", "build")
    rank0 = Path("build/rank0.py")
    text = rank0.read_text()
    assert old in text
    rank0.write_text(text.replace(old, new, 1))
    monkeypatch.setattr(cli, "verify_program", runs)
    outcome = gemsc_here(monkeypatch, capfd)("verify", "build")
    assert said in outcome.out + outcome.err
    assert ("it runs" in outcome.err) == ("cannot run" not in outcome.err)


@pytest.mark.mpi
@pytest.mark.nightly
@pytest.mark.usefixtures("engine")
def test_a_program_compiled_from_python_is_verified(tmp_path: Path) -> None:
    def forward(self: Net, x: torch.Tensor) -> torch.Tensor:
        h = self.b(self.a(x)) + torch.randn_like(x)
        return self.d(self.c(h.to(x.dtype)))

    model = Net(forward)
    written(tmp_path, model, ranks=2, micro_batches=2)
    result = gemsc.verify_compiled(
        tmp_path, model, (X,), loss=mse, example_target=X, num_steps=1
    )
    assert result.judge(WIDE)[0] == "exact"


class Squares(nn.Module):
    """A norm that computes in float32, or in what it is given."""

    def __init__(self, narrow: bool) -> None:
        super().__init__()
        self.weight, self.narrow = nn.Parameter(torch.linspace(0.5, 1.5, 16)), narrow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float() if self.narrow else x
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(x.dtype)


class Narrow(nn.Module):
    def __init__(self, narrow: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)
        self.norms = nn.ModuleList(Squares(narrow) for _ in range(2))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = x + self.down(torch.tanh(self.up(self.norms[0](x))))
        return self.last(self.norms[1](x))


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("narrow", "factor"),
    [(True, "1.00001"), pytest.param(False, "1.000001", marks=pytest.mark.nightly)],
)
def test_what_a_model_computes_in_float32_is_judged_by_float32(
    narrow: bool, factor: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x, target = Narrow(narrow), torch.randn(4, 8), torch.randn(4, 3)
    options: Any = {"ranks": 2, "shards": ("2",), "micro_batches": 2}
    written(tmp_path, model, (x,), target=target, **options)
    given = {"loss": mse, "example_target": target, "num_steps": 1}
    if narrow:
        result = gemsc.verify_compiled(tmp_path, model, (x,), **given)
        assert result.errors["loss"] > TOLERANCE[WIDE]
        assert result.inside is not None
        assert result.inside.dtype is NARROW
        assert "_to_copy at test_verify.py:" in result.inside.call
    for path in tmp_path.glob("rank*.py"):
        text = path.read_text()
        assert "torch.rsqrt(" in text
        path.write_text(text.replace("torch.rsqrt(", f"{factor} * torch.rsqrt("))
    with pytest.raises(GemscError, match="is wrong in"):
        gemsc.verify_compiled(tmp_path, model, (x,), **given)


@pytest.mark.slow
@pytest.mark.mpi
def test_a_dataset_may_give_the_tensors_of_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path, build = tmp_path / "model.py", tmp_path / "build"
    theirs = "class Named(torch.Tensor):\n    pass\n\n\nclass Data"
    text = MODEL.replace("class Data", theirs)
    path.write_text(text.replace("randn(8),", "randn(8).as_subclass(Named),"))
    compile_here(path, "--ranks", 2, "-o", build)
    said = gemsc_here(monkeypatch, capfd)("verify", build, "--dtype", "float64")
    assert ": exact" in said.out, said.err


def test_a_rank_computes_with_plain_tensors() -> None:
    class Named(torch.Tensor):
        pass

    item = Input(("x",), (2, 3), torch.float32)
    shape = BatchShape({"x": item}, micro_batches=1)
    (bound,) = shape.bind({"x": torch.ones(2, 3).as_subclass(Named)}).values()
    assert type(bound) is torch.Tensor


BIASED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.c = nn.Conv2d(4, 1, 3)
    def forward(self, x):
        return self.c(torch.relu(self.norm(self.a(x))))

model = Net

def example_inputs():
    return (torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)),)

def example_target():
    return torch.zeros(2, 1, 6, 6)

def loss(output, target):
    return 1e5 * (output - target - 1).square().mean()

def optimizer(params):
    return torch.optim.Adam(params, lr=0.01)
"""


def without_rounding(errors: dict[str, float]) -> dict[str, float]:
    return {name: error for name, error in errors.items() if error > 1e-9}


@pytest.mark.slow
@pytest.mark.mpi
def test_steps_that_an_optimizer_makes_of_rounding_alone_are_no_error(
    tmp_path: Path,
) -> None:
    (tmp_path / "model.py").write_text(BIASED)
    program = tmp_path / "x"
    words = ("--ranks", 2, "--tiles", "2x1", "--micro-batches", 2, "-o", program)
    compile_here(tmp_path / "model.py", *words)
    diff = verify_program(program, dtype=WIDE)
    assert diff.settled == {"a.bias"}
    assert diff.judge(WIDE)[0] == "exact"
    assert not without_rounding({**diff.errors})
    said = cli._verdict("float64", *diff.judge(WIDE), diff, True)
    assert "gradients of a.bias are zero but for rounding" in said
    # in the second step, whose gradients are not compared, 1e-10 of the largest one
    texts = {path: path.read_text() for path in program.glob("rank*.py")}
    for name, addend in (("a.bias", 1e-5), ("c.bias", -1e9)):
        for path, text in texts.items():
            path.write_text(adding(text, name, addend))
        diff = verify_program(program, dtype=WIDE)
        assert diff.judge(WIDE)[0] != "exact", (name, addend)


def test_a_file_that_can_be_imported_but_once_is_as_it_was(tmp_path: Path) -> None:
    """It registers a name in a library, which refuses a second one of it."""
    (tmp_path / "registry.py").write_text("names = []\n")
    (path := tmp_path / "registers.py").write_text(
        "import registry, torch\n"
        "if registry.names:\n"
        "    raise ValueError('it has that name')\n"
        "registry.names.append('Net')\n"
        "model, loss = torch.nn.Linear(2, 1), torch.nn.MSELoss()\n"
        "def example_inputs():\n"
        "    return (torch.randn(4, 2),)\n"
    )
    plan: Any = SimpleNamespace(spec=str(path), constants={})
    model = user_model_of(tmp_path, plan).model
    assert user_model_of(tmp_path, plan).model is model
    plan.constants["loss"] = "None"
    with pytest.raises(GemscError, match="has no constant loss"):
        user_model_of(tmp_path, plan)


def test_what_takes_long_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "num_cores", lambda: 8)  # 2 for each rank
    monkeypatch.setattr(cli, "step_seconds", lambda plan: 240.0)
    plan, both = made_up_plan(4), ["float64", "float32"]
    assert list(cli._about(plan, both, 2)) == [
        "note: on this CPU that takes about 5.6 min; --steps 1 --dtype float64 2 min"
    ]
    assert list(cli._about(plan, both[:1], 1)) == [
        "note: on this CPU that takes about 2 min"
    ]
    assert list(cli._about(plan, both[1:], 3)) == [  # float64 may not run at all
        "note: on this CPU that takes about 2.4 min; --steps 1 --dtype float32 48 s"
    ]
    assert not list(cli._about(plan, both[:1], 0))  # on a GPU
    monkeypatch.setattr(cli, "step_seconds", lambda plan: 80.0)
    assert not list(cli._about(plan, both, 1))  # 56 s
