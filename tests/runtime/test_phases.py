"""Phases: several updates of a step equal those of one process, whatever splits it."""

from __future__ import annotations

import copy
import functools
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from command_line import gemsc_here
from models import pix2pix
from nightly import at_night
from program_support import on_ranks
from torch import Tensor, nn

import gemsc.lowering.variants
from gemsc import Phase
from gemsc.compiler import compile, lower, trace, trace_all
from gemsc.errors import GemscError
from gemsc.options import CompileOptions
from gemsc.runtime.training.callbacks import Callback, Ema
from gemsc.runtime.training.step_report import StepReport
from gemsc.runtime.training.trainer import Trainer
from gemsc.verify.one_process import reference_steps
from gemsc.weights.read import pasted

SIZE = 8
SAMPLES = 2  # of a micro-batch
MICRO_BATCHES = 4


class Gan(nn.Module):
    """A generator with statistics, a discriminator with some, and a clock."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.make = nn.Sequential(
                nn.Conv2d(1, 4, 3, padding=1, bias=False),
                nn.BatchNorm2d(4),
                nn.ReLU(),
                nn.Conv2d(4, 4, 3, padding=1),
                nn.Tanh(),
                nn.Conv2d(4, 2, 1),
            )
            self.judge = nn.Sequential(
                nn.Conv2d(3, 4, 3, stride=2, padding=1),
                nn.LeakyReLU(0.2),
                nn.Conv2d(4, 8, 3, padding=1, bias=False),
                nn.BatchNorm2d(8),
                nn.LeakyReLU(0.2),
                nn.Conv2d(8, 1, 3, padding=1),
            )

    def forward(self, grey: Tensor) -> Tensor:
        return self.make(grey)


def judged(model: Any, grey: Tensor, colour: Tensor, real: float) -> Tensor:
    return (model.judge(torch.cat((grey, colour), 1)) - real).square().mean()


def d_loss(model: Any, grey: Tensor, colour: Tensor) -> Tensor:
    with torch.no_grad():
        made = model(grey)
    return judged(model, grey, colour, 1) + judged(model, grey, made, 0)


def g_loss(model: Any, grey: Tensor, colour: Tensor) -> Tensor:
    made = model(grey)
    return judged(model, grey, made, 1) + F.mse_loss(made, colour)


adam = partial(torch.optim.Adam, lr=0.01)
halved = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
PHASES = (
    Phase("d", d_loss, "judge", adam, halved),
    Phase("g", g_loss, "make", adam),
)
INPUTS = (torch.rand(SAMPLES, 1, SIZE, SIZE, dtype=torch.float32),)
TARGET = torch.rand(SAMPLES, 2, SIZE, SIZE, dtype=torch.float32)


def batches(count: int, copies: int = 1) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    size = SAMPLES * MICRO_BATCHES * copies
    shapes = (size, 1, SIZE, SIZE), (size, 2, SIZE, SIZE)
    return [
        tuple(torch.rand(shape, generator=generator).double() for shape in shapes)
        for _ in range(count)
    ]


def in_one_process(
    model: nn.Module,
    data: list[tuple[Tensor, Tensor]],
    phases: tuple[Phase, ...] = PHASES,
    clip_norm: float | None = None,
    norms: list[float] | None = None,
    accumulate: int = 1,
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Return the losses of each step and the state after the last, in float64.

    `norms` gets those of the gradients of the last phase of each step.
    """
    model = copy.deepcopy(model).double().train()
    named = dict(model.named_parameters())
    made = {}
    for phase in phases:
        weights = {n: p for n, p in named.items() if n.startswith(f"{phase.train}.")}
        optimizer = phase.optimizer(weights.items())
        scheduler = phase.scheduler and phase.scheduler(optimizer)
        made[phase.name] = weights, optimizer, scheduler
    losses: list[dict[str, float]] = []
    waiting: dict[str, Tensor | None] = {}  # gradients of steps without an update
    for step, (inputs, target) in enumerate(data):
        losses.append({})
        for phase in phases:
            if step % phase.every:
                continue
            weights, optimizer, scheduler = made[phase.name]
            for name, parameter in named.items():
                parameter.requires_grad_(name in weights)
                parameter.grad = waiting.pop(name, None) if name in weights else None
            count = len(inputs) // SAMPLES
            for x, y in zip(inputs.split(SAMPLES), target.split(SAMPLES), strict=True):
                loss = phase.loss(model, x, y) / count
                (loss / accumulate).backward()
                total = losses[-1].get(phase.name, 0.0) + float(loss.detach())
                losses[-1][phase.name] = total
            if (step + 1) % accumulate:
                waiting |= {name: parameter.grad for name, parameter in weights.items()}
                continue
            limit = clip_norm or float("inf")
            norm = float(nn.utils.clip_grad_norm_(weights.values(), limit))
            if norms is not None:
                norms[len(losses) - 1 :] = [norm]
            optimizer.step()
            if scheduler:
                scheduler.step()
    return losses, model.state_dict()


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[dict[str, float]] = []

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        self.losses.append(dict(report.losses))


