"""Modules whose forward depends on data: whole on one rank, and exact."""

from __future__ import annotations

import random
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from command_line import Gemsc, gemsc_here
from opaque_support import (
    EXACT,
    PICTURE,
    Around,
    D,
    Dropping,
    Expert,
    Gate,
    Net,
    X,
    compiled,
    made,
    worst,
)
from program_support import mse, on_ranks, written
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gemsc.compiler import compile, trace
from gemsc.errors import GemscError
from gemsc.frontend import record
from gemsc.ir import meta
from gemsc.ir.opaque import opaques


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if text in line)


# ------------------------------------------------------------ exactness


@pytest.mark.slow(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "mast"])
def test_modules_that_depend_on_data_are_trained_exactly(
    schedule: str, tmp_path: Path
) -> None:
    options = {"schedule": schedule, "micro_batches": 4}
    assert worst(tmp_path / "program", made(Net), **options) <= EXACT


@pytest.mark.slow
def test_copies_agree_on_experts_that_only_some_of_them_used(tmp_path: Path) -> None:
    """Adam moves a parameter whose gradient is zero, and not one that has none."""
    model = made(Net)
    with torch.no_grad():
        model.mixture.route.bias[1:3] = torch.tensor([-1e3, -0.5])  # one is never used
    assert worst(tmp_path / "program", model, ranks=4, data=2, micro_batches=2) <= EXACT
    fewer = worst(tmp_path / "second", model, data=2, micro_batches=1, ranks=2)
    assert fewer <= EXACT


@pytest.mark.slow
def test_blocks_that_depend_on_data_may_be_recomputed(tmp_path: Path) -> None:
    options = {"recompute": ("gate", "mixture")}
    assert worst(tmp_path / "program", made(Net), **options) <= EXACT


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.up = nn.Linear(D, D)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = x * 2
        y: Tensor = checkpoint(
            lambda h: torch.tanh(self.up(h)), x, use_reentrant=self.reentrant
        )
        return y


@pytest.mark.slow(1)
@pytest.mark.parametrize("reentrant", [True, False])
def test_modules_that_depend_on_data_may_have_checkpoints(
    reentrant: bool, tmp_path: Path
) -> None:
    model = Around(made(Checkpointed, reentrant))
    assert worst(tmp_path / "program", model) <= EXACT


class Picture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.gate = Gate(16)
        self.last = nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.gate(torch.relu(self.first(x)) - 0.25))


@pytest.mark.slow
def test_tiles_gather_what_depends_on_data(tmp_path: Path) -> None:
    model = made(Picture)
    options = {"tiles": ("2x1",), "blocks": (3,), "ranks": 2}
    error = worst(tmp_path / "program", model, PICTURE, PICTURE, **options)
    assert error <= EXACT
    target = {"loss": mse, "example_target": PICTURE}
    plan = compile(model, (PICTURE,), **target, tiles=("2x1",), ranks=2).plan
    assert [b["reason"] for b in plan.barriers] == ["its forward depends on data"]


