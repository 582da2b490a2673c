"""A loop of the user's own: batches that differ between ranks end it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from program_support import X, on_ranks, trunk, written

from gemsc.errors import GemscError
from gemsc.launch.launch import launch
from gemsc.runtime.data.tiled import Window, whole_window
from gemsc.runtime.training.alike import SameBatches
from gemsc.runtime.training.trainer import Trainer

PART = torch.cat([X, X + 1])  # two micro-batches
OTHER = PART.index_fill(1, torch.tensor([0]), 0.5)


def program_of(folder: Path, **options: Any) -> Path:
    options = {"ranks": 2, "micro_batches": 2, **options}
    written(folder / "program", trunk(), **options)
    return folder / "program"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return program_of(tmp_path_factory.mktemp("same"))


def differing(place: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    other = OTHER if rank else PART
    return (PART, other) if place == "target" else (other, PART)


@pytest.mark.parametrize("what", ["step", "evaluation"])
@pytest.mark.parametrize("place", ["input[0]", "target"])
def test_a_batch_that_differs_is_refused(what: str, place: str, program: Path) -> None:
    begun: list[int] = []

    def work(trainer: Trainer) -> None:
        trainer.add_callbacks([SameBatches()])
        do: Any = trainer.step if what == "step" else trainer.evaluate
        for equal in (True, True, False, True):  # the third is not looked at
            rank = 0 if equal else trainer.transport.rank
            do(*differing(place, rank))
            begun.append(rank)
        trainer.evaluate(PART, PART) if what == "step" else trainer.step(PART, PART)
        for _ in range(3):
            do(PART, PART)
        do(*differing(place, trainer.transport.rank))
        begun.append(8)

    match = re.escape(f"{place} of {what} 8 differs on ranks 0 and 1")
    with pytest.raises(GemscError, match=match) as caught:
        on_ranks(program, 2, work)
    assert "generator=torch.Generator().manual_seed(0)" in str(caught.value.help)
    assert 8 not in begun
    assert len(begun) == 8


def test_what_a_rank_does_not_get_is_not_compared(program: Path) -> None:
    def work(trainer: Trainer) -> None:
        trainer.add_callbacks([SameBatches()])
        first = trainer.transport.rank == 0
        trainer.step(PART if first else None, None if first else PART)

    on_ranks(program, 2, work)


def test_windows_are_not_compared(program: Path) -> None:
    seen = list[int]()

    def work(trainer: Trainer) -> None:
        given = "step", {"input": differing("input", trainer.transport.rank)[0]}
        windows: list[Window | None] = [whole_window((4, 4)), None]
        callbacks = [SameBatches(), SameBatches()]
        for callback, window in zip(callbacks, windows, strict=True):
            callback.on_batch(trainer, *given, window)
            seen.append(trainer.transport.rank)

    with pytest.raises(GemscError, match="input of step 1 differs on ranks 0 and 1"):
        on_ranks(program, 2, work)
    assert sorted(seen) == [0, 1]


def test_copies_may_get_their_parts_and_ranks_of_one_the_same(tmp_path: Path) -> None:
    program = program_of(tmp_path, ranks=4, data=2)
    whole = torch.cat([PART, OTHER])

    def train(*batches: torch.Tensor) -> None:
        def work(trainer: Trainer) -> None:
            trainer.add_callbacks([SameBatches()])
            batch = batches[trainer.transport.rank]
            trainer.step(batch, batch)

        on_ranks(program, 4, work)

    train(PART, PART, OTHER, OTHER)
    train(whole, whole, whole, whole)
    with pytest.raises(GemscError, match="step 1 differs on ranks 2 and 3"):
        train(PART, PART, OTHER, PART)
    with pytest.raises(GemscError, match="step 1 differs on ranks 0 and 2"):
        train(whole, whole, whole.flip(0), whole.flip(0))


LOOP = """\
import gemsc
import torch

trainer = gemsc.load("program")
torch.manual_seed(trainer.transport.rank)  # as an own generator on each rank
batch = torch.randn(4, 4)
trainer.step(batch, batch)
"""


@pytest.mark.mpi
def test_a_loop_that_draws_on_each_rank_is_refused(
    program: Path, tmp_path: Path
) -> None:
    (tmp_path / "program").symlink_to(program)
    (tmp_path / "loop.py").write_text(LOOP)
    with (tmp_path / "err").open("w") as err:
        words = [sys.executable, "loop.py"]
        assert launch(2, words, cwd=tmp_path, stderr=err, timeout=120) == 1
    text = "loop.py:7: error: input[0] of step 1 differs on ranks 0 and 1\n"
    assert text in (tmp_path / "err").read_text()
