"""When a run saves, which checkpoint is the best one, and when patience ends it."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from training_support import pairs, program, run, user_of

from gemsc.base.files import facts_of
from gemsc.errors import GemscError
from gemsc.runtime.checkpoint import folder
from gemsc.runtime.checkpoint.manifest import Manifest
from gemsc.runtime.data.metrics import figure_names
from gemsc.runtime.training import checkpoints
from gemsc.runtime.training.arguments import parse_arguments
from gemsc.runtime.training.run_checks import warn_of_length
from gemsc.runtime.training.trainer import Trainer


def saved(folder: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("step-*"))


def best(folder: Path) -> str:
    return (folder / "best").resolve().name


@pytest.mark.slow(2)
@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ("", [3, 6, 8]),
        ("--checkpoint-every 2", [2, 4, 6, 8]),
        ("--checkpoint-every 5", [5, 8]),
        ("--checkpoint-every 2 --keep 2", [6, 8]),
        ("--checkpoint-every 5 --checkpoint-async", [5, 8]),
        ("--checkpoint-every never", []),
    ],
)
def test_when_it_is_saved(words: str, steps: list[int], tmp_path: Path) -> None:
    """An epoch has 3 steps; the run 8 of 9."""
    folder = tmp_path / "saved"
    words = f"--steps 8 --save {folder} --keep 9 {words}"
    run(program(tmp_path), user_of(), *words.split())
    assert saved(folder) == steps
    assert (folder / "model.safetensors").is_file() == bool(steps)


def test_weights_that_a_kill_left_out_are_written_later(tmp_path: Path) -> None:
    """The run has ended, and what is there is perhaps of an end before."""
    directory, words = program(tmp_path), ("--save", str(tmp_path / "saved"))
    file = tmp_path / "saved" / "model.safetensors"
    run(directory, user_of(), "--steps", "1", *words)
    before = file.read_bytes()
    run(directory, user_of(), "--steps", "2", *words, "--resume")
    wanted = file.read_bytes()
    file.write_bytes(before)
    run(directory, user_of(), "--steps", "2", *words, "--resume")
    assert file.read_bytes() == wanted != before


def test_a_run_that_goes_back_does_not_go_on_where_it_was(tmp_path: Path) -> None:
    """Even if it dies before its next checkpoint."""
    directory, saved = program(tmp_path), tmp_path / "saved"
    words = "--steps", "3", "--save", str(saved)
    run(directory, user_of(), *words, "--checkpoint-every", "1")

    def dies(trainer: Trainer, report: Any) -> None:
        raise KeyError("dies")

    again = *words, "--resume", str(saved / "step-000001")
    best = saved / "best"
    for step, stays in ((1, True), (2, False)):  # what comes later is of another line
        best.symlink_to(f"step-00000{step}")
        with pytest.raises(GemscError, match="dies"):
            run(directory, user_of(on_step=dies), *again)
        assert best.is_symlink() == stays
        best.unlink(missing_ok=True)
    run(directory, user_of(), *words, "--resume", result=lambda t: t.step_number)
    assert (saved / "latest").readlink().name == "step-000003"
    steps = map(json.loads, (saved / "log.jsonl").read_text().splitlines())
    assert [x["step"] for x in steps if x["event"] == "step"] == [1, 2, 3]


@pytest.mark.slow
def test_what_was_just_saved_is_not_read_to_compare_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte is digested once: as it is written, or before it is resumed from."""
    read: list[Path] = []

    def noted(path: Path) -> Any:
        read.append(path)
        return facts_of(path)

    monkeypatch.setattr(folder, "facts_of", noted)
    directory, saved = program(tmp_path), tmp_path / "saved"
    run(directory, user_of(), "--steps", "2", "--save", str(saved))
    assert (saved / "model.safetensors").is_file()
    assert not read
    words = "--steps", "4", "--save", str(saved), "--resume", str(saved)
    run(directory, user_of(), *words)
    assert sorted(path.name for path in read) == [
        "rank0.safetensors",
        "rank1.safetensors",
    ]


