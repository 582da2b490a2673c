"""A run on N ranks is a plain PyTorch loop over the same data."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Gemsc, gemsc_here
from nightly import at_night
from program_support import adding
from torch.utils.data import default_collate

from gemsc.base.nests import saved_named
from gemsc.base.rng import seed_of
from gemsc.errors import GemscError
from gemsc.plan_tables import PlannedShape
from gemsc.runtime.data.batches import Batches, digest
from gemsc.runtime.data.shapes import ShapeClasses
from gemsc.runtime.training.verification import RunRecord
from gemsc.user_model import UserModel, load_user_model
from gemsc.verify import runs
from gemsc.verify.plain_run import PlainRun, RunSettings
from gemsc.verify.precision import LowPrecision
from gemsc.verify.runs import (
    Noise,
    RunComparison,
    RunResult,
    check_data,
    compare_runs,
    verify_run,
)
from gemsc.weights.read import read_tensors

# Data drawn at random, noise and flips of each sample, buffers, dropout, a schedule of
# the learning rate, metrics that are no means over samples.
MODEL = """\
import random

import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.b = nn.Conv2d(4, 4, 3, padding=1)
        self.drop = nn.Dropout(0.2)
        self.c = nn.Conv2d(4, 6, 3, padding=1)
        self.d = nn.Linear(6, 3)

    def forward(self, x):
        x = torch.relu(self.norm(self.a(x)))
        x = self.drop(torch.tanh(self.b(x)))
        x = torch.tanh(self.c(x))
        return self.d(x.mean((2, 3)))

    def get_extra_state(self):  # no tensor: no file of weights has it
        return {"version": 1}

    def set_extra_state(self, state):
        pass


class Data:
    def __init__(self, size):
        self.own = np.random.default_rng()  # which takes another seed in each process
        self.images = torch.rand(size, 1, 8, 8)
        self.labels = np.random.randint(3, size=size)
        self.weights = [random.random() for _ in range(size)]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index] * self.weights[index] + 0.1 * torch.randn(1, 8, 8)
        if random.random() < 0.5:
            image = image.flip(2)
        label = self.labels[index] if self.own.random() < 0.9 else 0
        return image, nn.functional.one_hot(torch.tensor(label), 3).float()


model = Net


def loss(output, target):  # takes one dtype only, in float64 too
    return nn.functional.binary_cross_entropy(torch.sigmoid(output), target)


def example_inputs():
    return (torch.randn(2, 1, 8, 8),)


def optimizer(params):
    return torch.optim.SGD(params, lr=0.2, momentum=0.9, weight_decay=0.01)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def dataset():
    return Data(27)


def eval_dataset():
    return Data(13)


def metrics(output, target):
    right = (output.argmax(1) == target.argmax(1)).float()
    return {"accuracy": right.mean(), "spread": output.std(), "all": right.min()}


def on_step(trainer, report):
    trainer.stop("which no plain loop knows")