class Loss(nn.Module):
    """The mean of the worst elements, how many there may be."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        errors = (output - target) ** 2
        return errors[errors > errors.mean()].mean()


def worst_errors(output: Tensor, target: Tensor) -> Tensor:
    return Loss()(output, target)


of_lambda = lambda output, target: worst_errors(output, target)  # noqa: E731


@pytest.mark.slow(1)
@pytest.mark.parametrize("loss", [of_lambda, worst_errors, Loss()])
def test_a_loss_may_depend_on_data(loss: Any, tmp_path: Path) -> None:
    model = Around(made(Expert))
    assert worst(tmp_path / "program", model, loss=loss) <= EXACT


def sum_and_count(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    errors = (output - target) ** 2
    hard = errors > errors.mean()
    return errors[hard].sum(), hard.float().sum()


def two_sums(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return Loss()(output, target), output.sum()


def test_the_count_of_a_loss_that_depends_on_data_is_known_from_numbers() -> None:
    options: dict[str, Any] = {"example_target": X, "ranks": 1}
    compile(nn.Linear(D, D), (X,), loss=sum_and_count, **options)
    with pytest.raises(GemscError, match="the loss's count depends on parameters"):
        compile(nn.Linear(D, D), (X,), loss=two_sums, **options)


@dataclass
class Result:
    picture: Tensor


class Output(dict[str, Tensor]):
    """As that of transformers: a dict with attributes."""

    __getattr__ = dict.__getitem__


class Gives(Around):
    kind: type = Result

    def forward(self, x: Tensor) -> Any:
        return self.kind(picture=super().forward(x))


class LossOfResult(Loss):
    def forward(self, output: Any, target: Tensor) -> Tensor:
        return super().forward(output.picture, target)


class LossOfTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Loss()

    def forward(self, output: Any, target: Tensor) -> Tensor:
        result: Tensor = self.inner(output.picture, target)
        return result


@pytest.mark.slow(1)
@pytest.mark.parametrize("kind", [Result, Output])
def test_a_loss_that_takes_an_object_gives_its_tensors_to_what_needs_data(
    kind: type, tmp_path: Path
) -> None:
    model = Gives(made(Expert))
    model.kind = kind
    options = {"ranks": 2, "example_target": X, "micro_batches": 2}
    with pytest.raises(GemscError, match="submodule, which then stays") as caught:
        compile(model, (X,), loss=LossOfResult(), **options)
    assert caught.value.at is not None
    assert f"takes a value of type {kind.__name__}: let a submod" in str(caught.value)
    with pytest.raises(GemscError, match="make the loss a torch"):
        compile(model, (X,), loss=lambda *given: LossOfResult()(*given), **options)
    compiled = compile(model, (X,), loss=LossOfTensor(), **options)
    assert not compiled.plan.unchecked


class Spoken(nn.Module):
    """A layer of torch that looks at tensors of lengths, two classes at three times."""

    def __init__(self) -> None:
        super().__init__()
        self.ctc = nn.CTCLoss()

    def forward(self, output: Any, target: Tensor) -> Tensor:
        scores = output.picture.view(-1, 3, 2).log_softmax(-1).transpose(0, 1)
        times = torch.full((scores.shape[1],), 3)
        words, lengths = torch.ones(len(times), 1).long(), torch.ones_like(times)
        loss: Tensor = self.ctc(scores, words, times, lengths)
        return loss + target.mean()


def test_a_layer_of_torch_may_be_what_depends_on_data() -> None:
    model = Gives(made(Expert))
    program = compile(model, (X,), loss=Spoken(), example_target=X, ranks=2)
    assert [*opaques(program.compilation.program.module)] == ["_loss.ctc"]
    assert not program.plan.unchecked


class Sometimes(nn.Module):
    """Depends on data in one mode only."""

    def __init__(self, mode: bool) -> None:
        super().__init__()
        self.expert = Expert()
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        if self.training is self.mode and bool(x.mean() > 0):
            return -x
        out: Tensor = self.expert(x)
        return out


@pytest.mark.slow(1)
@pytest.mark.parametrize("mode", [True, False])
def test_what_is_whole_in_one_mode_is_so_in_both(mode: bool, tmp_path: Path) -> None:
    model = Around(made(Sometimes, mode))
    assert worst(tmp_path / "program", model) <= EXACT
    program = compiled(model, micro_batches=1)
    for traced in (program.compilation.program, program.compilation.evaluation):
        assert [*opaques(traced.module)] == ["inner"]
    program.write(tmp_path / "second")
    results = on_ranks(tmp_path / "second", 2, lambda t: t.evaluate(X, X))
    torch.testing.assert_close(results[1].output, model.eval()(X).detach())


class Normed(Gate):
    """A BatchNorm beside what depends on data, as in PointNet++."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Reading(Normed):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.norm.running_var


