"""The loop and what goes with it: hooks, callbacks, requests of one rank to all."""

from __future__ import annotations

import inspect
import re
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stderr
from dataclasses import replace
from functools import partial
from io import StringIO
from multiprocessing import active_children, current_process
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from program_support import Net, X, batch_of, on_ranks
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader, TensorDataset
from training_support import FromTest, pairs, program, run, simple, user_of

import gemsc
from gemsc.base.rng import seed_of
from gemsc.errors import GemscError, SourceLocation
from gemsc.runtime.data import batches
from gemsc.runtime.process.status import Status
from gemsc.runtime.training import callbacks
from gemsc.runtime.training.callbacks import Hooks
from gemsc.runtime.training.step_report import StepReport
from gemsc.runtime.training.trainer import Trainer


def steps(trainer: Trainer) -> int:
    return trainer.step_number


@pytest.mark.slow
def test_hooks_are_called_on_all_ranks_with_what_happened(tmp_path: Path) -> None:
    seen: list[Any] = []

    def on_step(trainer: Trainer, report: StepReport) -> None:
        rate = trainer.optimizer.param_groups[0]["lr"] if trainer.optimizer else 0
        seen.append((trainer.transport.rank, trainer.epoch, report.step, rate))

    def on_epoch(trainer: Trainer, epoch: int, figures: dict[str, float]) -> None:
        assert trainer.optimizer is not None
        trainer.optimizer.param_groups[0]["lr"] /= 2
        seen.append((trainer.transport.rank, epoch, sorted(figures)))

    user = user_of(on_step=on_step, on_epoch=on_epoch, eval_dataset=pairs)
    run(program(tmp_path), user, "--epochs", "2")
    for rank in (0, 1):
        steps = [(0, 1, 0.01), (0, 2, 0.01), (0, 3, 0.01), (1, 4, 0.005)]
        assert [event[1:] for event in seen if event[0] == rank] == [
            *steps[:3],
            (0, ["loss"]),
            *steps[3:],
            (1, 5, 0.005),
            (1, 6, 0.005),
            (1, ["loss"]),
        ]


def test_a_run_that_goes_on_with_other_options_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, save = program(tmp_path), str(tmp_path / "run")
    words = ("--save", save, "--clip-norm", "0.5", "--steps")
    run(folder, user_of(), *words, "1")
    run(folder, user_of(), *words, "2", "--resume", save)
    said = "note: this run continues with other options than it had"
    assert said not in capfd.readouterr().out
    run(folder, user_of(), "--save", save, "--steps", "3", "--resume", save)
    assert f"{said}: --clip-norm none (was 0.5)\n" in capfd.readouterr().out


def test_a_resumed_epoch_is_shown_from_where_it_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, save = program(tmp_path), str(tmp_path / "run")
    words = ("--save", save, "--epochs", "2")
    run(folder, user_of(), *words, "--steps", "1")
    run(folder, user_of(), *words, "--resume")
    shown = re.findall(r"^(epoch \S+ \S+)  loss", capfd.readouterr().out, re.MULTILINE)
    assert shown[1:3] == ["epoch 1/2 2/3", "epoch 1/2 3/3"]
    assert shown[3] == "epoch 2/2 1/3"


