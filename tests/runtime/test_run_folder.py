"""The folder of a run: chosen, not overwritten by mistake, with a log that goes on."""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from program_support import Net, X, batch_of, on_ranks, written
from torch import Tensor

from gemsc.errors import GemscError
from gemsc.runtime.training import run_folder
from gemsc.runtime.training.arguments import parse_arguments
from gemsc.runtime.training.logs import EACH, Log
from gemsc.runtime.training.run_folder import (
    LOCK,
    changed_options,
    choose_folder,
    held,
    options_at,
)
from gemsc.runtime.training.trainer import Trainer

EPOCHS: Any = SimpleNamespace(owes_end=False)


def options_of(*words: object) -> argparse.Namespace:
    return parse_arguments([str(word) for word in words])


def choose(program: Path, *words: object) -> tuple[Path | None, Path | None]:
    """Return the run's folder, and what it resumes."""
    options = options_of(*words)
    return choose_folder(program, options), options.resume


def used(folder: Path, file: str = "log.jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text('{"event": "step", "step": 1}\n')
    return folder


def test_runs_are_numbered_in_the_programs_folder(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    assert choose(tmp_path) == (runs / "1", None)
    assert choose(tmp_path) == (runs / "2", None)
    used(runs / "10")
    used(runs / "notes")
    assert choose(tmp_path) == (runs / "11", None)
    assert choose(tmp_path, "--save", tmp_path / "own") == (tmp_path / "own", None)


def test_resume_goes_on_in_the_last_run_or_in_that_of_save(
    tmp_path: Path,
) -> None:
    runs = tmp_path / "runs"
    assert choose(tmp_path, "--resume") == (runs / "1", None)  # nothing there yet
    used(runs / "1")
    assert choose(tmp_path, "--resume") == (runs / "1", None)  # no checkpoint yet
    used(runs / "2", "model.safetensors")
    assert choose(tmp_path, "--resume") == (runs / "2", runs / "2")
    words = ("--resume", "--save", runs / "1")
    assert choose(tmp_path, *words) == (runs / "1", None)
    # a job that died before its first checkpoint begins where it began
    words = ("--resume", tmp_path / "weights.safetensors", *words)
    assert choose(tmp_path, *words) == (runs / "1", tmp_path / "weights.safetensors")
    words = (*words[:2], "--resume", "--save", runs / "2")
    assert choose(tmp_path, *words) == (runs / "2", runs / "2")
    # another run's checkpoint is where to start from; that run stays as it is
    assert choose(tmp_path, "--resume", runs / "2") == (runs / "3", runs / "2")


@pytest.mark.parametrize("file", ["log.jsonl", "model.safetensors", "latest"])
def test_a_run_is_never_overwritten_by_mistake(tmp_path: Path, file: str) -> None:
    folder = used(tmp_path / "own", file)
    words = ("--save", folder)
    with pytest.raises(GemscError, match="already holds a run") as caught:
        choose(tmp_path, *words)
    assert "--resume" in str(caught.value)
    with pytest.raises(GemscError, match="already holds a run"):
        choose(tmp_path, *words, "--resume", used(tmp_path / "other", file))
    assert choose(tmp_path, *words, "--overwrite") == (folder, None)
    assert choose(tmp_path, *words, "--resume", folder) == (folder, folder)
    step = folder / "step-000002"
    assert choose(tmp_path, *words, "--resume", step) == (folder, step)


@pytest.mark.slow
def test_an_attempt_without_a_step_does_not_block_its_folder(tmp_path: Path) -> None:
    Logged(tmp_path).train(0)
    assert (tmp_path / "run" / "log.jsonl").is_file()
    assert choose(tmp_path, "--save", tmp_path / "run") == (tmp_path / "run", None)
    Logged(tmp_path).train(1)
    with pytest.raises(GemscError, match="already holds a run"):
        choose(tmp_path, "--save", tmp_path / "run")


def test_what_does_not_train_has_no_folder(tmp_path: Path) -> None:
    assert choose(tmp_path, "--verify-into", tmp_path)[0] is None
    assert choose(tmp_path, "--record-into", tmp_path)[0] is None
    assert not (tmp_path / "runs").exists()


# One run at a time


def test_a_folder_has_one_run_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "LOCK_SECONDS", 0.0)
    folder = tmp_path / "new" / "run"
    with held(folder):
        with (
            pytest.raises(GemscError, match="another run is in") as caught,
            held(folder),
        ):
            pass
        assert f"`kill {os.getpid()}`" in str(caught.value)
        assert f"process {os.getpid()} on {platform.node()}" in caught.value.message
        (folder / LOCK).unlink()  # as the message says, for a host that is gone
        with held(folder):
            pass
    with held(folder):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(GemscError, match="cannot hold a run"), held(tmp_path / "file"):
        pass


def test_a_process_that_was_killed_holds_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import pathlib, sys, time\n"
        "from gemsc.runtime.training.run_folder import held\n"
        "with held(pathlib.Path(sys.argv[1])):\n"
        "    print(1, flush=True)\n"
        "    time.sleep(99)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        monkeypatch.setattr(run_folder, "LOCK_SECONDS", 0.0)
        with (
            pytest.raises(GemscError, match=f"process {process.pid} on"),
            held(tmp_path),
        ):
            pass
        process.kill()
        process.wait()
        with held(tmp_path):
            assert (tmp_path / LOCK).read_text().split()[0] == str(os.getpid())


# What a run goes on with


def begun(folder: Path, *starts: tuple[int, dict[str, object]]) -> Path:
    """Leave a run with a checkpoint, which began at some steps with some options."""
    checkpoint = folder / "step-000006"
    checkpoint.mkdir(parents=True)
    written = [{"step": step, "options": options} for step, options in starts]
    (folder / "run.json").write_text(json.dumps({"starts": written}))
    (folder / "latest").symlink_to(checkpoint.name)
    return folder


def test_the_options_of_a_step_are_those_of_the_start_before_it(tmp_path: Path) -> None:
    later: tuple[int, dict[str, object]] = (6, {"clip_norm": 2.0})
    run = begun(tmp_path / "run", (0, {"set": ["RATE=2"]}), later)
    for place in (run, run / "latest", run / "step-000006"):
        assert options_at(place, 6) == {"set": ["RATE=2"]}
        assert options_at(place, 7) == {"clip_norm": 2.0}
    assert options_at(tmp_path, 6) is None
    (run / "run.json").write_text("{")
    assert options_at(run, 6) is None


def test_other_options_than_before_are_named_where_they_decide_the_result(
    tmp_path: Path,
) -> None:
    before: dict[str, object] = {"clip_norm": 0.5, "set": ["RATE=2"], "epochs": 9}
    run = begun(tmp_path / "run", (0, before))

    def changed(*words: object) -> list[str]:
        return changed_options(options_of("--resume", run, *words), 6)

    same = ("--clip-norm", 0.5, "--set", "RATE=2")
    assert changed(*same) == []
    assert changed(*same, "--workers", 2, "--keep", 1, "--epochs", 12) == []
    assert changed() == ["--set none (was RATE=2)", "--clip-norm none (was 0.5)"]
    more = ("--accumulate", 2, "--dtype", "float64", "--last-batch", "train")
    assert changed(*same, *more, "--ema", 0.9) == [
        "--dtype float64 (was float32)",
        "--last-batch train (was drop)",
        "--accumulate 2 (was 1)",
        "--ema 0.9 (was none)",
    ]
    assert changed_options(options_of("--resume", tmp_path), 6) == []


def test_a_folder_without_links_is_resumed_into_another(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()  # as `scp -r` copies it
    for words, advice in (((), ""), (("--resume",), f" and --resume {tmp_path}")):
        with pytest.raises(GemscError, match="is a folder, not a link") as error:
            options_of("--save", tmp_path, *words)
        assert error.value.help == f"choose another folder with --save{advice}"


# The log


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def forward(self: Any, x: Tensor) -> Tensor:
    result: Tensor = self.d(torch.tanh(self.c(torch.tanh(self.b(self.a(x))))))
    return result


class Logged:
    """A program on two ranks whose steps are logged."""

    def __init__(self, folder: Path) -> None:
        self.program, self.run = folder / "program", folder / "run"
        written(self.program, Net(forward), micro_batches=2)

    def train(
        self,
        steps: int,
        *words: object,
        fails: int = -1,
        evaluates: bool = False,
        **more: Any,
    ) -> None:
        options = options_of("--save", self.run, *words)

        def work(trainer: Trainer) -> None:
            trainer.callbacks.append(Log(options, EPOCHS))
            if options.resume is not None:
                trainer.resume(options.resume)
            trainer.start()
            for step in range(trainer.step_number, steps):
                x, target = batch_of((X, X), 2)
                trainer.step(x * (math.nan if step == fails else 1.0), target)
                if evaluates:
                    trainer.tell("on_evaluation", {"loss": step / 4, "dice": math.inf})
            trainer.tell("on_evaluation", {"loss": 0.5, "dice": math.nan})
            trainer.tell("on_epoch", 0, {})

        on_ranks(self.program, 2, work, optimizer=adam, **more)

    def save(self) -> None:
        """Leave a checkpoint after step 2."""

        def work(trainer: Trainer) -> None:
            for _ in range(2):
                trainer.step(*batch_of((X, X), 2))
            trainer.save(self.run)

        on_ranks(self.program, 2, work, optimizer=adam)

    @property
    def lines(self) -> list[dict[str, Any]]:
        lines = (self.run / "log.jsonl").read_text().splitlines()
        return [json.loads(line, parse_constant=pytest.fail) for line in lines]

    def steps(self) -> list[int]:
        return [line["step"] for line in self.lines if line["event"] == "step"]

    @property
    def table(self) -> list[dict[str, str]]:
        with (self.run / "log.csv").open(newline="") as file:
            return list(csv.DictReader(file))


@pytest.fixture
def logged(tmp_path: Path) -> Logged:
    return Logged(tmp_path)


def test_each_step_is_a_line_and_a_row(logged: Logged) -> None:
    logged.train(3, clip_norm=1.0)
    events = [line["event"] for line in logged.lines]
    assert events == ["start", "step", "step", "step", "evaluation", "ranks"]
    step = logged.lines[2]
    assert step["learning_rate"] == 0.01
    assert step["gradient_norm"] > 0
    assert step["loss"] > 0
    assert logged.lines[4]["figures"] == {"loss": 0.5, "dice": None}
    for rank in logged.lines[5]["ranks"]:
        assert rank["memory_bytes"] > 2**20
        assert 0 <= rank["busy_seconds"] <= rank["seconds"]
    rows = logged.table
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    assert float(rows[1]["loss"]) == step["loss"]
    assert [row["eval_loss"] for row in rows] == ["", "", "0.5"]
    assert [row["eval_dice"] for row in rows] == ["", "", ""]


@pytest.mark.parametrize("is_lost", [False, True])
def test_an_evaluation_completes_the_last_row(
    logged: Logged, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """The log, of a million lines, is read at the start and for new columns only."""
    table, tabulate, count = logged.run / "log.csv", Log._tabulate, 0

    def counted(log: Log) -> None:
        nonlocal count
        count += 1
        tabulate(log)
        if is_lost and count == 2:
            table.unlink()

    monkeypatch.setattr(Log, "_tabulate", counted)
    logged.train(4, evaluates=True)
    assert count == (4 if is_lost else 2)
    assert [row["step"] for row in logged.table] == ["1", "2", "3", "4"]
    assert [row["eval_loss"] for row in logged.table] == ["0.0", "0.25", "0.5", "0.5"]
    assert {row["eval_dice"] for row in logged.table} == {""}
    completed = table.read_text()
    Log(options_of("--save", logged.run), EPOCHS)._open(4, [])
    assert table.read_text() == completed


def test_a_run_goes_on_where_its_log_cannot_be_written(
    logged: Logged, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Log._open

    def full(log: Log, step: int, phases: list[str]) -> None:
        opened(log, step, phases)
        log._lines = Path("/dev/full").open("w", buffering=1)  # noqa: SIM115

    monkeypatch.setattr(Log, "_open", full)
    logged.train(3, evaluates=True)
    text = (
        f"no more is logged in {logged.run}: No space left on device; the run continues"
    )
    assert capsys.readouterr().err.count(text) == 1


def test_a_run_does_not_begin_on_a_full_disk(
    logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gemsc.runtime.training.logs.describe_run", full)
    with pytest.raises(GemscError, match="cannot hold a run: No space left") as error:
        logged.train(1)
    help = "free space there, or name another folder with --save"
    assert error.value.help == help


def test_a_norm_is_logged_where_there_was_an_update(logged: Logged) -> None:
    logged.train(4, clip_norm=1.0, accumulate=2)
    norms = [line.get("gradient_norm", 0.0) for line in logged.lines[1:5]]
    assert [norm > 0 for norm in norms] == [False, True, False, True]
    logged.train(3, "--overwrite", clip_norm=1.0, fails=1, on_nonfinite="skip")
    norms = [line.get("gradient_norm", 0.0) for line in logged.lines[1:4]]
    assert [norm > 0 for norm in norms] == [True, False, True]


@pytest.mark.slow
def test_going_on_drops_what_came_after_the_checkpoint(
    logged: Logged,
) -> None:
    logged.train(4)
    logged.save()
    with (
        (logged.run / "log.jsonl").open("a") as log,
        (logged.run / "log.csv").open("a") as table,
    ):  # killed in the midst of a line
        log.write('{"event": "step", "st')
        table.write("5,1,0.")
    logged.train(5, "--resume", logged.run)
    assert logged.steps() == [1, 2, 3, 4, 5]
    starts = [line["step"] for line in logged.lines if line["event"] == "start"]
    assert starts == [0, 2]
    assert [row["step"] for row in logged.table] == ["1", "2", "3", "4", "5"]
    assert [row["eval_loss"] for row in logged.table] == ["", "", "", "", "0.5"]
    about = json.loads((logged.run / "run.json").read_text())
    assert [start["step"] for start in about["starts"]] == [0, 2]
    assert (logged.run / "plan.toml").is_file()


@pytest.mark.slow
def test_a_table_that_is_lost_is_made_of_the_log(logged: Logged) -> None:
    logged.train(2)
    logged.save()
    (logged.run / "log.csv").unlink()
    logged.train(3, "--resume", logged.run)
    losses = [line["loss"] for line in logged.lines if line["event"] == "step"]
    assert [row["step"] for row in logged.table] == ["1", "2", "3"]
    assert [float(row["loss"]) for row in logged.table] == losses
    assert [row["eval_loss"] for row in logged.table] == ["", "0.5", "0.5"]


@pytest.mark.slow
def test_what_is_not_finite_is_valid_json_too(logged: Logged) -> None:
    logged.train(2, fails=1, on_nonfinite="skip")
    bad = logged.lines[2]
    assert bad["loss"] is None
    assert bad["problem"] == "the loss is nan at step 2, in micro-batches 0, 1"
    assert logged.table[1]["loss"] == ""


@pytest.mark.slow
def test_long_epochs_are_looked_at_in_between(
    logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemsc.runtime.training.logs.EACH", 2)
    assert EACH > 2
    logged.train(4)
    asked = [line["step"] for line in logged.lines if line["event"] == "ranks"]
    assert asked == [2, 4, 4]


@pytest.mark.slow
def test_overwrite_removes_that_run_and_nothing_else(logged: Logged) -> None:
    logged.train(4)
    logged.save()
    elsewhere = used(logged.run.parent / "elsewhere", "manifest.json")
    (logged.run / "step-link").symlink_to(elsewhere)
    used(logged.run / "step-notes", "my.txt")
    used(logged.run, "notes.txt")
    logged.train(1, "--overwrite")
    assert logged.steps() == [1]
    names = sorted(path.name for path in logged.run.iterdir())
    kept = ["notes.txt", "step-link", "step-notes"]
    assert names == sorted([*kept, "log.csv", "log.jsonl", "plan.toml", "run.json"])
    assert (elsewhere / "manifest.json").is_file()