@pytest.mark.slow
def test_every_ten_minutes_by_the_clock_of_the_first_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(checkpoints, "time", clock)

    def on_step(trainer: Trainer, report: Any) -> None:
        if trainer.transport.rank == 0 and report.step == 4:
            now[0] = 601.0  # all know it after step 5

    words = f"--steps 20 --save {tmp_path / 'saved'} --checkpoint-every 10min"
    user = user_of(on_step=on_step, dataset=lambda: pairs(100))
    run(program(tmp_path), user, *words.split())
    assert saved(tmp_path / "saved") == [5, 20]


def score(value: float) -> dict[str, float]:
    return {"score": value}


def figures_of(values: list[float]) -> Any:
    """Return what gives one of the values in each evaluation, on the loss's rank.

    Only a call can tell the name of the figure.
    """
    left = map(score, values)
    return lambda output, target: next(left)


def evaluated(values: list[float], folder: Path, *words: str) -> int:
    """Run one step an epoch, with these scores."""
    user = user_of(
        dataset=lambda: pairs(4),
        eval_dataset=lambda: pairs(4, seed=1),
        metrics=figures_of(values),
    )
    program(folder)
    words = "--epochs", str(len(values)), "--save", str(folder / "saved"), *words
    (step, _) = run(folder, user, *words, result=lambda trainer: trainer.step_number)
    return int(step)


@pytest.mark.slow
def test_the_best_one_is_kept(tmp_path: Path) -> None:
    nan = float("nan")
    values = [nan, 1.0, 3.0, 3.0, 2.0, nan, 0.5, 0.5]
    evaluated(values, tmp_path, "--best", "score:max", "--keep", "2")
    assert best(tmp_path / "saved") == "step-000003"
    assert saved(tmp_path / "saved") == [3, 7, 8]
    words = "--best", "score", "--checkpoint-every", "100"
    evaluated(values, tmp_path / "less", *words)
    assert best(tmp_path / "less" / "saved") == "step-000007"


def test_what_evaluations_judged_is_named_where_it_was_not_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to, last = tmp_path / "saved", ["-o", "FILE.safetensors\n"]
    for words, told in (
        ("--best score:max", f"the best, of step 2: gemsc export {to}/best"),
        ("--best score:max --ema 0.5", f"of step 2: gemsc export {to}/best --ema"),
        ("--ema 0.5", f"the averages: gemsc export {to} --ema"),
        ("--best score:min", "saved "),  # the last step was
        ("", "saved "),
    ):
        evaluated([3.0, 4.0, 2.0], tmp_path, *words.split(), "--overwrite")
        out = capsys.readouterr().out
        assert out.endswith(" ".join([told, *last])) or told == "saved "
        assert ("FILE" in out) == (told != "saved ")