"""

SETTINGS = RunSettings(
    steps=5,
    dtype=torch.float64,
    micro_batch_size=2,
    micro_batches=2,
    replicas=2,
    accumulate=2,
    clip_norm=0.05,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "net.py"
    path.write_text(MODEL)
    return path


@pytest.fixture
def gemsc(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Gemsc:
    return gemsc_here(monkeypatch, capfd)


@pytest.fixture
def user(path: Path, in_double: None) -> UserModel:
    return load_user_model(str(path))


def plain_run(user: UserModel, settings: RunSettings = SETTINGS) -> PlainRun:
    run = PlainRun(user, user.make_unfilled(), settings)
    run.train()
    return run


def record_of(run: PlainRun) -> RunRecord:
    """Return what ranks that do the same would leave."""
    record = RunRecord(losses=list(run.losses))
    seen = run.samples.seen
    for epoch, rows in zip(run.epochs, run.rows, strict=True):
        record.add_step(0.0, {(i, None): seen[epoch, i, None] for i in rows})
    record.losses = list(run.losses)
    for key, text in run.eval_samples.seen.items():
        record.add_evaluated({key[1:]: text})
    for parts in run.evaluations:
        total = {name: 0.0 for _, figures in parts for name in figures}
        count = dict.fromkeys(total, 0)
        for samples, figures in parts:
            for name, value in figures.items():
                total[name] += value * samples
                count[name] += samples
        record.add_figures({n: (total[n] / count[n], count[n]) for n in total})
    return record


def compared(
    run: PlainRun, record: RunRecord, **changed: torch.Tensor
) -> RunComparison:
    saved = saved_named(run.model) | changed
    mine = RunResult.of_run(record, saved)
    return compare_runs(mine, RunResult.of_plain(run, record))


PLANS = {
    "one rank": (("--ranks", 1), ("--workers", 2)),
    "mirrored": (
        ("--ranks", 2, "--schedule", "mast", "--micro-batches", 2),
        ("--seed", 3),
    ),
    "replicas": (("--ranks", 2, "--data", 2), ()),
    "tiles": (("--ranks", 3, "--tiles", "2x1"), ()),
}
RUN = ("--run", 5, "--accumulate", 2, "--clip-norm", 0.05)


@pytest.mark.mpi
@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    "name", ["mirrored", *at_night("replicas", "one rank", "tiles")]
)
def test_a_run_is_a_plain_loop(
    name: str, gemsc: Gemsc, path: Path, tmp_path: Path
) -> None:
    plan, words = PLANS[name]
    program = tmp_path / "program"
    given = ("compile", path, *plan, "--micro-batches", 2, "-o", program)
    assert gemsc(*given).code == 0
    dtype = "float32" if name == "mirrored" else "float64"
    outcome = gemsc("verify", program, "--dtype", dtype, *RUN, *words)
    assert outcome.code == 0, outcome.out + outcome.err
    verdict = rf"{dtype}: 5 steps, \d evaluations, worst (\S+): exact\n"
    match = re.search(verdict, outcome.out)
    assert match, outcome.out
    assert float(match[1]) <= {"float32": 1e-4, "float64": 1e-9}[dtype]
    assert "held-out after epoch 1: " in outcome.out
    assert f"plain loop in {dtype} 5/5  loss " in outcome.out
    # what is exact needs no other rounding
    assert len(re.findall(r"plain loop in \S+ 5/5", outcome.out)) == 1
    assert "note: on_step() is not called here" in outcome.err


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.usefixtures("engine")
def test_what_only_runs_do_wrong_is_found(
    gemsc: Gemsc, path: Path, tmp_path: Path
) -> None:
    program = tmp_path / "program"
    assert gemsc("compile", path, "--ranks", 1, "-o", program).code == 0
    file = program / "rank0.py"
    right = "    worker.update()\n"
    wrong = f"{right}    worker.updates.scheduler.step()\n"
    file.write_text(file.read_text().replace(right, wrong))
    outcome = gemsc("verify", program, "--dtype", "float64", "--run", 4)
    assert outcome.code == 1
    assert re.search(r"float64: 4 steps, .*: NOT EXACT\n", outcome.out), outcome


# Adam makes steps of what rounding leaves of the gradient of `a.bias`
BIASED = """\
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


def loss(output, target):
    return 1e5 * (output - target - 1).square().mean()


def example_inputs():
    return (torch.randn(2, 1, 8, 8),)


def dataset():
    images = torch.randn(16, 1, 8, 8, dtype=torch.float32)
    return torch.utils.data.TensorDataset(images, images[..., 1:-1, 1:-1])


eval_dataset = dataset


def optimizer(params):
    return torch.optim.Adam(params, lr=0.01)