class Normalized(Normed):
    """Once more, by the statistics as they are now."""

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self.norm.running_mean, self.norm.running_var
        return F.batch_norm(super().forward(x), mean, variance)


class ReadingOnce(Normed):
    def forward(self, x: Tensor, reads: bool = False) -> Tensor:
        y = super().forward(x)
        return y * self.norm.running_var if reads else y


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = made(ReadingOnce)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.part(x, True), False)


@pytest.mark.slow
def test_the_backward_of_a_batchnorm_does_not_need_its_old_statistics(
    tmp_path: Path,
) -> None:
    """Not even where several micro-batches are in flight."""
    model = nn.Sequential(made(Normed), nn.Tanh(), nn.Linear(D, D))
    assert worst(tmp_path / "program", model) <= EXACT
    changes = r"'0\.(part\.)?norm\.running_(mean|var)', and the back"
    for kind in (Normalized, CalledTwice, Reading):
        model = nn.Sequential(made(kind), nn.Tanh(), nn.Linear(D, D))
        with pytest.raises(GemscError, match=changes):
            compiled(model)
    with pytest.raises(GemscError, match="needs the value of a tensor") as caught:
        compiled(model, data=2)
    assert "in a small torch.nn.Module of its own" in str(caught.value.help)


class Severed(Gate):
    """No gradient comes out of one of the ways."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x.detach() * 2


@pytest.mark.slow(1)
@pytest.mark.parametrize("sign", [1, -1])
def test_gradients_flow_though_none_came_out_of_the_example(
    sign: int, tmp_path: Path
) -> None:
    model = Around(made(Severed))
    nn.init.zeros_(model.first.bias)  # its output changes sign with its input
    positive = bool(torch.tanh(model.first(X)).sum() > 0)
    example = X * sign if positive else -X * sign
    assert model.inner(torch.tanh(model.first(example))).requires_grad is (sign > 0)
    assert worst(tmp_path / "program", model, example, micro_batches=8) <= EXACT


class Long(nn.Module):
    """Nothing before the gate gets a gradient in a step of negative inputs."""

    def __init__(self, inner: nn.Module, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.second, self.last = layer(), layer(), layer()
        self.inner = inner
        for early in (self.first, self.second):
            for name, parameter in early.named_parameters():
                nn.init.constant_(parameter, 0.1 if name == "weight" else 0.0)

    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.last(self.inner(x))


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    "options",
    [
        {"ranks": 4},
        {"ranks": 6, "data": 2, "micro_batches": 2},
        {"ranks": 2, "schedule": "mast", "micro_batches": 2},
        {"ranks": 3, "schedule": "zb-h1"},
        {"ranks": 4, "recompute": ("first", "second")},
    ],
)
def test_parameters_without_a_gradient_in_a_whole_step_have_none(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Adam goes on to move a parameter whose gradient is zero."""
    model = Long(made(Severed), lambda: nn.Linear(D, D))
    assert (
        worst(tmp_path / "program", model, X.abs(), change=torch.abs, **options)
        <= EXACT
    )


@pytest.mark.slow
def test_shared_parameters_without_a_gradient_have_none(tmp_path: Path) -> None:
    model = Long(made(Severed), lambda: nn.Linear(D, D))
    model.second.weight = model.first.weight
    assert worst(tmp_path, model, X.abs(), change=torch.abs, ranks=4) <= EXACT


@pytest.mark.slow(1)
@pytest.mark.parametrize("tiles", ["2x1", "2x1,1x1", "1x1,2x1", "2x2,2x1"])
def test_tiles_agree_on_a_gradient_that_is_absent(tiles: str, tmp_path: Path) -> None:
    model = Long(made(Severed, 16), lambda: nn.Conv2d(3, 3, 3, padding=1))
    grids = [prod(map(int, grid.split("x"))) for grid in tiles.split(",")]
    options = {
        "tiles": tuple(tiles.split(",")),
        "ranks": sum(grids),
        "blocks": (4,) if len(grids) == 1 else (2, 2),
        "change": torch.abs,
    }
    assert worst(tmp_path, model, PICTURE.abs(), PICTURE, **options) <= EXACT