def trained(
    folder: Path,
    data: list[tuple[Tensor, Tensor]],
    ranks: int,
    phases: tuple[Phase, ...] = PHASES,
    **options: Any,
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Train a written program in float64; return its losses and its state."""

    def work(trainer: Trainer) -> Any:
        trainer.add_callbacks([losses := Losses()])
        for batch in data:
            trainer.step(*batch)
        state = {n: t.clone() for n, t in trainer.state_dict().items()}
        return losses.losses, state, trainer.worker.program.parts

    given = {"phases": phases, "dtype": torch.float64, **options}
    of_ranks = on_ranks(folder, ranks, work, **given)
    first: dict[tuple[str, Any], Tensor] = {}
    for _, state, parts in of_ranks:
        for name, tensor in state.items():  # replicas hold the same
            assert torch.equal(
                first.setdefault((name, parts.get(name)), tensor), tensor
            )
    return of_ranks[0][0], pasted((state, parts) for _, state, parts in of_ranks)


def assert_same(actual: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    for ours, theirs in zip(actual[0], expected[0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-10)
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-7, atol=1e-9)


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    "options",
    [
        {"ranks": 2},
        {"ranks": 2, "schedule": "mast"},
        {"ranks": 3, "schedule": "zb-h1", "clip_norm": 0.05},
        {"ranks": 2, "schedule": "interleaved", "recompute": ("all",)},
        {"ranks": 2, "tiles": ("2x1",)},
        {"ranks": 3, "tiles": ("2x1", "1"), "cuts": ("judge.0",), "schedule": "gpipe"},
        {"ranks": 4, "data": 2, "shard": "optimizer", "clip_norm": 0.05},
        {"ranks": 2, "shards": ("2",)},
        {"ranks": 3, "shards": ("2", "1"), "cuts": ("judge.0",), "clip_norm": 0.05},
        {"ranks": 4, "tiles": ("2x1",), "shards": ("2",)},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_phases_equal_one_process(options: dict[str, Any], tmp_path: Path) -> None:
    clip = options.pop("clip_norm", None)
    model = Gan()
    program = compile(
        *(model, INPUTS),
        example_target=TARGET,
        phases=PHASES,
        micro_batches=MICRO_BATCHES,
        **options,
    )
    assert program.plan.unchecked == ""  # its first step was run, and is right
    program.write(tmp_path)
    data = batches(3, options.get("data", 1))
    actual = trained(tmp_path, data, options["ranks"], clip_norm=clip)
    assert_same(actual, in_one_process(model, data, clip_norm=clip))


@functools.cache
def traced() -> Any:
    """Return the graphs of both phases, for programs that are compared later."""
    given: Any = {"loss": None, "example_target": TARGET, "phases": PHASES}
    traced_as = functools.partial(trace, check=False, constants={})
    return trace_all(traced_as, Gan(), INPUTS, **given)


def written(folder: Path, phases: tuple[Phase, ...] = PHASES, **options: Any) -> Gan:
    """Write a program whose first step is not run: tests compare its steps."""
    model = Gan()
    given = {"ranks": 2, "micro_batches": MICRO_BATCHES, **options}
    if phases is PHASES:
        lower(traced(), CompileOptions(**given)).write(folder)
    else:
        target = {"example_target": TARGET, "phases": phases, "check": False}
        compile(model, INPUTS, **target, **given).write(folder)
    return model


@pytest.mark.slow
def test_a_phase_that_is_seldom_due(tmp_path: Path) -> None:
    phases = replace(PHASES[0], every=2), PHASES[1]
    model = written(tmp_path, phases)
    data = batches(4)
    actual = trained(tmp_path, data, 2, phases)
    assert [[*losses] for losses in actual[0]] == [["d", "g"], ["g"], ["d", "g"], ["g"]]
    assert_same(actual, in_one_process(model, data, phases))


@pytest.mark.slow
def test_averages_follow_the_updates_of_all_phases(tmp_path: Path) -> None:
    phases = PHASES[0], replace(PHASES[1], every=2)
    written(tmp_path, phases)

    def work(trainer: Trainer) -> None:
        trainer.add_callbacks([ema := Ema(0.5)])
        expected: dict[str, Tensor] = {}
        for batch in batches(3):
            trainer.step(*batch)
            for name, weight in trainer.stages.parameters.items():
                before = expected.get(name, weight.detach())
                expected[name] = before.lerp(weight.detach(), 0.5)
        assert ema.count == 3
        torch.testing.assert_close(ema.average, expected)

    on_ranks(tmp_path, 2, work, phases=phases, dtype=torch.float64)


def test_a_phase_that_is_not_finite_is_named_and_left_out(tmp_path: Path) -> None:
    def grey_loss(model: Any, grey: Tensor, colour: Tensor) -> Tensor:
        return judged(model, grey, model(grey), 1)

    phases = PHASES[0], Phase("g", grey_loss, "make", adam)
    written(tmp_path, phases)
    problems: list[Any] = []

    def work(trainer: Trainer) -> None:
        trainer.add_callbacks([reports := Reports()])
        before = {n: t.clone() for n, t in trainer.state_dict().items()}
        statistics = before.keys() - dict(trainer.stages.parameters).keys()
        (grey, colour), good = batches(2)
        trainer.step(grey, torch.full_like(colour, torch.nan))
        for name, tensor in trainer.state_dict().items():
            kept = torch.equal(tensor, before[name])
            assert kept == (not name.startswith("make")) or name in statistics, name
        trainer.step(*good)
        problems.append(reports.problems)

    given = {"phases": phases, "dtype": torch.float64, "on_nonfinite": "skip"}
    on_ranks(tmp_path, 2, work, **given)
    for first, second in problems:
        assert str(first).startswith("the loss of phase d is nan at step 1, in micro-")
        assert second is None


def test_what_is_saved_where_a_phase_failed_is_all_that_there_is(
    tmp_path: Path,
) -> None:
    written(tmp_path)

    def work(trainer: Trainer) -> bool:
        trainer.worker.use("g")  # in which a step has failed
        trainer.save(tmp_path / "run")
        before = {name: t.clone() for name, t in trainer.state_dict().items()}
        trainer.step(*batches(1)[0])
        trainer.resume(tmp_path / "run")
        now = trainer.state_dict()
        return all(torch.equal(now[name], tensor) for name, tensor in before.items())

    assert all(on_ranks(tmp_path, 2, work, phases=PHASES, dtype=torch.float64))


class Reports(Callback):
    def __init__(self) -> None:
        self.problems: list[Any] = []

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        self.problems.append(report.problem)


@pytest.mark.slow
def test_each_phase_draws_its_own_numbers(tmp_path: Path) -> None:
    def noise(model: Any, grey: Tensor, colour: Tensor) -> Tensor:
        made = model(grey)
        kept = F.dropout(made.detach() * 0 + 1, 0.5).sum()
        return kept + made.mean() + model.judge[0].bias.sum()

    phases = tuple(
        Phase(name, noise, train, partial(torch.optim.SGD, lr=0.0))
        for name, train in (("a", "judge"), ("b", "make"))
    )
    written(tmp_path, phases)
    losses, _ = trained(tmp_path, batches(2), 2, phases)
    drawn = [round(losses[step][name]) for step in (0, 1) for name in "ab"]
    assert len(set(drawn)) == 4


class Clock(Gan):
    """The time, which one phase counts, weighs the loss of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("time", torch.zeros(1))


def counting(model: Any, grey: Tensor, colour: Tensor) -> Tensor:
    model.time.add_(1.0)
    return d_loss(model, grey, colour)


def weighed(model: Any, grey: Tensor, colour: Tensor) -> Tensor:
    return g_loss(model, grey, colour) * torch.exp(-model.time).sum()


@pytest.mark.slow
def test_what_one_phase_changes_is_no_constant_of_another(tmp_path: Path) -> None:
    phases = replace(PHASES[0], loss=counting), replace(PHASES[1], loss=weighed)
    model = Clock()
    program = compile(
        *(model, INPUTS),
        example_target=TARGET,
        phases=phases,
        ranks=2,
        micro_batches=MICRO_BATCHES,
    )
    program.write(tmp_path)
    data = batches(3)
    assert_same(trained(tmp_path, data, 2, phases), in_one_process(model, data, phases))


def test_a_first_step_in_which_phases_are_wrong_is_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mutant: each phase trains one layer of the discriminator."""
    made = gemsc.lowering.variants.phase_model

    def wrong(model: nn.Module, phase: Phase, **how: bool) -> nn.Module:
        train = "judge.5" if phase.name == "d" else "make"
        return made(model, replace(phase, train=train), **how)

    monkeypatch.setattr(gemsc.lowering.variants, "phase_model", wrong)
    with pytest.raises(Exception, match="wrong program"):
        compile(
            *(Gan(), INPUTS),
            example_target=TARGET,
            phases=PHASES,
            ranks=2,
            micro_batches=MICRO_BATCHES,
        )


def test_gradients_that_wait_stay_while_another_phase_is_updated(
    tmp_path: Path,
) -> None:
    """Also over a checkpoint between two steps of an update, on other ranks."""
    model = written(tmp_path / "p")
    data = batches(4)
    options: dict[str, Any] = {"accumulate": 2, "clip_norm": 0.05}
    expected = in_one_process(model, data, **options)
    assert_same(trained(tmp_path / "p", data, 2, **options), expected)

    def first(trainer: Trainer) -> None:
        for batch in data[:3]:
            trainer.step(*batch)
        trainer.save(tmp_path / "saved")

    def rest(trainer: Trainer) -> Any:
        trainer.resume(tmp_path / "saved")
        trainer.step(*data[3])
        return {n: t.clone() for n, t in trainer.state_dict().items()}

    given = {"phases": PHASES, "dtype": torch.float64, **options}
    on_ranks(tmp_path / "p", 2, first, **given)
    written(tmp_path / "q", ranks=3)
    merged: dict[str, Tensor] = {}
    for state in on_ranks(tmp_path / "q", 3, rest, **given):
        merged |= state
    torch.testing.assert_close(merged, expected[1], rtol=1e-7, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*at_night("1f1b"), "mast"])
def test_a_run_goes_on_bit_for_bit(kind: str, tmp_path: Path) -> None:
    written(tmp_path / "p", schedule=kind)
    data = batches(4)
    whole = trained(tmp_path / "p", data, 2)

    def first(trainer: Trainer) -> None:
        for batch in data[:2]:
            trainer.step(*batch)
        trainer.save(tmp_path / "saved")

    def rest(trainer: Trainer) -> Any:
        trainer.resume(tmp_path / "saved")
        for batch in data[2:]:
            trainer.step(*batch)
        return {n: t.clone() for n, t in trainer.state_dict().items()}

    given = {"phases": PHASES, "dtype": torch.float64}
    on_ranks(tmp_path / "p", 2, first, **given)
    for state in on_ranks(tmp_path / "p", 2, rest, **given):
        for name, tensor in state.items():
            assert torch.equal(tensor, whole[1][name]), name
    # the optimizers of both phases, and the scheduler, go to other ranks
    written(tmp_path / "q", ranks=3)
    merged: dict[str, Tensor] = {}
    for state in on_ranks(tmp_path / "q", 3, rest, **given):
        merged |= state
    torch.testing.assert_close(merged, whole[1], rtol=1e-7, atol=1e-9)

    other = PHASES[0], replace(PHASES[1], name="h")
    written(tmp_path / "r", other)
    with pytest.raises(GemscError, match="d, g, but the program's have d, h"):
        on_ranks(tmp_path / "r", 2, rest, phases=other, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [(), *at_night(("2x1",))])
def test_the_example_with_spectral_normalization(tiles: tuple[str, ...]) -> None:
    example = pix2pix.example_inputs(), pix2pix.example_target()
    program = compile(
        *(pix2pix.Pix2Pix(base=4), example[0]),
        example_target=example[1],
        phases=pix2pix.phases,
        ranks=2,
        tiles=tiles,
        micro_batches=2,
    )
    plan = program.plan
    assert plan.unchecked == ""
    # Adam's two numbers of each parameter, of both phases, are there in both
    owned = program.compilation.owned
    sizes = {n: p.numel() for n, p in pix2pix.Pix2Pix(base=4).named_parameters()}
    for stage, names in enumerate(owned):
        state = 2 * 4 * sum(sizes.get(name, 0) for name in names)
        for rank in plan.stages[stage].ranks:
            assert plan.memory[0 if tiles else rank]["optimizer"] >= state
    phases = program.compilation.variants.values()
    peaks = zip(*(phase.plan.peak_bytes for phase in phases), strict=True)
    assert plan.peak_bytes[-1] > max([*peaks][-1])  # its last rank trains in both
    statistics = "discriminator.0.parametrizations.weight.0._u"
    assert any(statistics in names for names in owned)


class Judges(Gan):
    """Two judges side by side, of which one looks at the whole of a hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.make = nn.Sequential(*(nn.Conv2d(*n, 1) for n in ((1, 8), (8, 2))))
            self.judges = nn.ModuleList(
                nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 1, 3))
                for _ in range(2)
            )


