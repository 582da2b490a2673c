"""A run goes on at its sample, with batches of another size, and with the same data."""

from __future__ import annotations

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
    rest = samples(large, "--epochs", "2", "--resume", saved)
    assert first + rest == whole
    assert len(whole) == 24


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