@pytest.mark.slow(1)
@pytest.mark.parametrize("name", ["lr", "initial_lr"])
def test_a_run_that_goes_on_with_another_rate_in_its_file_says_what_counts(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, save = program(tmp_path), str(tmp_path / "run")
    falls = {"scheduler": lambda made: StepLR(made, 1)} if name != "lr" else {}

    def of(rate: float) -> SimpleNamespace:
        return user_of(optimizer=lambda pairs: SGD(pairs, lr=rate), **falls)

    run(folder, of(0.5), "--save", save, "--steps", "1")
    run(folder, of(0.5), "--save", save, "--steps", "2", "--resume", save)
    assert "keeps the values" not in capfd.readouterr().err
    run(folder, of(0.25), "--save", save, "--steps", "3", "--resume", save)
    said = f"of the checkpoint: {name} 0.5 (optimizer() gives 0.25); on_step"
    assert capfd.readouterr().err.count(said) == 1


def test_the_rates_of_a_scheduler_of_ones_own_are_not_said_to_differ(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Falls:
        def __init__(self, made: SGD) -> None:
            self.made, self.count = made, 0

        def step(self) -> None:
            self.count += 1
            self.made.param_groups[0]["lr"] = 0.1 / self.count

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    folder, save = program(tmp_path), str(tmp_path / "run")
    user = user_of(scheduler=Falls)
    run(folder, user, "--save", save, "--steps", "2")
    run(folder, user, "--save", save, "--steps", "3", "--resume", save)
    assert "keeps the values" not in capfd.readouterr().err
    del Falls.load_state_dict
    with pytest.raises(GemscError, match=r"Falls, which has no load_state_dict\(\)"):
        run(folder, user, "--steps", "1")


def test_a_run_that_goes_on_with_another_schedule_in_its_file_says_what_counts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, save = program(tmp_path), str(tmp_path / "run")

    def of(steps: int) -> SimpleNamespace:
        return user_of(scheduler=lambda made: StepLR(made, steps))

    run(folder, of(2), "--save", save, "--steps", "1")
    run(folder, of(2), "--save", save, "--steps", "2", "--resume", save)
    assert "keeps the values" not in capfd.readouterr().err
    run(folder, of(4), "--save", save, "--steps", "3", "--resume", save)
    said = "the scheduler keeps the values of the checkpoint: step_size 2 (scheduler()"
    assert capfd.readouterr().err.count(f"{said} gives 4); on_step can change") == 1


def of_head(named: Any, rate: float) -> SGD:
    """Return what the first rank has none of."""
    return SGD([p for name, p in named if name.startswith("c")], lr=rate)


def warmed(made: SGD, steps: int) -> Any:
    return SequentialLR(made, [LinearLR(made), CosineAnnealingLR(made, steps)], [steps])


NOW_OTHERWISE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a rate of the last rank": (
        {"optimizer": partial(of_head, rate=0.5)},
        {"optimizer": partial(of_head, rate=0.25)},
        "the checkpoint: lr 0.5 (optimizer() gives 0.25); on_step",
    ),
    "a schedule of a sequence": (
        {"scheduler": partial(warmed, steps=2)},
        {"scheduler": partial(warmed, steps=4)},
        "milestones [2] (scheduler() gives [4]), T_max 2 (scheduler() gives 4); on",
    ),
    "more parameters": (
        {"optimizer": partial(of_head, rate=0.5)},
        {"optimizer": partial(SGD, lr=0.5)},
        "that the checkpoint's did not have: a.weight, a.bias, b.weight and 3 more\n",
    ),
    "the first scheduler": (
        {},
        {"scheduler": LinearLR},
        "the checkpoint has no scheduler: LinearLR begins, as scheduler() makes it\n",
    ),
}