def by_both(model: Any, *pictures: Tensor) -> Tensor:
    """Return how real they find each of some pictures."""
    x = torch.cat(pictures)
    scores = [judge(x) for judge in model.judges]
    return (scores[0] + scores[1]).mean((1, 2, 3))


def judges_loss(model: Any, grey: Tensor, colour: Tensor) -> Tensor:
    with torch.no_grad():
        made = torch.cat((grey, model(grey)), 1)
    real, not_real = by_both(model, torch.cat((grey, colour), 1), made).chunk(2)
    return (real - 1).square().mean() + not_real.square().mean()


def makers_loss(model: Any, grey: Tensor, colour: Tensor) -> Tensor:
    hidden = model.make[0](grey)
    even = hidden.softmax(1).square().mean()  # of all channels
    made = torch.cat((grey, model.make[1](hidden)), 1)
    return (by_both(model, made) - 1).square().mean() + even


BOTH = Phase("d", judges_loss, "judges", adam), Phase("g", makers_loss, "make", adam)


def with_judges(phases: tuple[Phase, ...] = BOTH, **options: Any) -> Any:
    given = {"example_target": TARGET, "phases": phases, "micro_batches": 2}
    return compile(Judges(), INPUTS, **given, ranks=2, **options)


@pytest.mark.slow
def test_what_another_phase_uses_as_a_whole_is_whole() -> None:
    program = with_judges(shards=("2",))
    assert program.plan.unchecked == ""
    assert program.compilation.largest == "d"
    assert {n.rpartition(".")[0] for n in program.compilation.parts(0)} == {
        f"judges.{judge}.{layer}" for judge in (0, 1) for layer in (0, 2)
    }
    (stage,) = program.plan.stages
    reasons = {name: group.reason for group in stage.whole for name in group.names}
    assert reasons["make.0.weight"] == "Judges, phase g uses it as a whole"