def test_a_kill_between_the_two_links_does_not_lose_the_best_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run that goes on may not say again that it is the best."""
    now, link, saves = [0], folder._link, tmp_path / "saved"

    def dies(path: Path, target: str) -> None:
        link(path, target)
        if target == "step-000002":
            raise KeyError("dies")

    def on_step(trainer: Trainer, report: Any) -> None:
        now[0] = report.step

    user = user_of(
        dataset=lambda: pairs(4),
        eval_dataset=lambda: pairs(4, seed=1),
        metrics=lambda output, target: score([3.0, 2.0, 1.0, 3.0][now[0]]),
        on_step=on_step,
    )
    words = "--best", "score", "--epochs", "3", "--keep", "1", "--save", saves
    with monkeypatch.context() as patched:
        patched.setattr(folder, "_link", dies)
        with pytest.raises(KeyError, match="dies"):
            run(program(tmp_path), user, *words)
    run(tmp_path, user, *words, "--resume")
    assert best(saves).startswith("step-000002")


@pytest.mark.slow
def test_it_is_the_least_loss_where_nothing_is_said(tmp_path: Path) -> None:
    evaluated([1.0, 2.0, 3.0], tmp_path)
    assert best(tmp_path / "saved") == "step-000003"


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    """Three epochs of three steps: at once, and with a stop after four steps."""
    names = at_once, in_two = tmp_path / "at_once", tmp_path / "in_two"
    user = user_of(optimizer=torch.optim.Adam)
    directory = program(tmp_path / "program")
    for words in (
        f"--epochs 3 --save {at_once}",
        f"--steps 4 --save {in_two}",
        f"--epochs 3 --resume {in_two} --save {in_two}",
    ):
        run(directory, user, *words.split())
    files = "model.safetensors", "latest/rank0.safetensors", "latest/rank1.safetensors"
    for file in files:  # optimizer and generators, too
        one, other = (load_file(name / file) for name in names)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
        assert file == files[0] or any("optimizer/exp_avg/" in key for key in one)


class Lists(LRScheduler):
    """A scheduler of one's own that keeps a table, and lists that grow and shrink."""

    def __init__(self, optimizer: Any) -> None:
        self.table, self.seen, self.left = np.linspace(0.1, 0.01, 9), [], [2, 4, 6]
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        self.seen.append(float(self.table[self.last_epoch]))
        if self.last_epoch in self.left:
            self.left.pop(0)
        factor = self.table[len(self.left)] * len(self.seen)
        return [factor for _ in self.optimizer.param_groups]

    def state_dict(self) -> Any:
        return [super().state_dict()]

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(*state)


