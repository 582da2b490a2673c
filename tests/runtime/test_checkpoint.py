"""Checkpoints: whole at every moment, and refused where they are not."""

from __future__ import annotations

import itertools
import math
import os
import random
import re
import resource
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from program_support import Net, X, batch_of, on_ranks, weights_in, written
from torch import Tensor, nn

from gemsc.base.files import write_text
from gemsc.base.rng import preserve_rng
from gemsc.errors import GemscError
from gemsc.runtime.checkpoint import files, folder, read, write
from gemsc.runtime.checkpoint.folder import check_digests, clear_space
from gemsc.runtime.training.arguments import parse_arguments
from gemsc.runtime.training.trainer import Trainer
from gemsc.weights.write import write_stream

BATCH = batch_of((X, X), 2)
State = dict[str, Tensor]


def forward(self: Any, x: Tensor) -> Tensor:
    return self.c(torch.tanh(self.norm(self.b(torch.tanh(self.a(x))))))


def adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(named, lr=0.01)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "program"
    written(folder, Net(forward, norm=nn.BatchNorm1d(4)), micro_batches=2)
    return folder


@pytest.fixture(autouse=True)
def forced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Do not wait for the disk; list what was forced to it, and what was renamed."""
    events: list[str] = []
    replace, rename = os.replace, os.rename

    def note(source: Any, target: Any) -> None:
        events.append(f"{Path(target).name}!")
        replace(source, target)

    def note_renamed(source: Any, target: Any) -> None:
        events.append(f"{Path(target).name}!")
        rename(source, target)

    def note_forced(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    monkeypatch.setattr(os, "fsync", note_forced)
    monkeypatch.setattr(os, "replace", note)
    monkeypatch.setattr(os, "rename", note_renamed)
    return events


def train_and_save(
    program: Path, folder: Path, steps: int = 1, resume: bool = False
) -> State:
    """Train some steps, save, and return all that was saved."""

    def work(trainer: Trainer) -> State:
        if resume:
            trainer.resume(folder)
        for _ in range(steps):
            trainer.step(*BATCH)
        trainer.save(folder)
        return everything(trainer)

    parts = on_ranks(program, 2, work, optimizer=adam)
    return {name: tensor for part in parts for name, tensor in part.items()}


def everything(trainer: Trainer) -> State:
    """Return the steps, the model and the optimizer's tensors of a rank, by name."""
    rank, state = trainer.transport.rank, {}
    state[f"steps of rank {rank}"] = torch.tensor(trainer.worker.steps.done)
    assert trainer.worker.updates.optimizer is not None
    for index, slots in trainer.worker.updates.optimizer.state_dict()["state"].items():
        for key, tensor in slots.items():
            state[f"{key} {index} of rank {rank}"] = tensor
    return {name: t.clone() for name, t in (state | trainer.state_dict()).items()}


def resumed(
    program: Path, folder: Path, optimizer: Any = adam, ranks: int = 2
) -> State:
    def work(trainer: Trainer) -> State:
        trainer.resume(folder)
        return everything(trainer)

    parts = on_ranks(program, ranks, work, optimizer=optimizer)
    return {name: tensor for part in parts for name, tensor in part.items()}


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# What is there