"""


@pytest.mark.slow
@pytest.mark.mpi
def test_training_on_rounding_alone_is_no_error(gemsc: Gemsc, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(BIASED)
    program = tmp_path / "x"
    words = ("--ranks", 2, "--tiles", "2x1", "--micro-batches", 2, "-o", program)
    assert gemsc("compile", tmp_path / "model.py", *words).code == 0
    verify = ("verify", program, "--dtype", "float64", "--run", 3, "--clip-norm", 1e4)
    outcome = gemsc(*verify)
    assert outcome.code == 0, outcome.out + outcome.err
    assert re.search(r"float64: 3 steps, .*: exact\n", outcome.out)
    assert "gradients of a.bias are zero but for rounding" in outcome.out
    # what is no rounding is an error, in these parameters and in others
    texts = {path: path.read_text() for path in program.glob("rank*.py")}
    for name, addend in (("a.bias", 1e-5), ("c.bias", -1e9)):
        for path, text in texts.items():
            path.write_text(adding(text, name, addend))
        outcome = gemsc(*verify)
        assert outcome.code == 1, (name, outcome.out)
        assert re.search(r"float64: 3 steps, .*: NOT EXACT\n", outcome.out), outcome


@pytest.mark.slow
@pytest.mark.mpi
def test_a_run_may_be_as_far_off_as_rounding_alone_makes_it(
    gemsc: Gemsc, tmp_path: Path
) -> None:
    # the sine of a large number has lost 8 digits
    text = BIASED.replace("c(torch", "c(torch.sin(1e8 * torch").replace(
        "x))))", "x)))))"
    )
    text = text.replace("Adam(params, lr=0.01)", "SGD(params, lr=1e-20)")
    (tmp_path / "model.py").write_text(text)
    program = tmp_path / "x"
    words = ("--ranks", 2, "--tiles", "2x1", "--micro-batches", 2, "-o", program)
    assert gemsc("compile", tmp_path / "model.py", *words).code == 0
    verify = ("verify", program, "--dtype", "float64", "--run", 3)
    outcome = gemsc(*verify)
    assert re.search(r"\(rounding alone .*e-0[5-9]\): exact\n", outcome.out), outcome
    for path in program.glob("rank*.py"):
        path.write_text(adding(path.read_text(), "c.bias", 1e16))
    outcome = gemsc(*verify)
    assert re.search(r"\(rounding alone .*\): NOT EXACT\n", outcome.out), outcome


FREEZES = BIASED.replace(
    "\n\nmodel = Net\n",
    """
    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        self.norm.weight.requires_grad_(False)
        return self


