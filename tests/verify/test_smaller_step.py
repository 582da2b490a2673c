"""Where a step takes too long, one of few samples is compared, split alike."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from branch_models import BRANCH_MODELS
from models import Case
from shard_models import SHARD_MODELS
from torch import Tensor, nn

import gemsc.compiler
from gemsc.base.examples import Examples
from gemsc.base.phase import Phase
from gemsc.codegen.package import rank_modules
from gemsc.compilation import Compilation
from gemsc.compiler import CompiledProgram, compile, trace
from gemsc.errors import GemscError, InternalError
from gemsc.ir.program import Program
from gemsc.plan import WITHOUT_KERNELS, Plan
from gemsc.verify import first_step, step_size

ROWS, COUNT = 6, 8  # of an example; micro-batches
X = torch.randn(ROWS, 3, 8, 6, generator=torch.Generator().manual_seed(1))


class Picture(nn.Module):
    """Takes pictures of any number; with `rows`, of that number only."""

    def __init__(self, rows: int = -1) -> None:
        super().__init__()
        self.rows = rows
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.a(x)).relu()
        return self.b(x * 0.5).reshape(self.rows, 2, 48)


def squares(output: Tensor) -> Tensor:
    return output.square().mean()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Plan]]:
    """Let two micro-batches of so many samples be all that is not too much.

    It is so for a plan, or for the first that is compared. Return those that are.
    """

    def set_limit(plan: Plan, rows: float) -> None:
        flops = sum(stage.flops for stage in plan.stages)
        monkeypatch.setattr(step_size, "_FLOPS_PER_SECOND", 1.0)
        monkeypatch.setattr(step_size, "_BLOCK_SECONDS", 0.0)
        size = plan.micro_batch_size
        copies = min(plan.data, step_size.MOST_COPIES)
        most = 8 * copies * 2 * flops * (rows + 0.01) / size
        monkeypatch.setattr(step_size, "MOST_SECONDS", most)
        monkeypatch.setattr(step_size, "SOON", most)

    def limit(rows: float, plan: Plan | None = None) -> list[Plan]:
        plans: list[Plan] = []

        def compare(compilation: Compilation, *given: Any, **how: Any) -> Any:
            if not plans and plan is None:
                set_limit(compilation.plan, rows)
            plans.append(compilation.plan)
            return first_step.first_step(compilation, *given, **how)

        if plan is not None:
            set_limit(plan, rows)
        monkeypatch.setattr(gemsc.compiler, "first_step", compare)
        return plans

    return limit


def compiled(model: nn.Module | None = None, **options: Any) -> CompiledProgram:
    options = {"ranks": 2, "micro_batches": COUNT, **options}
    return compile(model or Picture(), (X,), loss=squares, **options)


@pytest.mark.slow(1)
@pytest.mark.parametrize("rows", [2, 1])
def test_a_smaller_step_is_compared(rows: int, few: Callable[..., list[Plan]]) -> None:
    plans = few(rows)
    plan = compiled().plan
    _, small = plans
    assert (small.micro_batch_size, small.micro_batches) == (rows, 2)
    assert (plan.micro_batch_size, plan.micro_batches) == (ROWS, COUNT)
    assert plan.unchecked == ""
    note = f"compared with the model in a step of 2 micro-batches of {rows}"
    assert plan.notes[-1] == note


def write_wrong_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def modules(compilation: Compilation) -> dict[str, str]:
        files = rank_modules(compilation)
        assert any("* 0.5" in text for text in files.values())
        return {name: text.replace("* 0.5", "* 0.4") for name, text in files.items()}

    monkeypatch.setattr(gemsc.compiler, "rank_modules", modules)


def test_what_is_wrong_in_it_is_refused(
    few: Callable[..., list[Plan]], monkeypatch: pytest.MonkeyPatch
) -> None:
    few(2)

    write_wrong_files(monkeypatch)
    with pytest.raises(InternalError, match="wrong program"):
        compiled()


def test_a_smaller_program_that_cannot_be_written_is_none(
    few: Callable[..., list[Plan]], monkeypatch: pytest.MonkeyPatch
) -> None:
    few(2)

    def modules(compilation: Compilation) -> dict[str, str]:
        if compilation.plan.micro_batches < COUNT:
            raise InternalError("a fault of gemsc")
        return rank_modules(compilation)

    monkeypatch.setattr(gemsc.compiler, "rank_modules", modules)
    assert compiled().plan.unchecked.startswith("that would take about")


def test_metrics_are_tried_in_it(
    few: Callable[..., list[Plan]], capsys: pytest.CaptureFixture[str]
) -> None:
    def metrics(output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"accuracy": output.no_such_name}

    options: dict[str, Any] = {"loss": nn.MSELoss(), "ranks": 2, "micro_batches": COUNT}
    options |= {"example_target": torch.zeros(ROWS, 2, 48), "metrics": metrics}
    few(2)
    assert compile(Picture(), (X,), **options).plan.unchecked == ""
    assert "on the examples, metrics() fails" in capsys.readouterr().err


class Asks(Picture):
    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        return output if torch.is_grad_enabled() else output * 2


def test_what_is_wrong_in_the_model_is_told(few: Callable[..., list[Plan]]) -> None:
    few(2)
    with pytest.raises(GemscError, match=r"forward uses torch\.is_grad_enabled"):
        compiled(Asks())


def test_a_model_of_one_size_is_not_compared(
    few: Callable[..., list[Plan]], capsys: pytest.CaptureFixture[str]
) -> None:
    plans = few(2)
    plan = compiled(Picture(ROWS)).plan
    assert len(plans) == 1
    assert plan.unchecked.startswith("that would take about")
    assert plan.notes == []
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow(2)
@pytest.mark.parametrize("reason", ["", WITHOUT_KERNELS, "the loss is not finite"])
def test_a_smaller_step_that_says_nothing_is_none(
    reason: str, few: Callable[..., list[Plan]], monkeypatch: pytest.MonkeyPatch
) -> None:
    few(2, compiled(check=False).plan)
    given: Any = iter([{"unchecked": "too long"}, {"unchecked": reason}])
    monkeypatch.setattr(gemsc.compiler, "first_step", lambda *_, **__: next(given))
    is_compared = reason in ("", WITHOUT_KERNELS)
    plan = compiled().plan
    assert plan.unchecked == (reason if is_compared else "too long")
    assert len(plan.notes) == is_compared


def test_no_block_is_measured_again(few: Callable[..., list[Plan]]) -> None:
    seen: list[str] = []
    how = {"profile": True, "progress": lambda name, share: seen.append(name)}
    plans = few(2)
    compiled(**how, check=False)
    once = len(seen)
    compiled(**how)
    assert len(seen) == 2 * once > 0
    assert len(plans) == 2


def test_where_one_sample_is_too_much_none_is_compared(
    few: Callable[..., list[Plan]],
) -> None:
    plans = few(0)
    assert compiled().plan.unchecked.startswith("that would take about")
    assert len(plans) == 1


def test_what_it_says_is_added_and_what_it_warns_of_is_not_said_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Warns(Picture):
        def forward(self, x: Tensor) -> Tensor:
            print("warning: seen", file=sys.stderr)  # noqa: T201
            return super().forward(x)

    plan = replace(compiled(Warns(), check=False).plan, notes=["of the program"])
    assert "seen" in capsys.readouterr().err
    monkeypatch.setattr(
        gemsc.compiler, "first_step", lambda *_, **__: {"unchecked": ""}
    )
    few = Examples.of((X[:2],)), "two", {"loss": squares}
    traced_as = partial(trace, check=False)
    graphs = {"": traced_as(Warns(), (X,), loss=squares)}
    assert "seen" in capsys.readouterr().err
    fields = gemsc.compiler._smaller_step(plan, Warns(), *few, traced_as, graphs)
    assert fields["notes"][0] == "of the program"
    assert len(fields["notes"]) == 2
    assert capsys.readouterr().err == ""


def test_a_smaller_step_has_no_more_than_the_program_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = compiled(check=False).plan
    assert step_size.fewer(replace(plan, micro_batches=1)).micro_batches == 1
    heavy = replace(plan, activation_bytes=[10**10])
    monkeypatch.setattr(step_size, "free_memory", lambda: None)
    assert "GiB of memory" in step_size.too_much(heavy, Picture())
    assert step_size.too_much(heavy, Picture(), 0.01) == ""
    one = replace(plan, micro_batch_size=1)

    def sizes(plan: Plan) -> list[str]:
        examples = Examples.of((X[:1],))
        return [size for _, size in step_size.smaller(plan, Picture(), examples)]

    assert sizes(one) == []
    flops = sum(stage.flops for stage in plan.stages)
    monkeypatch.setattr(step_size, "_FLOPS_PER_SECOND", 1.0)
    monkeypatch.setattr(step_size, "MOST_SECONDS", 8 * 5 * flops)  # of 5 micro-batches
    assert sizes(one) == ["2 micro-batches of 1"]


def slow(*given: Any) -> Any:
    return pytest.param(*given, marks=pytest.mark.slow)


def split(plan: Plan) -> list[Any]:
    """Return all that a plan says of how a model is split."""
    names = "ranks", "blocks", "recompute", "offload", "grid", "trunk", "cut", "alone"
    rows = []
    for stage in plan.stages:
        whole = [group.names for group in stage.whole]
        forks = [(fork.join, fork.placed) for fork in stage.forks]
        rows.append([*(getattr(stage, name) for name in names), whole, forks])
    return [plan.schedule, plan.placement, plan.ranks, plan.data, rows]


@pytest.mark.parametrize(
    ("case", "options"),
    [
        slow(BRANCH_MODELS["mixture"], {"branches": "2"}),
        (SHARD_MODELS["features"], {"data": 2, "ranks": 4, "shard": "weights"}),
        slow(SHARD_MODELS["gpt"], {"schedule": "interleaved", "offload": "all"}),
        slow(SHARD_MODELS["gpt"], {"recompute": "all"}),
        slow(SHARD_MODELS["llama"], {"shards": "2", "data": 2, "ranks": 4}),
        slow(SHARD_MODELS["resnet"], {"tiles": "2x1,1", "shards": "1,2", "ranks": 4}),
    ],
)
def test_it_is_split_as_the_program_is(
    case: Case, options: dict[str, Any], few: Callable[..., list[Plan]]
) -> None:
    inputs, target = case.sample(6)
    given = {"loss": case.loss, "example_target": target, "micro_batches": COUNT}
    options = {"ranks": 2, **given, **options}
    model = case.build()
    plans = few(2)
    assert compile(model, inputs, **options).plan.unchecked == ""
    full, small = plans
    assert split(full) == split(small)
    assert (small.micro_batch_size, small.micro_batches) == (2, 2)


class Scaled(nn.Module):
    """Cut before the table by few samples, behind the columns by many."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.table = nn.Parameter(torch.randn(4, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        table = self.table.tanh()
        columns = x.unflatten(1, (4, 4)).amax(2)
        return columns @ table