@pytest.mark.slow
def test_a_folder_holds_checkpoints_and_a_link(program: Path, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    for step in (1, 2):
        state = train_and_save(program, folder, resume=step == 2)
        steps = {f"step-{n:06d}" for n in range(1, step + 1)}
        assert names_in(folder) == {*steps, "latest"}
        assert (folder / "latest").readlink() == Path(f"step-{step:06d}")
        names = names_in(folder / "latest")
        assert names == {"manifest.json", "rank0.safetensors", "rank1.safetensors"}
        model = weights_in(folder)
        (folder / "model.safetensors").unlink()
        assert all(torch.equal(tensor, state[n]) for n, tensor in model.items())
        Net(forward, norm=nn.BatchNorm1d(4)).load_state_dict(model)
    folder.rename(tmp_path / "moved")  # no link names a whole path
    shutil.copytree(tmp_path / "moved", tmp_path / "copied")  # without links
    for name in ("moved", "moved/step-000002", "copied"):
        assert same(resumed(program, tmp_path / name), state)
    with pytest.raises(GemscError, match="latest is a folder, not a link"):
        parse_arguments(["--save", str(tmp_path / "copied")])


def test_the_newest_and_the_best_are_kept(program: Path, tmp_path: Path) -> None:
    def work(trainer: Trainer) -> None:
        for step in range(1, 6):
            trainer.step(*BATCH)
            trainer.save(tmp_path, keep=2, best=step == 2)

    on_ranks(program, 2, work)
    steps = {"step-000002", "step-000004", "step-000005"}
    assert names_in(tmp_path) == {*steps, "latest", "best"}
    assert (tmp_path / "best").readlink() == Path("step-000002")


def test_all_is_on_the_disk_before_the_folder_gets_its_name(
    program: Path, tmp_path: Path, forced: list[str]
) -> None:
    train_and_save(program, tmp_path / "saved")
    named = forced.index("step-000001!")
    files = {"manifest.json", "rank0.safetensors", "rank1.safetensors"}
    before = [event for event in forced[:named] if not event.endswith("!")]
    written = {name for name in files if any(name in event for event in before)}
    assert written == files
    assert any(event.startswith(".step-000001-") for event in forced[:named])
    assert forced.index("saved") < forced.index("latest!")
    assert "saved" in forced[forced.index("latest!") :]


@pytest.mark.slow
def test_a_run_that_starts_anew_may_save_the_same_step(
    program: Path, tmp_path: Path
) -> None:
    for steps in (1, 2, 1, 1, 2, 1):
        state = train_and_save(program, tmp_path, steps)
        assert same(resumed(program, tmp_path), state)
        assert len(names_in(tmp_path)) <= 4


def test_a_run_may_save_while_another_reads_what_it_saved_before(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It switches its link; what another run, or an export, has begun with stays."""
    wanted = train_and_save(program, tmp_path)
    weights = weights_in(tmp_path)
    train_and_save(program, tmp_path, steps=2, resume=True)

    turn = threading.Lock()  # the ranks here are threads; the run that saves is one

    def switches(*arguments: Any) -> None:
        check_digests(*arguments)
        with turn:
            folder._link(tmp_path / "latest", "step-000003")

    for reader in (read, files):
        monkeypatch.setattr(reader, "check_digests", switches)
        folder._link(tmp_path / "latest", "step-000001")
        if reader is read:
            assert same(resumed(program, tmp_path), wanted)
        else:
            assert same(weights_in(tmp_path), weights)


def test_extra_state_of_a_loop_comes_back(program: Path, tmp_path: Path) -> None:
    extra = {"epoch": 3, "best": math.inf, "seen": (1, 2), "names": {4: ["x", None]}}

    def work(trainer: Trainer) -> None:
        trainer.save(tmp_path, extra=extra)

    on_ranks(program, 2, work)
    extras = on_ranks(program, 2, lambda trainer: trainer.resume(tmp_path))
    assert extras == [extra, extra]
    with pytest.raises(GemscError, match=r"own: act holds a builtin.*, which no"):
        on_ranks(program, 2, lambda t: t.save(tmp_path, extra={"act": len}))
    assert not [name for name in names_in(tmp_path) if name.startswith(".")]


def test_a_buffer_of_several_stages_is_saved_once(tmp_path: Path) -> None:
    def scaled(self: Any, x: Tensor) -> Tensor:
        return self.scale * self.c(torch.tanh(self.b(self.scale * self.a(x))))

    net = Net(scaled)
    net.scale = nn.Buffer(torch.full((4,), 2.0))
    written(tmp_path / "program", net, micro_batches=2)
    for rank in range(2):  # both stages have it
        text = (tmp_path / f"program/rank{rank}.py").read_text()
        assert 'register_buffer("scale"' in text
    saved = train_and_save(tmp_path / "program", tmp_path / "run")
    assert same(resumed(tmp_path / "program", tmp_path / "run"), saved)
    assert weights_in(tmp_path / "run")["scale"].eq(2).all()


def test_no_checkpoint_has_parts_of_two_runs(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 of a run is late: it writes once another run has written its parts."""
    is_late, other_has_written, is_over = (threading.Event() for _ in range(3))
    complete = write._Job.complete

    def late(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == "rank1.safetensors" and not is_late.is_set():
            is_late.set()
            other_has_written.wait(60)
        return write_stream(path, *args, **options)

    def wait_for_the_late(job: Any) -> None:
        if not other_has_written.is_set():
            other_has_written.set()
            is_over.wait(60)
        complete(job)

    def first() -> str:
        try:
            on_ranks(program, 2, lambda t: t.save(tmp_path), optimizer=adam)
        except GemscError as error:
            return error.message
        finally:
            is_over.set()
        return ""

    def other(trainer: Trainer) -> State:
        with torch.no_grad():
            for parameter in trainer.worker.stages.parameters.values():
                parameter.add_(1)
        trainer.save(tmp_path)
        return everything(trainer)

    monkeypatch.setattr(write, "write_stream", late)
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(first)
        is_late.wait(60)
        monkeypatch.setattr(write._Job, "complete", wait_for_the_late)
        parts = on_ranks(program, 2, other, optimizer=adam)
    assert re.search("another run removed|cannot be written", told.result())
    saved = {name: tensor for part in parts for name, tensor in part.items()}
    loaded = resumed(program, tmp_path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())


def test_a_thread_ends_when_another_run_removes_what_it_writes(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def removed(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == "rank1.safetensors":
            while not (path.parent / "rank0.json").exists():
                time.sleep(0.01)
            shutil.rmtree(path.parent)
        return write_stream(path, *args, **options)

    monkeypatch.setattr(write, "write_stream", removed)

    def work(trainer: Trainer) -> None:
        trainer.save(tmp_path, background=True)
        trainer.finish_saving()

    with pytest.raises(GemscError, match="another run removed"):
        on_ranks(program, 2, work)


def test_a_file_that_another_run_removed_is_missed(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_removed = threading.Event()

    def removed(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == "rank1.safetensors":
            is_removed.wait(60)
            return write_stream(path, *args, **options)
        facts = write_stream(path, *args, **options)
        shutil.rmtree(path.parent)
        is_removed.set()
        return facts

    monkeypatch.setattr(write, "write_stream", removed)
    with pytest.raises(GemscError, match="another run removed"):
        train_and_save(program, tmp_path)
    assert not names_in(tmp_path)


def test_what_another_run_writes_is_removed_meanwhile(
    program: Path, tmp_path: Path
) -> None:
    is_over = threading.Event()

    def writes(number: int) -> None:
        name = tmp_path / f".step-000001-{number:08x}" / "rank0.json"
        while not is_over.is_set():
            write_text(name, "{}")

    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(writes, number) for number in range(2)]
        try:
            for _ in range(20):
                clear_space(tmp_path, 1)
        finally:
            is_over.set()
    for other in others:
        assert isinstance(other.exception(), OSError | None)


def test_nobody_elses_files_are_removed(program: Path, tmp_path: Path) -> None:
    (tmp_path / "step-000007").mkdir()
    (tmp_path / "step-000007" / "notes").touch()
    (tmp_path / ".step-notes").mkdir()
    left = ".step-000001-0123abcd", ".step-000002-early-old", ".step-000003-again-old"
    for name in left:  # by kills
        (tmp_path / name).mkdir()
    for steps in (1, 2, 3, 4, 5):
        train_and_save(program, tmp_path, steps)
    assert (tmp_path / "step-000007" / "notes").exists()
    assert (tmp_path / ".step-notes").exists()
    assert not any((tmp_path / name).exists() for name in left)
    with pytest.raises(GemscError, match=r"step 7 cannot be written .* not empty"):
        train_and_save(program, tmp_path, 7)
    assert int(resumed(program, tmp_path)["steps of rank 1"]) == 5


def test_a_checkpoint_that_cannot_be_written_says_so(
    program: Path, saved: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", Path("/proc/nothing")):
        with pytest.raises(GemscError, match="checkpoint of step 1 cannot be written"):
            train_and_save(program, place)
    folder = tmp_path / "full"
    shutil.copytree(saved, folder, symlinks=True)
    before, limits = names_in(folder), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(GemscError, match=r"cannot be written .* File too large"):
            train_and_save(program, folder, 5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names_in(folder) == before
    assert int(resumed(program, folder)["steps of rank 0"]) == 2


def test_ranks_that_save_after_different_steps_are_told(
    program: Path, tmp_path: Path
) -> None:
    def work(trainer: Trainer) -> None:
        trainer.worker.steps.done = 5 + trainer.transport.rank
        trainer.save(tmp_path)

    with pytest.raises(GemscError, match=r"after different steps: \[5, 6\]"):
        on_ranks(program, 2, work)
    assert not names_in(tmp_path)


def test_what_is_drawn_goes_on_after_a_resume(tmp_path: Path) -> None:
    def draws() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), np.random.rand()

    def work(trainer: Trainer) -> bool:
        trainer.step(*BATCH)
        trainer.save(tmp_path / "saved")
        wanted = draws()
        draws()
        trainer.resume(tmp_path / "saved")
        return draws() == wanted

    model = Net(forward, norm=nn.BatchNorm1d(4))
    written(tmp_path / "one", model, micro_batches=2, ranks=1)
    with preserve_rng():
        assert on_ranks(tmp_path / "one", 1, work, optimizer=adam) == [True]


def test_an_update_that_has_begun_is_of_as_many_steps(
    program: Path, tmp_path: Path
) -> None:
    for steps in (1, 2):  # the second one ends the update

        def save(trainer: Trainer, count: int = steps) -> None:
            for _ in range(count):
                trainer.step(*BATCH)
            trainer.save(tmp_path / str(count))

        on_ranks(program, 2, save, optimizer=adam, accumulate=2)

    def resume(trainer: Trainer) -> None:
        trainer.resume(tmp_path / "2")
        with pytest.raises(GemscError, match="is one of 2 that make one update") as it:
            trainer.resume(tmp_path / "1")
        assert "resume with --accumulate 2" in str(it.value)

    on_ranks(program, 2, resume, optimizer=adam, accumulate=3)


# In the background


def test_a_checkpoint_is_that_of_its_step_while_training_goes_on(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_gone_on = [threading.Event(), threading.Event()]

    def late(path: Path, *args: Any, **options: Any) -> Any:
        assert has_gone_on["rank1" in path.name].wait(60)
        return write_stream(path, *args, **options)

    monkeypatch.setattr(write, "write_stream", late)

    def work(trainer: Trainer) -> State:
        trainer.step(*BATCH)
        trainer.save(tmp_path / "beside", background=True)
        state = everything(trainer)
        trainer.step(*BATCH)
        has_gone_on[trainer.transport.rank].set()
        trainer.save(tmp_path / "beside", background=True)  # waits for the first
        assert (tmp_path / "beside" / "step-000001" / "manifest.json").exists()
        trainer.finish_saving()
        return state

    parts = on_ranks(program, 2, work, optimizer=adam)
    state = {name: tensor for part in parts for name, tensor in part.items()}
    loaded = resumed(program, tmp_path / "beside" / "step-000001")
    assert same(loaded, state)
    assert int(resumed(program, tmp_path / "beside")["steps of rank 0"]) == 2
    assert len(names_in(tmp_path / "beside")) == 3


@pytest.mark.parametrize("before", [0, 1])
def test_a_thread_that_cannot_write_is_heard(
    before: int, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == "rank1.safetensors" and f"{before + 1:06d}" in str(path):
            raise OSError(28, "No space left on device")
        return write_stream(path, *args, **options)

    monkeypatch.setattr(write, "write_stream", full)

    def work(trainer: Trainer) -> None:
        for _ in range(before):
            trainer.step(*BATCH)
            trainer.save(tmp_path, background=True)
        trainer.step(*BATCH)
        trainer.save(tmp_path, background=True)
        trainer.finish_saving()

    with pytest.raises(GemscError, match=r"cannot be written .* No space left") as e:
        on_ranks(program, 2, work)
    more = f" and --resume {tmp_path}" if before else ""
    help = f"free space there, or choose another folder with --save{more}"
    assert e.value.help == help
    assert names_in(tmp_path) == ({"step-000001", "latest"} if before else set())


# Kills


class Killer:
    """Lets nothing happen to a folder from an operation of a number on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self.left = 0

    def see(self, event: str, arguments: tuple[object, ...]) -> None:
        """Hear of everything that Python does with files."""
        if self._folder is None or not event.startswith(("open", "os.")):
            return
        if any(str(self._folder) in str(argument) for argument in arguments):
            with self._lock:
                self.left -= 1
            if self.left < 0:
                raise SystemExit("killed")

    @contextmanager
    def after(self, count: int, folder: Path) -> Iterator[None]:
        self.left, self._folder = count, folder
        try:
            yield
        finally:
            self._folder = None


@pytest.fixture(scope="module")
def saved(program: Path) -> Path:
    folder = program.parent / "saved"
    for step in (1, 2):
        train_and_save(program, folder, resume=step == 2)
    return folder


@pytest.fixture(scope="module")
def killer() -> Killer:
    killer = Killer()
    sys.addaudithook(killer.see)
    return killer


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    ("older", "every"),
    [
        (True, 5),
        (False, 5),
        pytest.param(True, 1, marks=pytest.mark.nightly),
        pytest.param(False, 1, marks=pytest.mark.nightly),
    ],
)
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(
    older: bool, every: int, program: Path, saved: Path, tmp_path: Path, killer: Killer
) -> None:
    """The older one or the new one; where there was none, perhaps none."""
    folder = tmp_path / "saved"
    states = {2: resumed(program, saved)}
    shutil.copytree(saved, tmp_path / "three", symlinks=True)
    states[3] = train_and_save(program, tmp_path / "three", resume=True)
    seen = set()
    for count in itertools.count(step=every):
        shutil.rmtree(folder, ignore_errors=True)
        if older:
            shutil.copytree(saved, folder, symlinks=True)
        was_killed = is_killed(program, saved, folder, killer, count)
        if older or any(folder.glob("step-*")):
            loaded = resumed(program, folder)
            step = int(loaded["steps of rank 0"])
            assert same(loaded, states[step])
            seen.add(step)
        else:
            with pytest.raises(GemscError, match=r"is not a checkpoint|there is no"):
                resumed(program, folder)
            seen.add(0)
        if not was_killed:
            break
        if count % 7 == 0:  # what the kill left is in nobody's way
            train_and_save(program, folder, 3)
            assert not [name for name in names_in(folder) if name[0] == "."]
    assert seen == ({2, 3} if older else {0, 3})
    assert count > 15  # so many things happen to files


def is_killed(
    program: Path, start: Path, folder: Path, killer: Killer, count: int
) -> bool:
    """Save a third step; return whether that many operations were not enough."""

    def work(trainer: Trainer) -> None:
        trainer.resume(start)
        trainer.step(*BATCH)
        trainer.save(folder)

    try:
        with killer.after(count, folder):
            on_ranks(program, 2, work, optimizer=adam)
    except (SystemExit, GemscError):
        return True
    return False