model = Net
""",
)


@pytest.mark.slow
@pytest.mark.mpi
def test_a_model_that_freezes_its_norms_in_train_trains_without_them(
    gemsc: Gemsc, tmp_path: Path
) -> None:
    """A loop calls `model.train()`, which is what says so; nobody has called it yet."""
    assert FREEZES != BIASED
    (tmp_path / "model.py").write_text(FREEZES)
    program = tmp_path / "x"
    assert gemsc("compile", tmp_path / "model.py", "-o", program).code == 0
    steps = ("--steps", 2, "--save", tmp_path / "run", "--dtype", "float64")
    assert gemsc("run", program, *steps).code == 0
    saved = read_tensors(tmp_path / "run" / "model.safetensors")
    assert saved["norm.num_batches_tracked"] == 0
    assert torch.equal(saved["norm.running_var"], torch.ones(4, dtype=torch.float64))
    assert torch.equal(saved["norm.weight"], torch.ones(4, dtype=torch.float64))
    user = load_user_model(str(tmp_path / "model.py"))
    settings = replace(SETTINGS, steps=2, replicas=1, accumulate=1, clip_norm=None)
    run = PlainRun(user, user.make_unfilled(), replace(settings, micro_batches=4))
    run.train()
    for name, tensor in saved_named(run.model).items():
        assert torch.allclose(saved[name], tensor, rtol=1e-9, atol=1e-12), name


def test_the_plain_loop_reads_what_ranks_read(user: UserModel) -> None:
    run = plain_run(user)
    assert run.epochs == [0, 0, 0, 1, 1]
    parts = [
        Batches(
            user.make_dataset("dataset", seed=0),
            8,
            seed=0,
            shuffle=True,
            part=part,
            num_parts=2,
            compare_all=True,
        )
        for part in range(2)
    ]
    for epoch in range(2):
        batches = zip(*(part.epoch(epoch) for part in parts), strict=True)
        steps = run.rows[epoch * 3 : epoch * 3 + 3]
        for rows, (first, second) in zip(steps, batches, strict=False):
            both = first.digests | second.digests
            ours = {row: {run.samples.digest_of(epoch, row, None)} for row in rows}
            assert {row: {*both[row]} for row in rows} == ours
    seed = seed_of(0, -1)
    data = user.make_dataset("eval_dataset", seed=seed)
    theirs: dict[int, set[str]] = {}
    for batch in Batches(data, 8, seed=seed, shuffle=False, compare_all=True).epoch(0):
        theirs |= {index: {*texts} for index, texts in batch.digests.items()}
    assert theirs == {key[1]: {text} for key, text in run.eval_samples.seen.items()}


@pytest.mark.slow
def test_the_plain_loop_learns_and_leaves_modes_as_they_were(user: UserModel) -> None:
    run = plain_run(user, replace(SETTINGS, steps=30, accumulate=1, clip_norm=None))
    assert run.losses[-1] < run.losses[0]
    assert all(module.training for module in run.model.modules())
    assert len(run.evaluations) == 10


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    "change",
    [
        {"accumulate": 1},
        {"clip_norm": None},
        {"seed": 1},
        {"micro_batches": 1, "micro_batch_size": 4},
    ],
    ids=str,
)
def test_every_setting_changes_a_run(change: dict[str, int], user: UserModel) -> None:
    run, other = plain_run(user), plain_run(user, replace(SETTINGS, **change))
    saved = saved_named(other.model)
    assert compared(run, record_of(run), **saved).model[0] > 1e-4


@pytest.mark.slow
def test_a_scheduler_is_stepped_by_evaluations_if_it_waits_for_them(
    user: UserModel,
) -> None:
    waits = partial(
        torch.optim.lr_scheduler.ReduceLROnPlateau, threshold=10, patience=0
    )
    run = plain_run(replace(user, scheduler=waits), replace(SETTINGS, steps=9))
    (update,) = run.updates
    assert len(run.evaluations) == 3
    assert update.optimizer.param_groups[0]["lr"] == pytest.approx(2e-4)


@pytest.mark.slow
def test_terms_of_a_loss_may_be_fractions(user: UserModel) -> None:
    def figures(share: float) -> list[dict[str, float]]:
        def weighed(output: torch.Tensor, target: torch.Tensor) -> Any:
            return user.loss(output, target) * len(output) * share, len(output) * share

        run = plain_run(replace(user, loss=weighed))
        return RunResult.of_plain(run, record_of(run)).figures

    for whole, part in zip(figures(1), figures(0.1), strict=True):
        assert part == pytest.approx(whole, rel=1e-9)


def test_a_figure_of_the_run_that_differs_is_found(user: UserModel) -> None:
    run = plain_run(user)
    assert compared(run, record_of(run)).worst < 1e-15

    record = record_of(run)
    record.losses[3] *= 1 + 1e-6
    assert compared(run, record).loss == pytest.approx(1e-6)

    record = record_of(run)
    mean, count = record.figures[1]["spread"]
    record.figures[1]["spread"] = (mean * 1.001, count)
    error, name = compared(run, record).evaluation
    assert (error, name) == (pytest.approx(0.001), "spread of evaluation 2")

    record.figures[1]["spread"] = (mean, count - 1)  # a sample was left out
    assert compared(run, record).evaluation[0] == float("inf")
    del record.figures[1]["spread"]
    assert compared(run, record).evaluation[0] == float("inf")

    record = record_of(run)
    wrong = saved_named(run.model)["norm.running_var"] * 1.01
    diff = compared(run, record, **{"norm.running_var": wrong})
    assert diff.model == (pytest.approx(0.01, rel=0.1), "norm.running_var")
    assert diff.equal == diff.total - 1
    assert compared(run, record, more=wrong).model == (float("inf"), "more")
    record.figures[1]["more"] = (0.5, 13)  # of which the plain loop knows nothing
    assert compared(run, record).evaluation == (float("inf"), "more of evaluation 2")


@pytest.mark.parametrize(
    ("error", "rounding", "verdict"),
    [
        (1e-5, 0.0, "exact"),
        (1e-3, 0.0, "wrong"),
        (1e-3, 1e-3, "exact"),
        (0.09, 0.2, "exact"),
        (0.2, 0.01, "wrong"),
        (0.2, 0.2, "undecided"),
        (float("inf"), 0.01, "wrong"),
    ],
)
def test_rounding_excuses_so_much(error: float, rounding: float, verdict: str) -> None:
    diff = RunComparison(error, (0.0, ""), (0.0, ""), 0, 1, 0, rounding)
    assert diff.judge(torch.float32) == verdict


@pytest.mark.parametrize(
    ("error", "rounding", "verdict"),
    [
        (1e-8, 0.0, "wrong"),
        (1e-8, 1e-8, "exact"),
        (1e-5, 1e-5, "undecided"),
        (0.5, 1e-5, "wrong"),  # rounding does not explain it
    ],
)
def test_rounding_excuses_in_float64_what_it_explains(
    error: float, rounding: float, verdict: str
) -> None:
    diff = RunComparison(error, (0.0, ""), (0.0, ""), 0, 1, 0, rounding)
    assert diff.judge(torch.float64) == verdict


@pytest.mark.parametrize(
    ("error", "verdict"), [(2e-6, "exact"), (3e-6, "wrong"), (0.2, "wrong")]
)
def test_a_run_in_float64_that_is_in_float32_inside_rounds_as_that(
    error: float, verdict: str
) -> None:
    inside = LowPrecision(torch.float32, "_to_copy")
    diff = RunComparison(error, (0.0, ""), (0.0, ""), 0, 1, 0, inside.last_bit)
    assert replace(diff, inside=inside).judge(torch.float64) == verdict
    diff = replace(diff, inside=inside, rounding=1.0)
    assert diff.judge(torch.float64) == ("exact" if error < 0.1 else "undecided")


def test_what_a_step_of_a_run_computes_in_is_seen(
    user: UserModel, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target.float()).square().mean()

    monkeypatch.setattr(runs, "initial_model", lambda user, _: user.make_unfilled())
    assert runs._inside(user, path.parent, SETTINGS) is None
    inside = runs._inside(replace(user, loss=loss), path.parent, SETTINGS)
    assert inside is not None
    assert inside.dtype is torch.float32
    assert "test_verify_run.py" in inside.call


def test_a_model_that_runs_in_float32_alone_is_compared_with_nudged_weights(
    user: UserModel, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plain(user: UserModel, model: object, settings: RunSettings) -> str:
        if settings.dtype is torch.float64:
            raise RuntimeError("expected m1 and m2 to have the same dtype")
        return "a run"

    monkeypatch.setattr(runs, "initial_model", lambda user, _: user.make_unfilled())
    monkeypatch.setattr(runs, "_plain", plain)
    single = replace(SETTINGS, dtype=torch.float32)
    others = runs._other_runs(user, path.parent, single, None)
    assert [*map(str, others)] == ["a run"] * runs.NUDGES


@pytest.mark.parametrize("word", ["--ema", "--ema=0.9"])
def test_what_the_plain_loop_does_not_know_is_refused(
    word: str, tmp_path: Path
) -> None:
    with pytest.raises(GemscError, match=f"{word} cannot be verified"):
        verify_run(tmp_path, dtype=torch.float64, num_steps=1, arguments=[word])


def test_noise_excuses_no_other_errors_of_a_run() -> None:
    noise = Noise(frozenset({"noisy"}), frozenset({"other"}), 1e-9)

    def run(loss: float, noisy: float, other: float, mean: float) -> RunComparison:
        errors = {"noisy": noisy, "other": other, "mean": mean}
        largest = max(errors.values())
        return RunComparison(loss, (0.0, ""), (largest, ""), 0, 3, 0, errors=errors)

    assert run(0.0, 1.0, 0.0, 1.0).is_about(noise, torch.float64)
    assert not run(0.0, 1.0, 0.1, 1.0).is_about(noise, torch.float64)
    assert not run(0.1, 1.0, 0.0, 1.0).is_about(noise, torch.float64)
    assert not run(0.0, 0.0, 0.0, 1.0).is_about(noise, torch.float64)
    diff = run(0.1, 1.0, 0.5, 1.0).settled_by(run(0.0, 0.2, 0.1, 0.3), noise)
    assert diff.errors == {"noisy": 0.2, "other": 0.5, "mean": 0.3}
    assert (diff.loss, diff.model) == (0.1, (0.5, "other"))
    assert diff.settled == {"noisy"}


def test_other_data_are_told(user: UserModel) -> None:
    run = plain_run(user)
    check_data(run, record_of(run))
    record = record_of(run)
    index = run.rows[4][2]
    record.samples[4][index, None] = "other"
    message = f"dataset returns different data .*: sample {index}, in epoch 2"
    with pytest.raises(GemscError, match=message) as caught:
        check_data(run, record)
    assert caught.value.at == user.line_of("dataset")

    record = record_of(run)
    del record.samples[1][run.rows[1][0], None]
    with pytest.raises(GemscError, match=r"in step 2, .* read different samples"):
        check_data(run, record)

    record = record_of(run)
    record.eval_samples[12] = {(12, None): "other"}
    with pytest.raises(GemscError, match=r"eval_dataset returns .* sample 12"):
        check_data(run, record)


TILED = MODEL.replace(
    "    def __getitem__(self, index):\n",
    """\
    shape = (8, 8)

    def read(self, index, box):
        rows, columns = (slice(*interval) for interval in box)
        image, target = self.sample(index)
        return image[:, rows, columns], target

    def sample(self, index):
