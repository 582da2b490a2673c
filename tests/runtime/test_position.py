"""A run goes on at its sample, with batches of another size, and with the same data."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from training_support import pairs, program, run, user_of

from gemsc.errors import GemscError
from gemsc.runtime.training.trainer import Trainer


class Noting(Dataset[Any]):
    """Notes which samples are read, on one rank."""

    def __init__(self, seen: list[int], count: int = 12) -> None:
        self.pairs, self.seen = pairs(count), seen

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Any:
        self.seen.append(index)
        return self.pairs[index]


def samples(directory: Path, *words: str) -> list[int]:
    """Return which samples are trained on by the first of two ranks, in order."""
    seen: list[int] = []
    run(directory, user_of(dataset=lambda: Noting(seen)), *words, ranks=1)
    return [index for index, _ in groupby(seen)]  # some are read twice


@pytest.mark.slow
def test_a_run_goes_on_at_its_sample_with_larger_batches(tmp_path: Path) -> None:
    small, large = (
        program(tmp_path / str(n), ranks=1, micro_batches=n) for n in (1, 3)
    )
    whole = samples(small, "--epochs", "2")
    saved = str(tmp_path / "saved")
    first = samples(small, "--steps", "3", "--save", saved)  # 6 of 12 samples
    second = samples(large, "--epochs", "2", "--resume", saved)
    assert first + second == whole
    assert len(whole) == 24


def test_an_epoch_ends_whose_rest_larger_batches_leave_out(tmp_path: Path) -> None:
    small, large = (
        program(tmp_path / str(n), ranks=1, micro_batches=n) for n in (1, 4)
    )
    saved, ended = str(tmp_path / "saved"), list[int]()

    def on_epoch(trainer: Trainer, epoch: int, figures: Any) -> None:
        ended.append(epoch)

    user = user_of(on_epoch=on_epoch)
    run(small, user, "--steps", "5", "--save", saved, ranks=1)  # 10 of 12 samples
    run(large, user, "--epochs", "2", "--resume", saved, ranks=1)
    assert ended == [0, 0, 1]  # where the first run ended, the epoch, and the next one


def test_other_data_and_another_seed_are_refused(tmp_path: Path) -> None:
    directory, saved = program(tmp_path / "program"), str(tmp_path / "saved")
    run(directory, user_of(), "--steps", "1", "--save", saved)
    user = user_of(dataset=lambda: pairs(16))
    with pytest.raises(
        GemscError, match=r"with 12 samples, but dataset\(\) now has 16"
    ):
        run(directory, user, "--epochs", "1", "--resume", saved)
    with pytest.raises(GemscError, match="of a run with seed 0, but this run has 5"):
        run(directory, user_of(), "--epochs", "1", "--resume", saved, seed=5)


@pytest.mark.slow
def test_the_state_of_the_loop_is_that_of_the_step(tmp_path: Path) -> None:
    directory, saved = program(tmp_path / "program"), str(tmp_path / "saved")
    torch.manual_seed(3)

    def steps(trainer: Trainer) -> int:
        return trainer.step_number

    run(directory, user_of(), "--steps", "2", "--save", saved, result=steps)
    words = "--epochs", "2", "--resume", saved, "--save", saved
    assert run(directory, user_of(), *words, result=steps) == [6, 6]


@pytest.mark.slow(1)
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
def test_a_log_goes_on_in_the_steps_of_batches_of_another_size(
    tmp_path: Path, sizes: tuple[int, int]
) -> None:
    before, after = (
        program(tmp_path / str(n), ranks=1, micro_batches=n) for n in sizes
    )
    saved = tmp_path / "saved"
    words = "--save", str(saved)
    run(before, user_of(), "--epochs", "2", *words, ranks=1)
    log = saved / "log.jsonl"

    def losses() -> list[tuple[int, float]]:
        records = map(json.loads, log.read_text().splitlines())
        return [(r["step"], r["loss"]) for r in records if r["event"] == "step"]

    old, count = losses(), 12 // sizes[0]  # of them in two epochs
    assert [step for step, _ in old] == [*range(1, count + 1)]
    with log.open("a") as file:  # a step after the checkpoint, when the run was killed
        file.write(json.dumps({"event": "step", "step": count + 1, "loss": 9.0}) + "\n")
    run(after, user_of(), "--epochs", "3", "--resume", str(saved), *words, ranks=1)
    logged, length = losses(), 6 // sizes[1]
    assert [loss for _, loss in logged[:count]] == [loss for _, loss in old]
    steps = [step for step, _ in logged]
    assert steps[:count] == [-(-n * 2 * length // count) for n in range(1, count + 1)]
    assert steps[count:] == [*range(2 * length + 1, 3 * length + 1)]
