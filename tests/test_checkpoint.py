"""Checkpoints: whole at every moment, and refused where they are not."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from program_support import Net, X, batch_of, on_ranks, written
from safetensors.torch import load_file
from torch import Tensor, nn

from gemsc.errors import GemscError
from gemsc.runtime.training.arguments import parse_arguments
from gemsc.runtime.training.trainer import Trainer

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
    replace = os.replace

    def note(source: Any, target: Any) -> None:
        events.append(f"{Path(target).name}!")
        replace(source, target)

    def note_forced(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    monkeypatch.setattr(os, "fsync", note_forced)
    monkeypatch.setattr(os, "replace", note)
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
    rank, found = trainer.transport.rank, {}
    found[f"steps of rank {rank}"] = torch.tensor(trainer.worker.steps.done)
    assert trainer.worker.updates.optimizer is not None
    for index, each in trainer.worker.updates.optimizer.state_dict()["state"].items():
        for key, tensor in each.items():
            found[f"{key} {index} of rank {rank}"] = tensor
    return {name: t.clone() for name, t in (found | trainer.state_dict()).items()}


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


def test_a_folder_holds_one_checkpoint_and_two_links(
    program: Path, tmp_path: Path
) -> None:
    for step in (1, 2):
        state = train_and_save(program, tmp_path / "saved", resume=step == 2)
        name = f"step-{step:06d}"
        assert names_in(tmp_path / "saved") == {name, "latest", "model.safetensors"}
        assert names_in(tmp_path / "saved" / name) == {
            "manifest.json", "model.safetensors",
            "optimizer-rank0.pt", "optimizer-rank1.pt",
        }  # fmt: skip
        model = load_file(tmp_path / "saved" / "model.safetensors")
        assert all(torch.equal(tensor, state[n]) for n, tensor in model.items())
    (tmp_path / "saved").rename(tmp_path / "moved")  # no link names a whole path
    shutil.copytree(tmp_path / "moved", tmp_path / "copied")  # without links
    for folder in ("moved", "moved/step-000002", "copied"):
        assert same(resumed(program, tmp_path / folder), state)
    with pytest.raises(GemscError, match="latest is a folder, not a link"):
        parse_arguments(["--save", str(tmp_path / "copied")])


def test_all_is_on_the_disk_before_the_link_is_switched(
    program: Path, tmp_path: Path, forced: list[str]
) -> None:
    train_and_save(program, tmp_path / "saved")
    switched = forced.index("latest!")
    assert set(forced[:switched]) >= {
        "model.safetensors", "manifest.json", ".step-000001", "saved",
        "optimizer-rank0.pt", "optimizer-rank1.pt",
    }  # fmt: skip
    assert "saved" in forced[switched:]  # before the older one is removed


def test_a_run_that_starts_anew_may_save_the_same_step(
    program: Path, tmp_path: Path
) -> None:
    for steps in (1, 1, 1):
        state = train_and_save(program, tmp_path, steps)
        assert len(names_in(tmp_path)) == 3
        assert same(resumed(program, tmp_path), state)


def test_nobody_elses_folder_is_removed(program: Path, tmp_path: Path) -> None:
    (tmp_path / "step-000007").mkdir()
    (tmp_path / "step-000007" / "notes").touch()
    train_and_save(program, tmp_path)
    assert (tmp_path / "step-000007" / "notes").exists()
    with pytest.raises(GemscError, match=r"step 7 cannot be written .* not empty"):
        train_and_save(program, tmp_path, 7)
    assert int(resumed(program, tmp_path)["steps of rank 1"]) == 1


def test_a_checkpoint_that_cannot_be_written_says_so(
    program: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(GemscError, match="checkpoint of step 1 cannot be written"):
        train_and_save(program, tmp_path / "file")


def test_ranks_that_save_after_different_steps_are_told(
    program: Path, tmp_path: Path
) -> None:
    def work(trainer: Trainer) -> None:
        trainer.worker.steps.done = 5 + trainer.transport.rank
        trainer.save(tmp_path)

    with pytest.raises(GemscError, match=r"after different steps: \[5, 6\]"):
        on_ranks(program, 2, work)
    with pytest.raises(GemscError, match="is not a checkpoint"):
        resumed(program, tmp_path)


# What is damaged


def test_weights_alone_give_the_weights(program: Path, tmp_path: Path) -> None:
    state = train_and_save(program, tmp_path / "saved")
    (tmp_path / "weights").mkdir()
    shutil.copy(tmp_path / "saved" / "model.safetensors", tmp_path / "weights")
    found = resumed(program, tmp_path / "weights")
    assert int(found["steps of rank 0"]) == 0
    model = {name for name in found if " of rank" not in name}
    assert model == {name for name in state if " of rank" not in name}
    assert all(torch.equal(found[name], state[name]) for name in model)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


MANIFEST, MODEL = "latest/manifest.json", "latest/model.safetensors"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a missing model": (lambda f: (f / MODEL).unlink(), "model.safetensors is missing"),
    "a missing rank": (
        lambda f: (f / "latest/optimizer-rank1.pt").unlink(),
        "optimizer-rank1.pt is missing",
    ),
    "a cut model": (lambda f: os.truncate(f / MODEL, 20), "damaged: 20 bytes, not"),
    "a cut rank": (
        lambda f: os.truncate(f / "latest/optimizer-rank1.pt", 0),
        "optimizer-rank1.pt is damaged: 0 bytes, not",
    ),
    "one bit of the model": (lambda f: flip(f / MODEL), "is not what was saved"),
    "one bit of a rank": (
        lambda f: flip(f / "latest/optimizer-rank1.pt"),
        "optimizer-rank1.pt is damaged: it is not what was saved",
    ),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), "manifest.json is missing"),
    "half a manifest": (lambda f: os.truncate(f / MANIFEST, 99), "json is damaged"),
    "no text": (lambda f: (f / MANIFEST).write_bytes(b"\xff\x00"), "json is damaged"),
    "another text": (lambda f: (f / MANIFEST).write_text("[]"), "json is damaged"),
    "no facts": (lambda f: edit(f / MANIFEST, files={MODEL: 3}), "json is damaged"),
    "another step": (lambda f: edit(f / MANIFEST, step=3), "is of step 1, .* step 3"),
    "another format": (
        lambda f: edit(f / MANIFEST, format=1),
        "has format 1, .* reads 2",
    ),
    "a foreign folder": (
        lambda f: edit(f / MANIFEST, files={}),
        "does not name model.safetensors",
    ),
    "a dead link": (
        lambda f: shutil.rmtree(f / "step-000001"),
        "latest/manifest.json is missing",
    ),
    "nothing": (lambda f: (f / "latest").unlink(), "is not a checkpoint"),
}


@pytest.fixture(scope="module")
def saved(program: Path) -> Path:
    train_and_save(program, program.parent / "saved")
    return program.parent / "saved"


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_nothing_is_taken(
    damage: str, program: Path, saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved, tmp_path / "saved", symlinks=True)
    act, says = DAMAGES[damage]
    act(tmp_path / "saved")
    untouched: list[bool] = []

    def work(trainer: Trainer) -> None:
        before = everything(trainer)
        try:
            trainer.resume(tmp_path / "saved")
        finally:
            untouched.append(same(before, everything(trainer)))

    with pytest.raises(GemscError, match=says):
        on_ranks(program, 2, work, optimizer=adam)
    assert all(untouched)


def test_a_checkpoint_of_other_ranks_or_another_split_is_refused(
    program: Path, saved: Path, tmp_path: Path
) -> None:
    model = Net(forward, norm=nn.BatchNorm1d(4))
    written(tmp_path / "three", model, ranks=3, micro_batches=2)
    with pytest.raises(GemscError, match="saved by 2 ranks, the program has 3"):
        resumed(tmp_path / "three", saved, ranks=3)
    written(tmp_path / "split", model, micro_batches=2, cuts=("b",))
    split = (tmp_path / "split" / "rank0.py").read_text()
    assert split != (program / "rank0.py").read_text()
    with pytest.raises(GemscError, match="with another split of the model"):
        resumed(tmp_path / "split", saved)


def test_the_state_of_another_optimizer_is_refused(program: Path, saved: Path) -> None:
    def sgd(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(named, lr=0.1)

    with pytest.raises(GemscError, match="the optimizer Adam, the program has SGD"):
        resumed(program, saved, sgd)


def test_a_state_that_fits_one_rank_only_is_taken_by_none(
    program: Path, saved: Path
) -> None:
    untouched: list[bool] = []

    def work(trainer: Trainer) -> None:
        if trainer.transport.rank == 1:
            groups = [{"params": [p]} for p in trainer.stages.parameters.values()]
            trainer.worker.updates.optimizer = torch.optim.Adam(groups)
        trainer.step(*BATCH)
        before = everything(trainer)
        try:
            trainer.resume(saved)
        finally:
            untouched.append(same(before, everything(trainer)))

    with pytest.raises(GemscError, match=r"does not fit Adam: .* parameter group"):
        on_ranks(program, 2, work, optimizer=adam)
    assert untouched == [True, True]


def test_a_checkpoint_of_an_older_gemsc_is_refused(
    program: Path, saved: Path, tmp_path: Path
) -> None:
    for name in ("model.safetensors", "optimizer-rank0.pt", "optimizer-rank1.pt"):
        shutil.copy(saved / "latest" / name, tmp_path)
    with pytest.raises(GemscError, match="saved by an older gemsc"):
        resumed(program, tmp_path)


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
def killer() -> Killer:
    killer = Killer()
    sys.addaudithook(killer.see)
    return killer


@pytest.mark.parametrize("older", [True, False])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(
    older: bool, program: Path, saved: Path, tmp_path: Path, killer: Killer
) -> None:
    """The older one or the new one; where there was none, perhaps none."""
    folder = tmp_path / "saved"
    states = {1: resumed(program, saved)}
    shutil.copytree(saved, tmp_path / "two", symlinks=True)
    states[2] = train_and_save(program, tmp_path / "two", resume=True)
    seen = set()
    for count in itertools.count():
        shutil.rmtree(folder, ignore_errors=True)
        if older:
            shutil.copytree(saved, folder, symlinks=True)
        was_killed = is_killed(program, saved, folder, killer, count)
        if (folder / "latest").is_symlink():
            found = resumed(program, folder)
            step = int(found["steps of rank 0"])
            assert same(found, states[step])
            model = folder / "model.safetensors"
            if older or model.exists():
                assert all(
                    torch.equal(tensor, states[step][name])
                    for name, tensor in load_file(model).items()
                )
            seen.add(step)
        else:
            with pytest.raises(GemscError, match="is not a checkpoint"):
                resumed(program, folder)
            seen.add(0)
        if not was_killed:
            break
        if count % 7 == 0:  # what the kill left is in nobody's way
            train_and_save(program, folder, 2)
            assert len(names_in(folder)) == 3
    assert seen == ({1, 2} if older else {0, 2})
    assert count > 15  # so many things happen to files


def is_killed(
    program: Path, start: Path, folder: Path, killer: Killer, count: int
) -> bool:
    """Save a second step; return whether that many operations were not enough."""

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