class Lean(torch.optim.Optimizer):
    """Keeps what torch would make of the dtype of the parameters when it is loaded."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:
        every = (p for group in self.param_groups for p in group["params"])
        self.state["of all"]["steps"] = self.state["of all"].get("steps", 0) + 1
        for parameter in (p for p in every if p.grad is not None):
            state = self.state[parameter]
            for name, dtype in (("mean", torch.bfloat16), ("signs", torch.int64)):
                state.setdefault(name, torch.zeros_like(parameter, dtype=dtype))
            state["mean"].lerp_(parameter.grad.bfloat16(), 0.1)
            state["signs"] += parameter.grad > 0
            mean, count = state["mean"].float(), self.state["of all"]["steps"]
            parameter -= 0.1 * count * mean / (1 + state["signs"])


@pytest.mark.slow(1)
@pytest.mark.parametrize("given", [{"scheduler": Lists}, {"optimizer": Lean}])
def test_a_state_of_ones_own_comes_back_as_it_was(
    given: dict[str, Any], tmp_path: Path
) -> None:
    folder, user = program(tmp_path / "program"), user_of(**given)
    words = ("--epochs", "9", "--save", str(tmp_path / "run"), "--steps")
    whole = run(folder, user, *words[:2], "--steps", "7")
    run(folder, user, *words, "3")
    resumed = run(folder, user, *words, "7", "--resume")
    for mine, theirs in zip(whole, resumed, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    if "optimizer" in given:
        (state,) = run(
            program(tmp_path / "one rank", ranks=1),
            user,
            *(*words, "9", "--resume", str(tmp_path / "run"), "--overwrite"),
            ranks=1,
            result=lambda trainer: trainer.worker.updates.optimizer.state,
        )
        assert state["of all"] == {"steps": 9}


@pytest.mark.slow
def test_patience_ends_a_run_and_goes_on_after_a_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--best", "score", "--patience", "3"
    values = [2.0, 1.0, 4.0, 1.0]
    assert evaluated(values, tmp_path, *words) == 4
    resumed = *words, "--resume", str(tmp_path / "saved")
    assert evaluated([0.0] * 4 + [1.0] * 6, tmp_path, *resumed) == 8
    said = "score was not better than 0, of step 5, in the last 3 evaluations"
    assert f"stopped after step 8: {said}" in capsys.readouterr().out
    with pytest.raises(GemscError, match=f"{said}: --patience 3 has ended this run"):
        evaluated([1.0] * 20, tmp_path, *resumed)
    model = tmp_path / "saved" / "model.safetensors"
    model.unlink()  # a kill may leave it out
    assert evaluated([1.0] * 20, tmp_path, *words, "--resume") == 8
    assert f"{tmp_path / 'saved'} has ended: {said}" in capsys.readouterr().out
    assert model.is_file()


@pytest.mark.slow
def test_a_figure_that_no_evaluation_gives(tmp_path: Path) -> None:
    with pytest.raises(GemscError, match="evaluations only have loss, score"):
        evaluated([1.0, 2.0], tmp_path, "--best", "dice:max")
    assert saved(tmp_path / "saved") == [1]
    with pytest.raises(GemscError, match=r"--patience needs evaluations, and .* no "):
        run(tmp_path, user_of(), "--patience", "3")


def test_the_evaluation_at_the_end_of_steps_may_be_the_best(tmp_path: Path) -> None:
    """The checkpoint of the last step waits for it, though no epoch ends."""
    user = user_of(eval_dataset=pairs)
    words = "--steps", "2", "--checkpoint-every", "1", "--save", tmp_path / "saved"
    run(program(tmp_path), user, *words)  # an epoch would have three
    assert saved(tmp_path / "saved") == [1, 2]
    assert best(tmp_path / "saved") == "step-000002"


def test_an_evaluation_that_fails_loses_nothing(tmp_path: Path) -> None:
    """It is made again after a resume: then all is as if it had not failed."""
    program(tmp_path)
    called: list[tuple[int, float]] = []

    def on_epoch(trainer: Trainer, epoch: int, figures: Any) -> None:
        if trainer.transport.rank == 0:
            called.append((epoch, figures["score"]))

    def user(*wrong: int) -> Any:
        def metrics(output: Tensor, target: Tensor) -> Any:
            count.append(0)
            if len(count) in wrong:
                raise ZeroDivisionError("no positives")
            return {"score": float(output.sum())}

        count: list[int] = []
        return user_of(
            dataset=lambda: pairs(8),
            eval_dataset=lambda: pairs(6, seed=1),  # two batches
            metrics=metrics,
            on_epoch=on_epoch,
            scheduler=plateau,
        )

    words = "--epochs", "3", "--ema", "0.5", "--best", "score", "--save"
    wanted = run(tmp_path, user(), *words, tmp_path / "whole")
    undisturbed, called = called, []
    again: tuple[str, ...] = ()
    for step, calls in ((4, (3, 4)), (6, (4,))):  # of two for each evaluation
        with pytest.raises(GemscError, match="no positives") as caught:
            run(tmp_path, user(*calls), *words, tmp_path / "saved", *again)
        again = "--resume", str(tmp_path / "saved")
        kept = f"{tmp_path / 'saved'} holds the checkpoint of step {step}: go on"
        assert kept in str(caught.value)
    resumed = run(tmp_path, user(), *words, tmp_path / "saved", *again)
    assert called == undisturbed
    assert len(called) == 3
    latest = (tmp_path / name / "latest" for name in ("whole", "saved"))
    whole, again_whole = (Manifest.read(path).progress for path in latest)
    assert whole == again_whole  # what has been best, and that nothing is owed
    for ours, theirs in zip(resumed, wanted, strict=True):
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def logged_evaluations(folder: Path) -> list[int]:
    """Return after which steps the log has an evaluation."""
    records = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [record["step"] for record in records if record["event"] == "evaluation"]


@pytest.mark.slow(1)
@pytest.mark.parametrize("fails_in", ["eval_dataset", "on_epoch"])
def test_what_fails_after_the_first_epoch_loses_nothing(
    fails_in: str, tmp_path: Path
) -> None:
    """All is saved before: who fails may be one rank alone, which saves nothing."""
    program(tmp_path)

    class Held:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            if index == 5 and "eval_dataset" in wrong:  # of the second batch
                raise OSError("truncated file")
            return pairs(6)[index]

    def on_epoch(trainer: Trainer, epoch: int, figures: Any) -> None:
        told.append(epoch)
        latest.add((saves / "latest").readlink().name)
        if "on_epoch" in wrong:
            raise KeyError("dice")

    user = user_of(
        dataset=lambda: pairs(8),
        eval_dataset=Held,
        on_epoch=on_epoch,
    )
    words = "--epochs", "2", "--keep", "1", "--checkpoint-async", "--save"
    wrong, told, latest = set[str](), list[int](), set[str]()
    saves = tmp_path / "whole"
    wanted = run(tmp_path, user, *words, saves)
    assert "step-000002-early" in latest
    assert "step-000004-early" not in latest  # of later epochs there is one before
    wrong, undisturbed, told = {fails_in}, told, []
    with pytest.raises(GemscError) as caught:
        run(tmp_path, user, *words, tmp_path / "saved")
    assert "holds the checkpoint of step 2: go on" in str(caught.value)
    assert fails_in in str(caught.value)  # `try eval_dataset()[5] in Python`
    folder = tmp_path / "saved"
    assert [path.name for path in folder.glob("step-*")] == ["step-000002-early"]
    wrong, told = set(), []
    again = "--resume", str(tmp_path / "saved")
    resumed = run(tmp_path, user, *words, tmp_path / "saved", *again)
    assert told == undisturbed
    assert logged_evaluations(folder) == logged_evaluations(saves)
    assert not (folder / "step-000002-early").exists()
    for ours, theirs in zip(resumed, wanted, strict=True):
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)


@pytest.mark.parametrize(("rule", "mode"), [(None, "max"), ("score:max", "min")])
def test_a_plateau_in_the_other_direction_is_refused(
    rule: str | None, mode: Any
) -> None:
    adam = torch.optim.Adam([torch.zeros(1, requires_grad=True)])
    made = torch.optim.lr_scheduler.ReduceLROnPlateau(adam, mode)
    updates = {"": SimpleNamespace(scheduler=made)}
    worker = SimpleNamespace(variants=SimpleNamespace(updates=updates))
    trainer: Any = SimpleNamespace(worker=worker, phases=())
    epochs: Any = None
    with pytest.raises(GemscError, match=f"ReduceLROnPlateau has mode='{mode}'"):
        checkpoints.Best(epochs, rule).on_start(trainer)
    made.mode = "min" if mode == "max" else "max"
    checkpoints.Best(epochs, rule).on_start(trainer)


def test_a_hook_that_steps_a_plateau_again_is_refused() -> None:
    made = plateau(torch.optim.Adam([torch.zeros(1, requires_grad=True)]))
    updates = {"": SimpleNamespace(scheduler=made)}
    worker = SimpleNamespace(variants=SimpleNamespace(updates=updates))
    trainer: Any = SimpleNamespace(worker=worker, step_number=1)
    epochs: Any = SimpleNamespace(place=lambda done: (1, 0))
    best, figures = checkpoints.Best(epochs), {"loss": 1.0}
    best.on_evaluation(trainer, figures)
    best.on_epoch(trainer, 0, figures)
    made.step(figures["loss"])
    with pytest.raises(GemscError, match="which this evaluation has stepped"):
        best.on_epoch(trainer, 0, figures)


@pytest.mark.slow
def test_a_learning_rate_that_falls_on_a_plateau(tmp_path: Path) -> None:
    """It is stepped by evaluations, in each phase; without any, that is said."""
    program(tmp_path)
    same = lambda output, target: {"score": 1.0}  # noqa: E731
    user = user_of(eval_dataset=pairs, metrics=same, scheduler=plateau)
    rate = lambda trainer: trainer.optimizer.param_groups[0]["lr"]  # noqa: E731
    words = "--epochs", "3", "--best", "score"
    assert run(tmp_path, user, *words, result=rate) == [pytest.approx(1e-4)] * 2
    with pytest.raises(GemscError, match="ReduceLROnPlateau needs evaluations"):
        run(tmp_path, user_of(scheduler=plateau))
    worker = SimpleNamespace(variants=SimpleNamespace(updates={}))
    for name, scheduler in (("d", plateau), ("g", None)):
        adam = torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=1.0)
        made = scheduler(adam) if scheduler else object()
        worker.variants.updates[name] = SimpleNamespace(scheduler=made)
    trainer: Any = SimpleNamespace(worker=worker, scheduler=None, step_number=1)
    within = [0, 0, 3]  # the last evaluation is of a run that ends within an epoch
    epochs: Any = SimpleNamespace(place=lambda done: (0, within.pop(0)))
    best = checkpoints.Best(epochs)
    for value in (1.0, 2.0, 3.0):
        best.on_evaluation(trainer, {"loss": value})
    assert worker.variants.updates["d"].scheduler.get_last_lr() == [pytest.approx(0.1)]
    assert best.since == 2
    trainer.phases = ("d", "g")
    with pytest.raises(GemscError, match="ReduceLROnPlateau asks for a held-out loss"):
        best.on_start(trainer)


def test_what_a_hook_saves_in_the_last_step_of_an_epoch_owes_its_end(
    tmp_path: Path,
) -> None:
    epochs = []

    def on_step(trainer: Trainer, report: Any) -> None:
        if report.step == 3:
            trainer.save(tmp_path / "own")

    def on_epoch(trainer: Trainer, epoch: int, figures: dict[str, float]) -> None:
        epochs.append(epoch)

    hooks = {"on_step": on_step, "on_epoch": on_epoch}
    user = user_of(eval_dataset=pairs, scheduler=plateau, **hooks)
    words = "--epochs", "2", "--save", str(tmp_path / "run")
    whole = run(program(tmp_path / "program"), user, *words)
    resumed = run(tmp_path / "program", user, *words, "--resume", tmp_path / "own")
    assert sorted(epochs) == [0] * 4 + [1] * 4
    assert all(torch.equal(resumed[0][name], whole[0][name]) for name in whole[0])


def test_what_was_the_best_of_another_figure_is_forgotten() -> None:
    epochs: Any = SimpleNamespace(owes_end=False)
    state = {"name": "loss", "value": 0.1, "step": 4, "since": 2, "is_owed": True}
    for more in {}, {"larger": False}:  # older checkpoints do not say it
        for rule, value in (("loss:min", 0.1), ("dice:min", None)):
            best = checkpoints.Best(epochs, rule, patience=3)
            best.load_state_dict({**state, **more})
            assert best.value == value
            assert best.since == (2 if value else 0)
    best = checkpoints.Best(epochs, "loss:max")
    best.load_state_dict({**state, **more})
    assert best.value is None


def test_that_phases_have_no_best_loss_is_said_before_they_are_trained() -> None:
    epochs: Any = SimpleNamespace(owes_end=False)
    worker = SimpleNamespace(variants=SimpleNamespace(updates={}))
    trainer: Any = SimpleNamespace(phases=("d", "g"), worker=worker)
    trainer.transport = SimpleNamespace(rank=0)
    asked: Any = ({"patience": 2}, {"rule": "loss"})
    for given in asked:
        with pytest.raises(GemscError, match="a held-out loss, and phases have none"):
            checkpoints.Best(epochs, **given).on_start(trainer)
    for given in ({}, {"rule": "dice"}):
        checkpoints.Best(epochs, **given).on_start(trainer)


def test_which_direction_is_the_best_is_said_where_nobody_asks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    worker = SimpleNamespace(variants=SimpleNamespace(updates={}))
    transport, epochs = SimpleNamespace(rank=0), SimpleNamespace(owes_end=False)
    trainer: Any = SimpleNamespace(phases=(), worker=worker, transport=transport)
    for rule in (None, "loss", "dice:max", "rmse:min", "dice"):
        assert capsys.readouterr().err == ""
        checkpoints.Best(epochs, rule).on_start(trainer)  # type: ignore[arg-type]
    told = capsys.readouterr().err
    assert told.startswith("note: --best dice: the smallest is the best; ")


def dice(output: Tensor, target: Tensor) -> Any:
    return {"dice": output.mean(), "parts": {"left": target.sum()}}


@pytest.mark.parametrize("made", [{"interval": "epoch"}, []])
def test_what_steps_no_rates_is_no_scheduler(tmp_path: Path, made: object) -> None:
    program(tmp_path)
    name = type(made).__name__
    with pytest.raises(GemscError, match=f"returns {name}, which cannot step"):
        run(tmp_path, user_of(scheduler=lambda optimizer: made))
    run(tmp_path, user_of(scheduler=lambda optimizer: None), "--steps", "1")
    forgets = user_of(scheduler=lambda optimizer: [LambdaLR(optimizer, float)].clear())
    with pytest.raises(GemscError, match=r"changes learning rates, but returns None"):
        run(tmp_path, forgets)
    steps_alone = SimpleNamespace(step=print)
    with pytest.raises(GemscError, match=r"SimpleNamespace, which has no state_dict"):
        run(tmp_path, user_of(scheduler=lambda optimizer: steps_alone))
    of_timm = SimpleNamespace(step=lambda epoch, metric=None: None)
    with pytest.raises(GemscError, match=r"step\(\) of SimpleNamespace, .* arguments"):
        run(tmp_path, user_of(scheduler=lambda optimizer: of_timm))


def test_a_scheduler_that_needs_groups_of_other_ranks_is_told_what_helps(
    tmp_path: Path,
) -> None:
    def optimizer(pairs: Any, *, layers: str) -> torch.optim.Optimizer:
        named = [*pairs]
        of = ([p for n, p in named if n.startswith(layer)] for layer in layers)
        groups = [group for group in of if group or layers == "abc"]
        return torch.optim.SGD([{"params": group} for group in groups], lr=0.1)

    def scheduler(made: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(made, [0.1, 0.2, 0.3], 20)

    program(tmp_path)
    of_rank = functools.partial(optimizer, layers="cab")
    with pytest.raises(ValueError, match="must have the same length") as error:
        run(tmp_path, user_of(optimizer=of_rank, scheduler=scheduler), "--steps", "1")
    assert "make all groups on each rank" in str(error.value.__notes__)
    everywhere = functools.partial(optimizer, layers="abc")
    run(tmp_path, user_of(optimizer=everywhere, scheduler=scheduler), "--steps", "1")


@pytest.mark.slow(1)
@pytest.mark.parametrize(("length", "is_told"), [(2, True), (3, False)])
def test_a_scheduler_that_counts_in_epochs_is_told(
    length: int, is_told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def scheduler(made: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(made, length)

    words = "--epochs", "2", "--accumulate", "2"  # three updates
    run(program(tmp_path), user_of(scheduler=scheduler), *words)
    text = "CosineAnnealingLR has T_max=2, and this run makes 3 updates: it rises"
    assert (text in capsys.readouterr().err) == is_told


@pytest.mark.parametrize(
    ("every", "length", "is_told"),
    [(2, 3, False), (2, 2, True), (1, [2, 4], False), (1, None, False)],
)
def test_the_length_of_a_scheduler_is_compared_with_the_updates_of_its_phase(
    every: int, length: Any, is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer: Any = SimpleNamespace(
        phases=[SimpleNamespace(every=every)],
        scheduler=SimpleNamespace(total_steps=length),
        transport=SimpleNamespace(rank=0),
        worker=SimpleNamespace(steps=SimpleNamespace(accumulate=1)),
    )
    warn_of_length(trainer, 5)
    text = "has total_steps=2, and this run makes 3 updates\n"
    assert (text in capsys.readouterr().err) == is_told


def test_a_state_that_no_checkpoint_can_hold_ends_a_run_at_its_first_step(
    tmp_path: Path,
) -> None:
    """Not after an epoch, which would be lost."""

    class WarmUp(torch.optim.lr_scheduler.ConstantLR):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            super().__init__(optimizer)
            self.after = torch.optim.lr_scheduler.ConstantLR(optimizer)

    def seen(trainer: Trainer, report: Any) -> None:
        steps.append(report.step)

    directory, steps = program(tmp_path), list[int]()
    words = "--save", str(tmp_path / "saved"), "--checkpoint-every", "3"
    user = user_of(scheduler=WarmUp, on_step=seen)
    with pytest.raises(GemscError, match="after holds a ConstantLR, which no check"):
        run(directory, user, *words)
    assert {*steps} == {1}
    run(directory, user, *words[:3], "never", "--overwrite", "--steps", "2")
    assert {*steps} == {1, 2}


@pytest.mark.slow
def test_a_figure_that_metrics_cannot_give_is_refused_at_the_start(
    tmp_path: Path,
) -> None:
    """As far as its text says what it gives."""
    program(tmp_path)
    short = lambda output, target: {"dice": 1, "parts": 1}  # noqa: E731
    given = (dice, {"dice": max, "parts": max}, short, None)
    for metrics in given:
        user = user_of(dataset=pairs, eval_dataset=pairs, metrics=metrics)
        said = "--best dise: evaluations only have loss"
        said += ", dice, parts" if metrics else "\n"
        with pytest.raises(GemscError, match=said):
            run(tmp_path, user, "--best", "dise:max", "--save", str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()
    user = user_of(dataset=pairs, eval_dataset=pairs, metrics=dice)
    for rule in ("loss", "dice:max", "parts_left"):
        run(tmp_path, user, "--steps", "1", "--best", rule)


def test_a_best_checkpoint_of_none_is_refused() -> None:
    words = "--checkpoint-every", "never", "--best", "dice:max"
    with pytest.raises(GemscError, match="--checkpoint-every never saves none"):
        parse_arguments(words)
    assert parse_arguments([*words, "--patience", "3"]).best == "dice:max"


def test_names_are_known_only_if_every_result_says_them() -> None:
    def some(output: Any, target: Any) -> Any:
        if output is None:
            return {}
        return {"dice": 1}

    def open_ended(output: Any, target: Any) -> Any:
        return {"dice": 1, **target}

    def other(output: Any, target: Any) -> Any:
        if output is None:
            return {"dice": 1}
        return target

    def computed(output: Any, target: Any) -> Any:
        return {"dice": 1, str(target): 1}

    assert figure_names(some) == ["dice"]
    wrapped = functools.wraps(some)(lambda *given: {"best": some(*given)})
    alone = lambda output, target: {"a": 1, "b": target}  # noqa: E731
    assert figure_names(alone) == ["a", "b"]
    passed = lambda output, target: some(output, target)  # noqa: E731
    two = [lambda output, target: {"a": 1}, lambda output, target: {"b": 1}]
    for unknown in (open_ended, other, computed, wrapped, max, passed, *two):
        assert figure_names(unknown) is None


CLIPS = ("-1", "0", "nan", "one")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "--checkpoint-every=often",
            "'often' is not an interval: write for example 100",
        ),
        ("--checkpoint-every=0", "'0' is not a whole number above 0"),
        ("--best=dice:larger", "'dice:larger' is not NAME, NAME:min or NAME:max"),
        ("--ema=1", "'1' is not a number from 0 up to 1"),
        ("--keep=0", "'0' is not a whole number above 0"),
        *((f"--clip-norm={n}", f"'{n}' is not a number above 0") for n in CLIPS),
        ("--workers=-1", "'-1' is not a whole number from 0 on"),
        (f"--seed={2**64}", "is not a whole number from"),
        ("--ranks=4", "--ranks is an option of gemsc compile: compile the model again"),
    ],
)
def test_what_cannot_be_asked_for(word: str, message: str) -> None:
    with pytest.raises(GemscError, match=message):
        parse_arguments([word])