def test_blocks_are_those_of_the_program(
    few: Callable[..., list[Plan]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def blocks(program: Program) -> list[list[str]]:
        return [[n.name for n in block.nodes] for block in program.blocks or ()]

    x = torch.randn(ROWS, 16)
    traced = [blocks(trace(Scaled(), (x[:n],), loss=squares).program) for n in (6, 2)]
    assert traced[0] != traced[1]
    options: dict[str, Any] = {"loss": squares, "ranks": 2, "micro_batches": COUNT}
    few(2)
    seen, compare = [], gemsc.compiler.first_step

    def seeing(compilation: Compilation, *given: Any, **how: Any) -> Any:
        seen.append(blocks(compilation.program))
        return compare(compilation, *given, **how)

    monkeypatch.setattr(gemsc.compiler, "first_step", seeing)
    assert compile(Scaled(), (x,), **options).plan.unchecked == ""
    assert seen == [traced[0], traced[0]]


class Asking(Picture):
    """Does something else with more than two samples, in training or evaluation."""

    def __init__(self, *, training: bool) -> None:
        super().__init__()
        self.asks = training

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 2 and self.training is self.asks:
            x = x.clamp(min=-1)
        return super().forward(x)


class Loop(Picture):
    """Does the same for each sample."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return torch.stack([part - part.mean() for part in x])


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    ("model", "is_compared"),
    [(Asking(training=True), 0), (Asking(training=False), 0), (Loop(), 1)],
)
def test_a_step_that_calls_something_else_is_none(
    model: nn.Module, is_compared: int, few: Callable[..., list[Plan]]
) -> None:
    plans = few(2)
    plan = compiled(model).plan
    assert len(plans) == 1 + is_compared
    assert plan.unchecked[:5] == ("" if is_compared else "that ")


def contrast(output: Tensor) -> Tensor:
    rows = output.flatten(1)
    return nn.functional.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


@pytest.mark.slow(1)
@pytest.mark.parametrize(("rows", "is_compared"), [(2, True), (1, False)])
def test_without_gradients_nothing_is_compared(
    rows: int, is_compared: bool, few: Callable[..., list[Plan]]
) -> None:
    options: dict[str, Any] = {"loss": contrast, "ranks": 2, "micro_batches": COUNT}
    plans = few(rows)
    plan = compile(Picture(), (X,), **options).plan
    assert [p.micro_batch_size for p in plans] == [ROWS, rows]
    assert plan.unchecked[:5] == ("" if is_compared else "that ")


def test_the_shape_of_fewest_samples_decides(
    few: Callable[..., list[Plan]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its 2 of 4 samples are more of a step than 2 of 16."""
    x = [(torch.randn(16, 3, 8, 6),), (torch.randn(4, 3, 16, 12),)]
    options: dict[str, Any] = {"loss": squares, "ranks": 2, "micro_batches": COUNT}
    model = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1)
    program = compile(nn.Sequential(*model), x, **options, check=False)
    plans = few(2, program.plan)
    flops = sum(stage.flops for stage in program.plan.stages)
    seconds = 8 * 2 * 2 * flops  # of two micro-batches of each
    monkeypatch.setattr(step_size, "MOST_SECONDS", 0.3 * seconds)
    plan = compile(nn.Sequential(*model), x, **options).plan
    assert plan.unchecked == ""
    assert plan.notes[-1].endswith("2 micro-batches of 1")
    assert [shape.micro_batch_size for shape in plans[1].shapes] == [1, 1]


class Net(nn.Module):
    """A small U-Net for pictures of any size, with a number for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.c = nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        x = self.a(x).relu() * scale[:, None, None]
        small = self.b(F.max_pool2d(x, 2)).relu()
        return self.c(torch.cat([x, F.interpolate(small, scale_factor=2)], 1) * 0.5)


def pictures(size: int, rows: int = ROWS) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 3, size, 2 * size, generator=generator)
    inputs = x, torch.rand(rows, 1, generator=generator)
    target = torch.rand(rows, 2, size, 2 * size, generator=generator)
    return {"example_inputs": inputs, "example_target": target, "loss": nn.MSELoss()}


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    "options",
    [{}, {"tiles": "2x1"}, slow({"data": 2, "ranks": 4})],
)
def test_samples_are_smaller_where_one_is_too_much(
    options: dict[str, Any], few: Callable[..., list[Plan]]
) -> None:
    options = {"ranks": 2, "micro_batches": COUNT, **pictures(96), **options}
    plans = few(0.5)
    plan = compile(Net(), **options).plan
    assert plan.unchecked == ""
    assert plan.notes[-1].endswith("in a step of 2 micro-batches of 2, of 3 x 32 x 64")
    full, small = plans
    assert split(full) == split(small)
    assert (small.micro_batch_size, small.micro_batches) == (2, 2)


def test_targets_of_half_the_resolution_are_smaller_too(
    few: Callable[..., list[Plan]],
) -> None:
    given: dict[str, Any] = {"ranks": 2, "micro_batches": COUNT, "loss": nn.MSELoss()}
    given["example_target"] = torch.rand(ROWS, 2, 48, 64)
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 2, stride=2)
    model, x = nn.Sequential(*layers), torch.randn(ROWS, 3, 96, 128)
    few(0.9)
    plan = compile(model, (x,), **given).plan
    assert plan.unchecked == ""
    assert plan.notes[-1].endswith("2 micro-batches of 2, of 3 x 64 x 64")


@pytest.mark.parametrize(("rows", "size"), [(0.5, " 3 x 32 x 64"), (0.2, "")])
def test_a_norm_of_one_place_needs_another(
    rows: float, size: str, few: Callable[..., list[Plan]]
) -> None:
    layers = nn.Conv2d(3, 4, 32, stride=32), nn.InstanceNorm2d(4), nn.Conv2d(4, 2, 1)
    given = nn.Sequential(*layers), (torch.randn(ROWS, 3, 96, 128),)
    options: dict[str, Any] = {"ranks": 2, "micro_batches": COUNT, "loss": squares}
    few(rows)
    plan = compile(*given, **options).plan
    assert "".join(plan.notes).rpartition(",")[2] == (f" of{size}" if size else "")


def test_what_is_wrong_in_smaller_samples_is_refused(
    few: Callable[..., list[Plan]], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"ranks": 2, "micro_batches": COUNT, **pictures(64)}
    few(0.9)

    write_wrong_files(monkeypatch)
    with pytest.raises(InternalError, match="wrong program"):
        compile(Net(), **options)


@pytest.mark.slow
def test_smaller_samples_of_several_shapes_still_have_several(
    few: Callable[..., list[Plan]], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = [(torch.randn(ROWS, 3, size, size),) for size in (64, 96)]
    given = {"loss": squares, "ranks": 2, "micro_batches": COUNT}
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    plans = few(1.9)
    plan = compile(model, x, **given).plan
    assert plan.notes[-1].endswith("of 2, of 3 x 32 x 32 and 3 x 64 x 64")
    assert [shape.name for shape in plans[1].shapes] == ["32x32", "64x64"]
    monkeypatch.setattr(step_size, "SOON", 0.0)  # 32 x 32 both would take least
    assert compile(model, x, **given).plan.notes == plan.notes
    plans = few(1.2)  # 32 x 32 both
    assert compile(model, x, **given).plan.unchecked.startswith("that would take")
    assert len(plans) == 1


def test_a_step_that_was_compared_is_not_compared_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def much(plan: Plan, *given: Any, **how: Any) -> str:
        return "less memory is free now" * (plan.micro_batches == COUNT)

    monkeypatch.setattr(step_size, "too_much", much)
    plan = compiled().plan
    assert plan.unchecked == ""
    assert plan.notes == []


class Reader(nn.Module):
    """Reads texts of any length whose words have 64 numbers; or looks at a place."""

    def __init__(self, place: int | None = None, width: int = 64) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, 8), nn.Linear(8, 4)
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        output = self.b(self.a(x).tanh())
        if self.place is not None:
            output = output + x[:, self.place, :4, None].transpose(1, 2)
        return output


@pytest.mark.parametrize(("place", "is_compared"), [(None, True), (100, False)])
def test_each_size_is_made_smaller_alone_where_all_cannot_be(
    place: int | None, is_compared: bool, few: Callable[..., list[Plan]]
) -> None:
    x = torch.randn(ROWS, 128, 64)
    given = {"loss": squares, "ranks": 2, "micro_batches": COUNT}
    plans = few(0.9)
    plan = compile(Reader(place), (x,), **given).plan
    assert len(plans) == 1 + is_compared
    if is_compared:
        assert plan.notes[-1].endswith("micro-batches of 2, of 32 x 64")
    else:
        assert plan.unchecked.startswith("that would take about")


class Chooses(nn.Module):
    """Takes words at places that are numbers of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(9, 8), nn.Linear(8, 4)

    def forward(self, words: Tensor, places: Tensor) -> Tensor:
        output = self.out(self.words(words))
        return output[torch.arange(len(words))[:, None], places]


def test_a_model_that_fails_on_smaller_samples_is_not_compared(
    few: Callable[..., list[Plan]],
) -> None:
    inputs = torch.randint(9, (ROWS, 128)), torch.full((ROWS, 3), 100)
    given = {"loss": squares, "ranks": 2, "micro_batches": COUNT}
    plans = few(0.9)
    plan = compile(Chooses(), inputs, **given).plan
    assert len(plans) == 2
    assert plan.unchecked.startswith("that would take about")


def test_samples_are_as_small_as_takes_little_time(
    few: Callable[..., list[Plan]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def shapes(rows: int = 1, size: int = 512) -> list[str]:
        given = pictures(size, rows)
        examples = Examples.of(given["example_inputs"], given["example_target"])
        tried = step_size.smaller(replace(plan, micro_batch_size=rows), Net(), examples)
        return [size.partition(", of ")[2] for _, size in tried]

    options = {"ranks": 2, "micro_batches": COUNT, **pictures(64)}
    program = compile(Net(), **options, check=False)
    plan = program.plan
    few(ROWS / 4, program.plan)  # a quarter of a step of one row
    most = step_size.MOST_SECONDS
    assert shapes()[0] == "3 x 256 x 512"
    monkeypatch.setattr(step_size, "SOON", 0.3 * most)
    assert shapes()[0] == "3 x 128 x 256"
    monkeypatch.setattr(step_size, "SOON", 0.0)  # if nothing takes so little
    assert shapes()[0] == "3 x 32 x 32"
    assert shapes(1, 40) == []  # 80 would be 48
    assert shapes(1, 31) == []


def test_what_is_tried_stands_in_order(few: Callable[..., list[Plan]]) -> None:
    def sizes(*inputs: Any) -> list[str]:
        tried = step_size.smaller(program.plan, Net(), Examples.of(*inputs))
        return [size.removeprefix("2 micro-batches of ") for _, size in tried]

    program = compiled(check=False)
    long, short = torch.ones(ROWS, 128, 512), torch.ones(ROWS, 128)
    few(1, program.plan)
    assert sizes((long,)) == ["1"]
    few(0.5, program.plan)
    expected = ["64 x 256", "128 x 128", "32 x 512", "32 x 512"]
    assert sizes((long,)) == [f"2, of {size}" for size in expected]
    assert sizes((long, short))[0] == "2, of 32 x 128"  # half of `short` is too much


def test_the_shape_of_most_samples_says_how_many(
    few: Callable[..., list[Plan]], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = [(X[:4],), (X[:1, :, :4],)]
    options = {"loss": squares, "ranks": 2, "micro_batches": COUNT, "check": False}
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1)
    program = compile(nn.Sequential(*layers), x, **options)
    few(2, program.plan)
    most = step_size.MOST_SECONDS
    monkeypatch.setattr(step_size, "MOST_SECONDS", 4 * most)  # 2 shapes, 2 of 4 samples
    (step,) = step_size.smaller(program.plan, Net(), Examples.of(x))
    assert step[1] == "2 micro-batches of 2"


def test_free_memory_is_what_all_groups_of_processes_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(folder: Path, texts: dict[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text)

    monkeypatch.setattr(step_size, "_GROUPS", tmp_path)
    stat = {"memory.stat": "anon 5\ninactive_file 20\n", "memory.current": "50"}
    write(tmp_path / "job" / "step", stat | {"memory.max": "max"})
    write(tmp_path / "job", stat | {"memory.max": "100"})
    old = {"memory.limit_in_bytes": "70", "memory.usage_in_bytes": "30"}
    write(tmp_path / "memory", old | {"memory.stat": "total_inactive_file 4"})
    left = step_size._left_to_groups
    assert list(left(["0::/job/step"])) == [70]
    assert list(left(["9:cpu,memory:/docker/x", "8:pids:/"])) == [44]
    assert list(left(["0::/", "8:pids:/"])) == []
    free = step_size.free_memory()
    if Path("/proc/meminfo").exists():
        assert free is not None
        assert free > 0


def test_a_step_needs_room_for_what_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, full = compiled(check=False).plan, SimpleNamespace(free=100)
    assert step_size.too_much(plan, Picture()) == ""
    monkeypatch.setattr(step_size.shutil, "disk_usage", lambda folder: full)
    assert step_size.too_much(plan, Picture()).startswith("that would take about 0 GiB")


class Game(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        self.d = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, z: Tensor) -> Tensor:
        return self.g(z)


@pytest.mark.slow
def test_phases_have_a_smaller_step_too(
    few: Callable[..., list[Plan]],
) -> None:
    def loss(net: Game, z: Tensor, target: Any) -> Tensor:
        return net.d(net.g(z)).square().mean()

    phases = [Phase(name, loss, train=name) for name in ("d", "g")]
    given = Game(), (torch.randn(ROWS, 4),)
    options: dict[str, Any] = {"ranks": 2, "micro_batches": COUNT, "phases": phases}
    plans = few(2)
    assert compile(*given, **options).plan.unchecked == ""
    assert [(p.micro_batch_size, p.variants) for p in plans] == [
        (ROWS, ["d", "g"]),
        (2, ["d", "g"]),
    ]


def test_an_example_is_cut_where_it_has_samples() -> None:
    inputs = {
        "x": X,
        "pairs": [torch.ones(ROWS), torch.ones(3)],
        "scale": torch.ones(()),
    }
    fewer, target = Examples.of(inputs, (torch.arange(ROWS), "name")).few(2).given
    assert torch.equal(fewer["x"], X[:2])
    assert [len(part) for part in fewer["pairs"]] == [2, 3]
    assert fewer["scale"].dim() == 0
    whole, _ = (
        Examples.of({"x": X, "mask": torch.ones(8, 8)}).few(9, {8: 3, ROWS: 5}).given
    )
    assert [tuple(part.shape) for part in whole.values()] == [(ROWS, 3, 3, 5), (3, 3)]
    assert target[0].tolist() == [0, 1]
    assert target[1] == "name"
    shapes = [(torch.ones(1, 9),), (torch.ones(4, 3),)]
    fewer, target = Examples.of(shapes, [torch.ones(1), torch.ones(4)]).few(2).given
    assert [tuple(given[0].shape) for given in fewer] == [(1, 9), (2, 3)]
    assert [len(part) for part in target] == [1, 2]


@pytest.mark.parametrize(
    ("shape", "smaller"),
    [
        ([512, 256], [96, 48]),
        ([16, 512, 256], [16, 96, 48]),
        ([5, 128, 64], [5, 24, 12]),
        ([16, 8], [3, 2]),
        ([8, 4], [8, 4]),  # less than a 32nd
        ([64], [64]),  # of one dimension: classes
    ],
)
def test_a_target_is_cut_as_its_input_is(shape: list[int], smaller: list[int]) -> None:
    given = (torch.ones(2, 512, 256), torch.ones(128, 64)), torch.ones(2, *shape)
    inputs, target = Examples.of(*given).few(1, {512: 96, 256: 48, 300: 1}).given
    assert [tuple(tensor.shape) for tensor in inputs] == [(1, 96, 48), (128, 64)]
    assert [*target.shape] == [1, *smaller]


def test_the_last_size_of_an_oblong_is_half_as_small() -> None:
    given = torch.ones(2, 512, 80), torch.ones(2, 512, 3), torch.ones(512)
    examples = Examples.of(given, torch.ones(2, 128, 20))
    inputs, target = examples.few(1, {512: 96, 80: 48}, is_oblong=True).given
    shapes = [tuple(tensor.shape) for tensor in (*inputs, target)]
    assert shapes == [(1, 96, 80), (1, 96, 3), (96,), (1, 24, 20)]