@pytest.mark.slow
def test_an_optimizer_that_looks_across_is_found_in_each_phase() -> None:
    class Normed(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad /= parameter.grad.norm()
            super().step()

    for number, name in enumerate(("judges.0.0.weight", "make.0.weight")):
        phases = [BOTH[0], replace(BOTH[1], loss=judged_by_both)]
        phases[number] = replace(phases[number], optimizer=partial(Normed, lr=0.1))
        with pytest.raises(GemscError, match=f"looks across '{name}'"):
            with_judges(tuple(phases), shards=("2",))


def judged_by_both(model: Any, grey: Tensor, colour: Tensor) -> Tensor:
    return -by_both(model, torch.cat((grey, model(grey)), 1)).mean()


def judged_apart(model: Any, grey: Tensor, colour: Tensor) -> Tensor:
    real = by_both(model, torch.cat((grey, colour), 1))  # while the others are made
    return judges_loss(model, grey, colour) - real.mean()


@pytest.mark.slow
def test_branches_of_one_phase_are_on_the_same_ranks_in_another() -> None:
    program = with_judges(branches=("2",))
    assert program.plan.unchecked == ""
    variants = [phase.program.shards for phase in program.compilation.variants.values()]
    assert variants[0][0].placed == variants[1][0].placed != ()
    apart = replace(BOTH[0], loss=judged_apart), BOTH[1]
    with pytest.raises(GemscError, match="all ranks need it in Judges") as caught:
        with_judges(apart, branches=("2",))
    assert caught.value.help == "keep it whole: --whole make.0,make.1"
    assert not with_judges(apart, branches=("2",), whole=("make",)).plan.unchecked


FILE = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, IterableDataset
import gemsc

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.make = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.judge = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    def forward(self, x):
        return self.make(x)

model = Net

def example_inputs():
    return (torch.zeros(2, 4),)

class Pairs(Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        x = torch.randn(4)
        return x, x.flip(0)

class Held(IterableDataset):  # nobody knows where it ends
    def __iter__(self):
        for _ in range(19):
            x = torch.randn(4)
            yield x, x.flip(0)

dataset, eval_dataset = Pairs, Held

def metrics(output, target):
    return {"mse": F.mse_loss(output, target)}

def judged(model, x, y):
    return model.judge(torch.cat((x, y), 1))

def d_loss(model, x, y):
    return F.softplus(-judged(model, x, y)).sum(), len(x)

def g_loss(model, x, y):
    made = model(x)
    return F.softplus(-judged(model, x, made)).mean() + F.mse_loss(made, y)

def adam(params):
    return torch.optim.Adam(params, lr=0.01)

phases = [
    gemsc.Phase("d", loss=d_loss, train="judge", optimizer=adam),
    gemsc.Phase("g", loss=g_loss, train="make", optimizer=adam),
]
"""


@pytest.mark.slow
def test_a_run_from_the_command_line_equals_a_plain_loop(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    gemsc = gemsc_here(monkeypatch, capfd)

    def said(*words: object, code: int = 0) -> str:
        outcome = gemsc(*words)
        assert outcome.code == code, outcome
        return " ".join((outcome.out + outcome.err).split())

    (tmp_path / "model.py").write_text(FILE)
    words = "compile", "model.py", "--ranks", 2, "--micro-batches", 4, "-o", "p"
    assert "a step has the phases d (" in said(*words)
    assert "--ranks 2" in said("plan", "model.py", "--ranks", 2)
    assert "a step has the phases" in said("show", "p")
    said("simulate", "p")
    text = said("verify", "p", "--run", 3)
    assert "float64: 3 steps, 2 evaluations" in text
    assert text.count(": exact") == 2
    assert said("verify", "p").count(": exact") == 2
    run = said("run", "p", "--epochs", 1, "--save", "saved")
    assert re.search(r"d 0\.\d+ g \d", run)
    head, *rows = (tmp_path / "saved" / "log.csv").read_text().splitlines()
    assert head.endswith("loss_d,loss_g,eval_mse")
    assert len(rows) == 2
    (tmp_path / "model.py").write_text(FILE.replace("def metrics", "def unused"))
    assert "a step has the phases d (" in said(*words)
    run = said("run", "p", "--epochs", 1)
    assert "held-out after epoch 1: nothing to score it by: add metrics(output" in run
    assert "a step has several phases" in said("verify", "p", "--all-inputs", code=1)
    assert "a step has several phases" in said("timeline", "p", "--measured", code=1)
    (tmp_path / "model.py").write_text(f"{FILE}\nloss = nn.MSELoss()\n")
    assert "loss cannot be combined with phases" in said(*words, code=1)


@pytest.mark.slow
def test_the_norm_of_a_step_is_that_of_its_last_phase(tmp_path: Path) -> None:
    phases = PHASES[0], replace(PHASES[1], every=2)
    model = written(tmp_path, phases)
    data, expected = batches(3), list[float]()
    in_one_process(model, data, phases, clip_norm=0.05, norms=expected)

    def work(trainer: Trainer) -> list[float | None]:
        norms = [trainer.gradient_norm]
        for batch in data:
            trainer.step(*batch)
            norms.append(trainer.gradient_norm)
        last = trainer.worker.variants.updates["g"]  # on ranks that judge alone, too
        assert trainer.optimizer is last.optimizer
        assert trainer.scheduler is last.scheduler
        trainer.step(*(tensor * torch.nan for tensor in data[0]))
        return [trainer.gradient_norm, *norms]

    given = {"phases": phases, "dtype": torch.float64, "clip_norm": 0.05}
    for left_out, first, *norms in on_ranks(
        tmp_path, 2, work, **given, on_nonfinite="skip"
    ):
        assert left_out is None
        assert first is None
        assert norms == pytest.approx(expected, rel=1e-9)


def compiled(*phases: Phase, **options: Any) -> Any:
    given = {"example_target": TARGET, "phases": phases, "check": False}
    return compile(Gan(), INPUTS, **given, ranks=2, micro_batches=2, **options)


@pytest.mark.slow
def test_the_optimizer_of_a_phase_gets_what_it_trains() -> None:
    def of_trained(pairs: Any) -> torch.optim.Optimizer:
        pairs = list(pairs)
        assert all(parameter.requires_grad for _, parameter in pairs)
        return adam(pairs)

    phases = tuple(replace(phase, optimizer=of_trained) for phase in PHASES)
    given = {"example_target": TARGET, "check": False, "micro_batches": 2}
    assert compile(Gan(), INPUTS, phases=phases, ranks=2, **given).plan.phases


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "1st"}, "'1st', which is not a name in Python"),
        ({"name": "g"}, "'g', twice"),
        ({"train": "judges"}, "trains 'judges', of which the model has no parameters"),
        ({"train": ["judge", "make.0"]}, "phases d and g both train 'make.0.weight'"),
        ({"every": 0}, "every=0 is not a number of steps"),
        ({"loss": lambda model, inputs: 0}, "phase 'd' takes other arguments: too man"),
    ],
)
def test_wrong_phases_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(GemscError, match=message):
        compiled(replace(PHASES[0], **change), PHASES[1])


@pytest.mark.slow
def test_what_no_phase_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GemscError, match="some steps have no phase"):
        compiled(*(replace(phase, every=2) for phase in PHASES))

    def penalty(model: Any, grey: Tensor, colour: Tensor) -> Tensor:
        grey = grey.detach().requires_grad_(True)
        score = judged(model, grey, colour, 1)
        (slope,) = torch.autograd.grad(score, grey, create_graph=True)
        return score + slope.square().sum()

    with pytest.raises(GemscError, match="grad"):
        compiled(replace(PHASES[0], loss=penalty), PHASES[1])
    with pytest.raises(GemscError, match="LBFGS"):
        compiled(replace(PHASES[0], optimizer=torch.optim.LBFGS), PHASES[1])
    seldom = PHASES[0], replace(PHASES[1], every=2)
    written(tmp_path, seldom)
    with pytest.raises(GemscError, match="phase g has every=2"):
        trained(tmp_path, [], 2, seldom, accumulate=2)
    with pytest.raises(GemscError, match="the phases d, g, but is given g, d"):
        trained(tmp_path, [], 2, seldom[::-1])

    def freeze(trainer: Trainer) -> None:
        trainer.freeze("make.0")

    with pytest.raises(GemscError, match="cannot be frozen in a program with phases"):
        on_ranks(tmp_path, 2, freeze, phases=seldom)
    extra = {"optimizer": PHASES[0].optimizer}
    with pytest.raises(GemscError, match="cannot be combined with phases"):
        on_ranks(tmp_path, 2, freeze, phases=seldom, **extra)


class Shared(Gan):
    """Its generator looks with the discriminator's eyes, which that alone trains."""

    def __init__(self) -> None:
        super().__init__()
        self.make[3] = nn.Conv2d(4, 8, 3, padding=1, bias=False)
        self.make[3].weight = self.judge[2].weight
        self.make[5] = nn.Conv2d(8, 2, 1)


@pytest.mark.slow
def test_a_shared_weight_is_trained_by_any_of_its_names(tmp_path: Path) -> None:
    phases = PHASES[0], replace(PHASES[1], train=["make.0", "make.1", "make.5"])
    given = {
        "phases": phases,
        "ranks": 2,
        "micro_batches": MICRO_BATCHES,
        "check": False,
    }
    model, data = Shared(), batches(1)
    compile(model, INPUTS, example_target=TARGET, **given).write(tmp_path)
    _, state = trained(tmp_path, data, 2, phases)
    change = state["make.3.weight"] - model.make[3].weight.detach()
    assert float(change.abs().max()) == pytest.approx(0.01, rel=1e-3)  # of Adam


class Freezing(Gan):
    """Freezes a layer and statistics in its own train()."""

    def train(self, mode: bool = True) -> Freezing:
        super().train(mode)
        self.make[0].requires_grad_(False)
        self.make[1].eval()
        return self


def with_own_statistics() -> nn.Module:
    """Return a model in training, one of whose layers is not."""
    model = Gan()
    model.make[1].eval()
    return model


@pytest.mark.slow
@pytest.mark.parametrize("make", [Freezing, with_own_statistics])
def test_what_a_model_freezes_is_frozen_in_phases(make: Any, tmp_path: Path) -> None:
    model, data = make(), batches(2)
    given = {
        "phases": PHASES,
        "ranks": 2,
        "micro_batches": MICRO_BATCHES,
        "check": False,
    }
    compile(model, INPUTS, example_target=TARGET, **given).write(tmp_path)
    losses, state = trained(tmp_path, data, 2)
    assert state["make.1.num_batches_tracked"] == 0
    kept = torch.equal(state["make.0.weight"], model.make[0].weight.double())
    assert kept == (make is Freezing)
    once = [((grey,), colour) for grey, colour in data]
    plain = model, None, once, MICRO_BATCHES, torch.float64
    expected = reference_steps(*plain, phases=PHASES).losses
    both = [step[name] for step in losses for name in "dg"]
    assert both == pytest.approx(expected, rel=1e-10)


def leaves(model: Any, grey: Tensor, colour: Tensor) -> Tensor:
    model.judge.eval()
    return g_loss(model, grey, colour)


def with_statistics_as_they_are(model: Any, grey: Tensor, colour: Tensor) -> Tensor:
    loss = leaves(model, grey, colour)
    model.judge.train()
    return loss


@pytest.mark.slow
def test_a_loss_may_use_a_network_in_evaluation_mode(tmp_path: Path) -> None:
    data = batches(3)
    given: dict[str, Any] = {"ranks": 2, "micro_batches": MICRO_BATCHES, "check": False}
    frozen = replace(PHASES[1], loss=with_statistics_as_they_are)
    phases = PHASES[0], frozen
    given |= {"example_target": TARGET}
    compile(Gan(), INPUTS, phases=phases, **given).write(tmp_path)
    expected = in_one_process(Gan(), data, phases)
    assert_same(trained(tmp_path, data, 2, phases), expected)
    left = PHASES[0], replace(frozen, loss=leaves)
    with pytest.raises(GemscError, match="leaves 'judge' in evaluation") as caught:
        compile(Gan(), INPUTS, phases=left, **given)
    assert caught.value.help == "call train(True) for it before the loss returns"


@pytest.mark.slow
def test_a_loss_may_leave_a_network_that_no_other_phase_uses(tmp_path: Path) -> None:
    def makes_brighter(model: Any, grey: Tensor, colour: Tensor) -> Tensor:
        return -model.make(grey).mean()

    data = batches(3)
    other = replace(PHASES[0], loss=makes_brighter, train="make.0")
    phases = replace(PHASES[1], loss=leaves, train="make.1"), other
    given = {"ranks": 2, "micro_batches": MICRO_BATCHES}
    given |= {"example_target": TARGET, "check": False}
    compile(Gan(), INPUTS, phases=phases, **given).write(tmp_path)
    expected = in_one_process(Gan(), data, phases)
    assert_same(trained(tmp_path, data, 2, phases), expected)


class ByItsMode(nn.Module):
    """Asks for its own mode, which is not that of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (2 if self.training else 1)


def test_the_model_of_a_phase_is_in_the_mode_of_the_phase() -> None:
    def loss(model: Any, x: Tensor, target: Tensor) -> Tensor:
        return (model(x) - target).mean()

    user, x, zero = ByItsMode().eval(), torch.rand(2, 3), torch.zeros(2, 3)
    model, _ = gemsc.lowering.variants.phase_model(user, Phase("all", loss, "layer"))
    evaluated = model(x, zero)
    assert torch.equal(model.train()(x, zero), 2 * evaluated)
    assert torch.equal(model.eval()(x, zero), evaluated)
    assert not user.training


def clamping(model: Any, grey: Tensor, colour: Tensor) -> Tensor:
    colour.clamp_(-0.5, 0.5)
    return d_loss(model, grey, colour)


@pytest.mark.slow(1)
@pytest.mark.parametrize("frontend", ["record", "export"])
def test_a_phase_that_changes_the_batch_of_another_is_refused(frontend: str) -> None:
    given: dict[str, Any] = {"example_target": TARGET, "ranks": 1, "frontend": frontend}
    first = [Phase("d", clamping, "judge", adam), Phase("g", g_loss, "make", adam)]
    with pytest.raises(GemscError, match="'d' changes the batch of later") as caught:
        compile(Gan(), INPUTS, phases=first, **given)
    assert caught.value.at is not None
    assert ".clone()" in caught.value.help
    compile(Gan(), INPUTS, phases=first[::-1], **given)