# ----------------------------------------------------- what the files hold


class Router(nn.Module):
    """The size of what it gives depends on data."""

    def forward(self, x: Tensor) -> Tensor:
        return (x > 0).nonzero()  # the router


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.routers = nn.ModuleList([Router()])
        self.scale = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * self.routers[0](x).float().mean()


@pytest.mark.slow
def test_a_size_that_depends_on_data_moves_outwards(tmp_path: Path) -> None:
    model = Around(made(Routed))
    whole = opaques(record(model, (X,)).module)
    assert [*whole] == ["inner"]
    assert whole["inner"].at is not None
    assert whole["inner"].at.line == line_of("# the router")
    assert worst(tmp_path / "program", model) <= EXACT


def test_a_size_that_depends_on_data_at_the_top_is_refused() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = Router()

        def forward(self, x: Tensor) -> Tensor:
            return x * self.router(x).float().mean()

    with pytest.raises(GemscError, match="size of this tensor depends") as caught:
        record(Model(), (X,))
    assert caught.value.at is not None
    assert caught.value.at.line == line_of("# the router")
    text = r"'router' cannot stay whole: it returns int64\[\d+, 2\] for one batch and"
    assert re.search(text, str(caught.value))


class Hard(nn.Module):
    """Gives as many rows as there are large numbers, whatever their sign."""

    def forward(self, x: Tensor) -> Tensor:
        count = int((x.abs() > x.abs().mean()).sum())
        return x[:1].expand(count, -1)