@pytest.mark.slow(2)
@pytest.mark.parametrize("name", NOW_OTHERWISE)
def test_what_goes_on_otherwise_than_its_file_has_it_now_is_told_once(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before, now, said = NOW_OTHERWISE[name]
    words = "--save", str(tmp_path / "run"), "--steps"
    run(program(tmp_path), user_of(**before), *words, "1")
    run(tmp_path, user_of(**before), *words, "2", "--resume")
    assert "note:" not in capfd.readouterr().err

    def rates(trainer: Trainer) -> list[float]:
        made = trainer.optimizer
        return [] if made is None else [group["lr"] for group in made.param_groups]

    resumed = run(tmp_path, user_of(**now), *words, "3", "--resume", result=rates)
    error = capfd.readouterr().err
    assert error.count(said) == error.count("note:") == 1, error
    if "the first" in name:  # it has made one step
        assert resumed == run(tmp_path, user_of(**now), "--steps", "1", result=rates)


def test_parameters_that_a_hook_gave_the_optimizer_are_not_left_out(
    tmp_path: Path,
) -> None:
    def weights(named: Any) -> SGD:
        return SGD([p for name, p in named if name.endswith("weight")], lr=0.1)

    def on_step(trainer: Trainer, report: StepReport) -> None:
        if report.step == 1:
            named = trainer.worker.updates.parameters.items()
            biases = [p for name, p in named if name.endswith("bias")]
            trainer.optimizer.add_param_group({"params": biases})

    user = user_of(optimizer=weights, on_step=on_step)
    words = "--save", str(tmp_path / "run"), "--steps"
    run(program(tmp_path), user, *words, "2")
    with pytest.raises(GemscError, match=r"bias', which optimizer\(\) now leaves out"):
        run(tmp_path, user, *words, "3", "--resume")


def test_a_run_that_goes_on_takes_the_kernels_of_its_optimizer_from_the_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, save, fused = program(tmp_path), str(tmp_path / "run"), []

    def on_step(trainer: Trainer, report: StepReport) -> None:
        fused.append(trainer.optimizer.param_groups[0]["fused"])

    for number, is_fused in enumerate((None, True, None)):
        user = user_of(optimizer=partial(Adam, fused=is_fused), on_step=on_step)
        goes_on = ["--resume", save] if number else []
        run(folder, user, "--save", save, "--steps", str(number + 1), *goes_on)
        assert [*fused] == [is_fused] * 2  # of both ranks
        fused.clear()
    assert "keeps the values" not in capfd.readouterr().err


@pytest.mark.slow(3)
@pytest.mark.parametrize(
    ("reads", "is_stream", "workers", "advice"),
    [
        (0.6, False, 0, "; try --workers 2 to"),
        (0.6, False, 1, "; try more --workers to"),
        (0.6, True, 0, "; try --workers 1 to"),
        (0.6, True, 1, ""),
        (0.2, False, 0, ""),
    ],
)
def test_a_run_whose_ranks_wait_for_data_says_so_once(
    reads: float,
    is_stream: bool,
    workers: int,
    advice: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Each step takes half a minute, of which reading has a share."""
    now = [0.0]
    monkeypatch.setattr(callbacks, "perf_counter", lambda: now[0])

    def without_processes(*given: Any, **options: Any) -> DataLoader[Any]:
        """A process that a thread starts might inherit another one's lock."""
        off = {"num_workers": 0, "persistent_workers": False}
        return DataLoader(*given, **options | off)

    monkeypatch.setattr(batches, "DataLoader", without_processes)

    def read(status: Status, source: Iterable[Any]) -> Iterator[Any]:
        for item in source:
            if status.rank == 0:
                now[0] += 30.0
                status.read_seconds += 30.0 * reads
            yield item

    begin = callbacks.Console.on_start

    def after_reading(console: callbacks.Console, trainer: Any) -> None:
        """What was read before the run is no part of it."""
        trainer.worker.status.read_seconds += 1e4
        begin(console, trainer)

    monkeypatch.setattr(Status, "while_reading", read)
    monkeypatch.setattr(callbacks.Console, "on_start", after_reading)
    user = (
        user_of(dataset=lambda: gemsc.Stream([*pairs()], samples=12))
        if is_stream
        else user_of()
    )
    run(program(tmp_path), user, "--epochs", "2", "--workers", str(workers))
    said = capfd.readouterr().out
    text = f"note: so far, the ranks have waited for data 60% of the time{advice}"
    assert said.count(text) == said.count("have waited") == bool(advice)


def test_the_time_in_which_ranks_wait_for_data_is_that_of_the_source() -> None:
    def source() -> Iterator[int]:
        for number in range(2):
            time.sleep(0.05)
            yield number

    status = Status()
    for _ in status.while_reading(source()):
        before = status.read_seconds
        time.sleep(0.2)
        assert status.read_seconds == before
    assert status.read_seconds >= 0.1


@pytest.mark.slow
def test_a_run_ends_the_processes_that_read_for_it(
    tmp_path: Path, tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked to leave, each would outlast that for half a minute.

    Their sockets stand in one folder, which Python removes with this process.
    """
    folder = tmp_path_factory.mktemp("sockets")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's own: ranks are threads here
    monkeypatch.setitem(current_process()._config, "tempdir", None)
    readers: set[Any] = set()

    def on_epoch(trainer: Trainer, epoch: int, figures: dict[str, float]) -> None:
        readers.update(active_children())

    user = user_of(on_epoch=on_epoch, eval_dataset=pairs)
    run(program(tmp_path), user, "--epochs", "2", "--workers", "1")
    assert [reader.exitcode for reader in readers] == [-9] * 4  # of two datasets
    # one, or one for each rank: threads may make it at once
    assert len(list(folder.glob("pymp-*"))) in (1, 2)


@pytest.mark.slow
def test_an_optimizer_may_take_parameters_of_some_ranks_only(tmp_path: Path) -> None:
    def of(name: str) -> Any:
        return lambda pairs: torch.optim.Adam(
            [p for n, p in pairs if n.startswith(name)], weight_decay=0.1
        )

    program(tmp_path)
    before, saved = Net(simple).state_dict(), str(tmp_path / "saved")
    words = "--save", saved, "--steps"
    for more in (["2"], ["4", "--resume", saved]):
        run(tmp_path, user_of(optimizer=of("c")), *words, *more)
        weights = load_file(Path(saved, "model.safetensors"))
        for name, tensor in weights.items():
            assert torch.equal(tensor, before[name]) != name.startswith("c")
    with pytest.raises(GemscError, match=r"test_training.py:\d+: .* has none of the"):
        run(tmp_path, user_of(optimizer=of("nothing")), "--steps", "1")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_may_stop_all(
    rank: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def on_step(trainer: Trainer, report: StepReport) -> None:
        if trainer.transport.rank == rank and report.step == 1:
            trainer.stop("it is enough")

    def on_epoch(trainer: Trainer, epoch: int, figures: dict[str, float]) -> None:
        if trainer.transport.rank == rank and epoch == 1:
            trainer.stop("it is late")

    program(tmp_path)
    words = "--epochs", "4"
    assert run(tmp_path, user_of(on_step=on_step), *words, result=steps) == [2, 2]
    assert "stopped after step 2: it is enough" in capsys.readouterr().out
    user, saved = user_of(on_epoch=on_epoch), ("--save", str(tmp_path / "run"))
    assert run(tmp_path, user, *words, *saved, result=steps) == [6, 6]
    assert "stopped after step 6: it is late" in capsys.readouterr().out
    assert run(tmp_path, user, *words, *saved, "--resume", result=steps) == [12, 12]
    said = "note: this run was stopped after step 6 (it is late), and trains on"
    assert said in capsys.readouterr().out


@pytest.mark.slow
def test_a_hook_that_fails_is_named_with_its_line(tmp_path: Path) -> None:
    def on_step(trainer: Trainer, report: StepReport) -> None:
        raise KeyError("nothing")

    with pytest.raises(
        GemscError, match=r"on_step\(\) fails: KeyError: 'nothing'"
    ) as e:
        run(program(tmp_path), user_of(on_step=on_step))
    assert e.value.at is not None
    assert e.value.at.line == inspect.getsourcelines(on_step)[1] + 1
    assert e.value.help == "gemsc calls on_step(trainer, report) on every rank"


KNOBS = {"beta": 0.0, "own": 0.0}


class Weighed(nn.Module):
    """A loss with what hooks may want to change."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.terms, self.kind = 1.0, [1.0, 2.0], "l1"
        self.register_buffer("margin", torch.zeros(()))
        self.net = nn.Linear(2, 2)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.terms[0] * weighed(output) * self.weight


def weighed(output: Tensor) -> Tensor:
    return output.sum() * KNOBS["beta"]


def set_attribute(model: nn.Module, loss: Weighed) -> None:
    loss.weight = 0.5


def set_item(model: nn.Module, loss: Weighed) -> None:
    loss.terms[1] = 0.5


def set_text(model: nn.Module, loss: Weighed) -> None:
    loss.kind = "l2"


def fill_buffer(model: nn.Module, loss: Weighed) -> None:
    loss.margin.fill_(0.5)


def set_knob(model: nn.Module, loss: Weighed) -> None:
    KNOBS["beta"] += 0.1


def set_rate(model: nn.Module, loss: Weighed) -> None:
    model.dropout.p = 0.5  # type: ignore[union-attr, assignment]


def try_model(model: nn.Module, loss: Weighed) -> None:
    model.eval()
    for tensor in model.state_dict().values():
        tensor.fill_(1)
    model.new = 1  # type: ignore[assignment]


def add_term(model: nn.Module, loss: Weighed) -> None:
    loss.terms.append(3.0)


def told(changes: Any, first: int = 1, hook: str = "on_step", rank: int = 0) -> Any:
    """Let a hook change something from a step on; return what is told of 9 steps."""
    model, loss = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), Weighed()
    model.dropout = nn.Dropout(0.1)
    seen: list[int] = []

    def called(trainer: Any, number: Any, *figures: Any) -> None:
        seen.append(len(seen))
        if len(seen) >= first:
            changes(model, loss)

    user: Any = user_of(loss=loss, **{hook: called})
    hooks = Hooks(replace(user, model=model))
    transport = SimpleNamespace(rank=rank)
    trainer: Any = SimpleNamespace(transport=transport, phases=(), epoch=0)
    errors, before = StringIO(), dict(KNOBS)
    hooks.on_load(trainer)
    with redirect_stderr(errors):
        for step in range(9):
            report: Any = SimpleNamespace(step=step + 1)
            hooks.on_step(trainer, report)
            hooks.on_epoch(trainer, step, {})
    KNOBS.update(before)
    assert len(seen) == 9
    if not (text := errors.getvalue()):
        return None
    where = r"test_training.py(?::\d+)?"
    who = rf"(?:{hook}|training) changes"
    (change,) = re.findall(rf"{where}: warning: {who} (.*): the program", text)
    return change


@pytest.mark.slow(3)
@pytest.mark.parametrize(
    ("changes", "name"),
    [
        (set_attribute, "loss.weight"),
        (set_item, "loss.terms[1]"),
        (set_text, "loss.kind"),
        (fill_buffer, "loss._buffers['margin']"),
        (set_knob, "loss.Weighed.forward.weighed.KNOBS['beta']"),
        (set_rate, "model._modules['dropout'].p"),
    ],
)
def test_a_hook_that_changes_what_was_compiled_is_told_once(
    changes: Any, name: str
) -> None:
    """The annealing of a term, for one: the ranks have its first weight for ever."""
    assert told(changes) == name
    assert told(changes, first=5) == name  # at the eighth
    assert told(changes, first=9) == name  # after the epoch
    assert told(changes, first=9, hook="on_epoch") == name
    assert told(changes, rank=1) is None


@pytest.mark.parametrize("changes", [try_model, add_term])
def test_what_a_hook_may_change(changes: Any) -> None:
    assert told(changes) is None


@pytest.mark.parametrize("where", ["epoch", "scheduler", "metrics"])
def test_what_others_change_is_told_unless_it_is_in_an_evaluation(
    where: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By a rank that reads: the annealing of a term, or of the margin of a loss."""
    program(tmp_path / "program")
    loss = Weighed()

    def heavier(*given: Any) -> Any:
        loss.weight += 0.5
        return 1.0

    class Epochs(TensorDataset):
        set_epoch = heavier

    given: dict[str, Any] = {
        "epoch": {"dataset": lambda: Epochs(*pairs().tensors)},
        "scheduler": {"scheduler": lambda made: LambdaLR(made, heavier)},
        "metrics": {"eval_dataset": pairs, "metrics": {"weight": heavier}},
    }[where]
    user = replace(user_of(**given), model=loss)
    run(tmp_path / "program", user, "--epochs", 2, "--save", tmp_path / "run")
    said = capfd.readouterr().err
    name = "training changes model.weight: the program keeps what that was when"
    assert said.count(name) == (where != "metrics"), said
    assert said.count("warning") == (where != "metrics")


class Events(gemsc.Callback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_start(self, trainer: Trainer) -> None:
        self.seen.append("start")

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        self.seen.append(f"step {report.step}")
        if report.step == 2:
            trainer.stop("enough")

    def on_save(self, trainer: Trainer, folder: Path) -> None:
        self.seen.append(f"save {folder.name}")


def test_a_loop_of_ones_own_has_callbacks_and_stops_on_all_ranks(
    tmp_path: Path,
) -> None:
    program(tmp_path)
    x, target = batch_of((X, X), 2)

    def work(trainer: Trainer) -> list[str]:
        if trainer.transport.rank == 1:
            trainer.callbacks.append(events := Events())
        else:
            events = Events()
        while not trainer.is_stopping:
            trainer.step(x, target)
        trainer.save(tmp_path / "saved")
        return [*events.seen, str(trainer.step_number)]

    assert on_ranks(tmp_path, 2, work) == [
        ["3"],
        ["start", "step 1", "step 2", "step 3", "save saved", "3"],
    ]


class Counts(gemsc.Callback):
    """Counts otherwise on each rank."""

    count = 0

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        self.count += 1 + trainer.transport.rank

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.count = state["count"]


@pytest.mark.slow(1)
@pytest.mark.parametrize(("ranks", "counts"), [(2, [2, 4]), (3, [2, 3, 4])])
def test_a_callback_goes_on_with_the_state_of_its_rank(
    ranks: int, counts: list[int], tmp_path: Path
) -> None:
    """In another layout all go on with that of the first rank; so do two of a kind."""
    x, target = batch_of((X, X), 4)

    def work(trainer: Trainer) -> int:
        trainer.add_callbacks([counted := Counts(), further := Counts()])
        further.count = 10
        if (tmp_path / "saved").exists():
            trainer.resume(tmp_path / "saved")
        trainer.step(x, target)
        trainer.save(tmp_path / "saved")
        assert further.count == counted.count + 10
        return counted.count

    program(tmp_path / "2", ranks=2, micro_batches=4)
    program(tmp_path / "3", ranks=3, micro_batches=4)
    assert on_ranks(tmp_path / "2", 2, work) == [1, 2]
    assert on_ranks(tmp_path / str(ranks), ranks, work) == counts


def test_load_takes_what_a_trainer_takes() -> None:
    """Options of a run are those of one's own loop."""
    ours = {"directory", "transport", "streams", "self"}
    taken = inspect.signature(Trainer.__init__).parameters.keys() - ours
    assert taken <= inspect.signature(gemsc.load).parameters.keys()


@pytest.mark.slow(3)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("name", "wrong"), [("dataset", 9), ("eval_dataset", 9), ("eval_dataset", 12)]
)
def test_the_samples_of_a_micro_batch_that_fails_are_named(
    name: str, wrong: int, ranks: int, tmp_path: Path
) -> None:
    """A class that is not there: 13 samples are not read in order, or in order."""

    def labelled(label: int) -> list[tuple[Tensor, int]]:
        return [(X[0], label if i == wrong else i % 4) for i in range(13)]

    given = {"loss": nn.CrossEntropyLoss(), "target": torch.tensor([0, 1])}
    program(tmp_path, ranks=ranks, data=ranks // 2, **given)
    data = {"dataset": labelled(1), "eval_dataset": labelled(1), name: labelled(4)}
    user = user_of(**{key: partial(list, value) for key, value in data.items()})
    with pytest.raises(IndexError, match="out of bounds") as caught:
        run(tmp_path, user, "--epochs", "1", ranks=ranks)
    order = torch.randperm(
        13, generator=torch.Generator().manual_seed(seed_of(0, 0))
    ).tolist()
    place = order.index(9) // 2 * 2
    named = {9: "8, 9", 12: "12"}[wrong]  # the last one fills up the other replica's
    if name == "dataset":
        named = ", ".join(map(str, order[place : place + 2]))
    note = f"note: this micro-batch has samples {named}"
    assert caught.value.__notes__[0] == note


class Fails(SGD):
    def step(self, closure: Any = None) -> None:
        raise ZeroDivisionError("no step")


def test_no_samples_are_named_where_something_else_fails(tmp_path: Path) -> None:
    user = user_of(optimizer=partial(Fails, lr=0.1))
    with pytest.raises(ZeroDivisionError) as caught:
        run(program(tmp_path), user, "--epochs", "1")
    assert not any("samples" in note for note in caught.value.__notes__)


def test_a_wrong_eval_dataset_is_named_with_its_line(tmp_path: Path) -> None:
    def eval_dataset() -> Any:
        return DataLoader(pairs())

    user = user_of(eval_dataset=eval_dataset)
    here = SourceLocation(__file__, 7)
    FromTest.known[user.path, "eval_dataset"] = here
    with pytest.raises(GemscError, match="does not return samples by index") as caught:
        run(program(tmp_path), user, "--epochs", "1")
    assert caught.value.at == here


def test_an_eval_dataset_that_does_not_fit_is_refused_before_the_first_step(
    tmp_path: Path,
) -> None:
    steps: list[int] = []
    user = user_of(
        eval_dataset=lambda: [(torch.randn(7), X[0])] * 4,
        on_step=lambda trainer, report: steps.append(report.step),
    )
    with pytest.raises(GemscError, match=r"eval_dataset: .* shape \[4, 7\]") as caught:
        run(program(tmp_path), user, "--epochs", "1")
    assert caught.value.at == user.line_of("eval_dataset")
    assert not steps


def test_evaluation_does_not_draw_what_training_draws(tmp_path: Path) -> None:
    seen: set[tuple[str, int]] = set()

    def seeded(name: str) -> Any:
        seen.add((name, torch.initial_seed()))
        return pairs(4)

    names = "dataset", "eval_dataset"
    user = user_of(**{name: partial(seeded, name) for name in names})
    run(program(tmp_path), user, "--epochs", "1")
    assert seen == {("dataset", 0), ("eval_dataset", seed_of(0, -1))}