""",
)


@pytest.mark.slow
def test_images_that_are_read_in_parts(user: UserModel, tmp_path: Path) -> None:
    (tmp_path / "tiled_net.py").write_text(TILED)
    tiled = load_user_model(str(tmp_path / "tiled_net.py"))
    assert tiled.make_target(tiled.make_inputs()).shape == (2, 3)
    whole, run = plain_run(user), plain_run(tiled)
    assert run.losses == whole.losses
    assert run.evaluations == whole.evaluations

    record = record_of(run)
    part, index = ((0, 5), (0, 8)), run.rows[2][0]
    (image, target), box = run.samples.read(0, index), (index, part)
    record.samples[2] = {(i, part): "" for i in run.rows[2]}
    for i in run.rows[2]:
        record.samples[2][i, part] = run.samples.digest_of(0, i, part)
    assert record.samples[2][box] == digest((image[:, :5], target))
    check_data(run, record)

    assert compared(run, record).worst < 1e-15
    del record.figures[0]["spread"]
    assert compared(run, record).worst == float("inf")


def test_a_loss_with_tensors_of_its_own_scores_the_last_batch_too(
    user: UserModel, tmp_path: Path
) -> None:
    loss = MODEL.replace(
        "def loss(",
        "class Loss(nn.BCEWithLogitsLoss):\n    def __init__(self):\n"
        "        super().__init__(pos_weight=torch.ones(3))\n\n\ndef other(",
    )
    (tmp_path / "trained.py").write_text(f"{loss}\n\nloss = Loss\n")
    run = plain_run(load_user_model(str(tmp_path / "trained.py")))
    record = record_of(run)
    assert compared(run, record).worst < 1e-15
    kept = {**record.figures[0]}
    for name, value in ("loss", run.evaluations[0][0][1]["loss"]), ("spread", 0.0):
        record.figures[0] = kept | {name: (value, 8)}  # of 13
        assert compared(run, record).worst == float("inf")


def test_outputs_are_scored_beside_the_targets_that_a_collate_has_sorted(
    user: UserModel,
) -> None:
    def collate(samples: list[Any], number: int) -> Any:
        return default_collate(sorted(samples, key=lambda pair: float(pair[0].sum())))

    sizes = {"input.0": [1, 8, 8], "target": [3]}
    shape = PlannedShape(
        name="one",
        variant="",
        micro_batch_size=2,
        sizes=sizes,
        step_seconds=1.0,
        peak_bytes=[1],
    )
    shapes = ShapeClasses([shape], collate=collate)
    one, other = (
        PlainRun(user, user.make_unfilled(), replace(SETTINGS, shapes=kind))._evaluate()
        for kind in (None, shapes)
    )
    for (count, figures), (number, of_sorted) in zip(one, other, strict=True):
        assert (count, figures) == (number, pytest.approx(of_sorted))


def test_a_record_comes_back_from_its_file(tmp_path: Path) -> None:
    record = RunRecord()
    record.add_step(random.random(), {(3, None): "a", (4, ((0, 2), (1, 3))): "b"})
    record.add_evaluated({(0, None): "c"})
    record.add_figures({"loss": (0.1, 12)})
    record.write(tmp_path)
    stored = RunRecord.read(tmp_path)
    assert (stored.losses, stored.samples) == (record.losses, record.samples)
    assert stored.eval_samples == record.eval_samples
    assert stored.figures == [{"loss": [0.1, 12]}]