class Overwriting(nn.Module):
    clones = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone() if self.clones else x
        return x.mul_(2) if x.sum() > 0 else x.mul_(3)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(D, D, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(x.argmax(1)) * (2 if x.sum() > 0 else 3)


@pytest.mark.parametrize(
    ("inner", "why"),
    [
        (Hard, "it returns .* for one batch and .* for another"),
        (Table, r"the gradient of 'rows\.weight' is sparse"),
    ],
)
def test_what_cannot_stay_whole_is_refused(inner: Any, why: str) -> None:
    with pytest.raises(GemscError, match=f"'inner' cannot stay whole: {why}"):
        record(Around(made(inner)), (X,), loss=lambda output: output.mean())


class Skipping(Gate):
    """A gate that draws whether it is there; no rank seeds such draws."""

    def __init__(self, rate: float, *, by_numpy: bool = False) -> None:
        super().__init__()
        self.rate, self.by_numpy = rate, by_numpy

    def forward(self, x: Tensor) -> Tensor:
        gated = super().forward(x)
        draw = np.random.rand() if self.by_numpy else random.random()
        return x if draw < self.rate else gated


@pytest.mark.parametrize("by_numpy", [False, True])
def test_draws_of_python_and_numpy_that_decide_are_refused(by_numpy: bool) -> None:
    before = random.getstate()
    for rate in (1e-9, 1 - 1e-9):  # no run of a step would show it
        with pytest.raises(GemscError, match="'inner' cannot stay whole: it draws"):
            record(Around(Skipping(rate, by_numpy=by_numpy)), (X,))
    assert random.getstate() == before


def test_a_draw_of_python_that_decides_nothing_may_stay() -> None:
    program = record(Around(Skipping(0.0)), (X,))
    assert [*opaques(program.module)] == ["inner"]


def test_what_cannot_stay_whole_does_not_depend_on_what_was_drawn_before() -> None:
    for seed in range(12):  # one draw gave the same size for one seed in eight
        torch.manual_seed(seed)
        with pytest.raises(GemscError, match="'inner' cannot stay whole"):
            record(Around(Hard()), (X,), loss=lambda output: output.mean())


def test_an_input_that_is_changed_is_refused_and_a_clone_of_it_is_not() -> None:
    inner = Overwriting()
    first = nn.Sequential(OrderedDict(inner=inner, last=nn.Linear(D, D)))
    for model in (first, Around(inner)):
        inner.clones = False
        with pytest.raises(GemscError, match="'inner' cannot stay whole: it changes"):
            record(model, (X,))
        inner.clones = True
        assert [*opaques(record(model, (X,)).module)] == ["inner"]


class Outside(nn.Module):
    """Takes the values to NumPy."""

    def forward(self, x: Tensor) -> Tensor:
        order = x.detach().sum(1).numpy().argsort()
        return x[torch.from_numpy(order)]


def test_a_module_that_works_in_numpy_stays_whole(tmp_path: Path) -> None:
    assert worst(tmp_path / "program", Around(Outside())) <= EXACT


@torch.library.custom_op("gemsc_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    if x.dtype is not torch.bfloat16:  # as that of a grouped matrix product
        raise RuntimeError("expected BF16")
    return torch.empty_like(x)


doubled.register_autograd(lambda ctx, gradient: gradient * 2)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return doubled(x)


@pytest.mark.slow
def test_what_pytorch_cannot_compute_without_numbers_stays_whole(
    tmp_path: Path,
) -> None:
    assert worst(tmp_path / "program", Around(Doubled())) <= EXACT


def test_a_model_that_runs_is_not_said_to_fail() -> None:
    class Top(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            return doubled(self.layer(x))

    told = "PyTorch computes this, but not without numbers: RuntimeError: expected BF16"
    with pytest.raises(GemscError, match=told) as caught:
        record(Top(), (X,))
    assert "move it into a submodule" in str(caught.value)


def test_a_loss_that_fails_is_said_to_fail() -> None:
    with pytest.raises(GemscError, match=r"the loss fails on float32 \[.*\]: Runt"):
        record(nn.Linear(D, D), (X,), loss=lambda output: output @ output)


@pytest.mark.slow
def test_only_the_innermost_module_stays_whole() -> None:
    model = nn.Sequential(made(Net), made(Net))
    whole = opaques(record(model, (X,)).module)
    names = ["gate", "mixture"]
    assert [*whole] == [f"{i}.{name}" for i in range(2) for name in names]
    assert all(whole[path].module is model.get_submodule(path) for path in whole)


# -------------------------------------------------- what is known of it


class Always(Expert):
    """The same as an expert, behind a branch that is always taken."""

    def forward(self, x: Tensor) -> Tensor:
        if x.isfinite().all():
            return super().forward(x)
        return x


@pytest.mark.slow
def test_bytes_and_operations_are_those_of_the_same_layers_in_the_open() -> None:
    facts = []
    for cls in (Expert, Always):
        program = trace(Around(made(cls)), (X,), loss=mse, example_target=X).program
        inner = [
            meta.facts(node)
            for node in program.compute_nodes
            if meta.module_path(node) == "inner" or node.target == "inner"
        ]
        facts.append(inner)
    opened, (whole,) = facts
    assert whole.flops == sum(fact.flops for fact in opened)
    assert whole.saved_bytes == sum(fact.saved_bytes for fact in opened)
    backward = sum(fact.backward_seconds for fact in opened)
    assert whole.backward_seconds == pytest.approx(backward, rel=0.2)
    forward = sum(fact.forward_seconds for fact in opened)
    assert forward < whole.forward_seconds < 3 * forward  # and the branch


class Rarely(Dropping):
    """Draws for data that are not those of the examples."""

    def forward(self, x: Tensor) -> Tensor:
        is_large = bool(x.detach().abs().max() > 1e9)
        return super().forward(x) if is_large else x * 1.0


@pytest.mark.slow(1)
@pytest.mark.parametrize("inner", [Dropping, Rarely])
def test_random_numbers_inside_have_the_seed_of_the_stage(inner: Any) -> None:
    """Without it, replicas draw the same ones: all ranks' generators are alike."""
    text = "".join(compiled(Around(inner()), check=False).rank_modules().values())
    assert text.count("draws_random_numbers = True") == 1


def test_a_branch_that_gives_another_shape_is_refused_when_it_is_sent(
    tmp_path: Path,
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(D, D)
            self.cut = Cut()
            self.last = nn.Linear(D, D)

        def forward(self, x: Tensor) -> Any:
            return self.last(self.cut(self.first(x)))

    written(
        tmp_path / "program", Model(), (X,), target=X, micro_batches=1, blocks=(1, 1)
    )
    with pytest.raises(GemscError, match=r"has shape \[4, 6\] for this micro-batch"):
        on_ranks(tmp_path / "program", 2, lambda t: t.step(X + 1e6, X))


class Cut(nn.Module):
    """Fewer rows for numbers that no example has."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:4] if x.abs().max() > 1e4 else x


# ------------------------------------------------------------- the command

MODEL = """\
import torch
from torch import nn
from parts import Gate


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.gate = Gate(4)
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.gate(torch.tanh(self.first(x))))


model = Net
loss = nn.MSELoss()


def example_inputs():
    return (torch.randn(4, 4),)


def example_target():
    return torch.randn(4, 4)


def dataset():
    return torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 4))
"""
PARTS = """\
from torch import nn


class Gate(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, width)

    def forward(self, x):
        if x.sum() > 0:
            return self.up(x)
        return -x
"""


gemsc = pytest.fixture(gemsc_here)


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.usefixtures("engine")
def test_the_command_reports_and_verifies_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gemsc: Gemsc,
    pytestconfig: pytest.Config,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "parts.py").write_text(PARTS)
    outcome = gemsc("compile", "model.py", "-o", "program")
    assert outcome.code == 0, outcome.err
    note = (
        "note: parts.py:10: 'gate' stays whole on stage 0: forward needs the value of "
        "a tensor, which differs from step to step; its time and memory are those of "
        "one real run on example_inputs"
    )
    assert note in " ".join(outcome.out.split())
    assert note in " ".join(gemsc("show", "program").out.split())
    if pytestconfig.getoption("--nightly"):
        outcome = gemsc("verify", "program", "--dtype", "float64", "--steps", "2")
        assert outcome.code == 0, outcome.err
        assert re.search(r"float64: worst \S+, allowed 1e-09: exact\n", outcome.out)
    (tmp_path / "parts.py").write_text(PARTS.replace("return -x", "return x"))
    outcome = gemsc("run", "program")
    assert outcome.code == 1
    assert "parts.py: Gate" in outcome.err


@pytest.mark.slow
def test_the_note_names_all_stages_that_call_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gemsc: Gemsc
) -> None:
    monkeypatch.chdir(tmp_path)
    calls = "self.gate(self.last(self.gate(torch.tanh(self.first(x)))))"
    text = MODEL.replace("self.last(self.gate(torch.tanh(self.first(x))))", calls)
    (tmp_path / "model.py").write_text(text)
    (tmp_path / "parts.py").write_text(PARTS)
    outcome = gemsc("compile", "model.py", "--cuts", "last", "-o", "program")
    assert outcome.code == 0, outcome.err
    assert "'gate' stays whole on stages 0, 1: " in " ".join(outcome.out.split())


class OnlyTrains(Gate):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            raise ValueError("I have not been prepared")
        return super().forward(x)


class Prepares(nn.Module):
    """Fails in evaluation, though not without numbers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.gate = inner, Gate()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(self.gate(x))
        return out


@pytest.mark.slow(1)
@pytest.mark.parametrize("inner", [OnlyTrains(), Prepares(OnlyTrains())])
def test_a_model_that_fails_in_evaluation_is_said_to(inner: nn.Module) -> None:
    says = r"the model fails .*in evaluation mode.*: ValueError: I have not been"
    with pytest.raises(GemscError, match=says) as caught:
        compiled(Around(inner))
    assert caught.value.at is not None
