"""Streams: datasets without [index], in parts on ranks, and resumed in between."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from program_support import WIDTH
from torch import Tensor
from torch.utils.data import IterableDataset
from training_support import program, run, user_of

import gemsc
from gemsc.base.nests import num_samples
from gemsc.errors import GemscError
from gemsc.runtime.data.batches import Batches


class Numbers(IterableDataset):
    """Samples with their number and random ones; in another order in each epoch."""

    def __init__(self, count: int = 10) -> None:
        self.count = count
        self.epoch = 0
        self.rng = np.random.default_rng(1)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        order = [*range(self.count)]
        random.Random(self.epoch).shuffle(order)
        for number in order:
            noise = [torch.rand(()).item(), random.random(), self.rng.random()]
            yield torch.tensor([float(number), *noise]), number


def epoch(number: int = 0, first: int = 0, **options: Any) -> list[list[list[float]]]:
    stream = gemsc.Stream(Numbers(12), samples=10)
    options = {"seed": 0, "shuffle": True, **options}
    batches = Batches(stream, 4, **options)
    try:
        return [b.data[0].tolist() for b in batches.epoch(number, first)]
    finally:
        batches.close()


def test_an_epoch_is_the_beginning_of_the_stream_in_its_order() -> None:
    found = epoch()
    order = [*range(12)]
    random.Random(0).shuffle(order)
    assert [int(s[0]) for batch in found for s in batch] == order[:8]
    assert epoch(1) != found
    assert epoch(1) == epoch(1)


def test_random_numbers_of_a_sample_depend_on_nothing_else() -> None:
    found = epoch()
    torch.rand(5), random.random(), np.random.rand()  # another rank drew more
    assert epoch() == found
    assert epoch(first=1) == found[1:]  # a run that goes on
    halves = [epoch(part=part, num_parts=2) for part in (0, 1)]
    assert [a + b for a, b in zip(*halves, strict=True)] == found
    assert epoch(workers=3) == found
    assert len({tuple(s[1:]) for batch in found for s in batch}) == 8


def test_the_last_batch_of_an_evaluation_is_filled_up() -> None:
    *_, last = epoch(shuffle=False)
    assert [last[1]] * 2 == last[2:]
    assert last[0] != last[1]


def test_a_function_makes_pairs_of_what_the_stream_gives() -> None:
    stream = gemsc.Stream(Numbers(12), samples=10, pair=lambda item: (item[1], 7))
    first = next(Batches(stream, 4, seed=0, shuffle=True).epoch(0))
    order = [*range(12)]
    random.Random(0).shuffle(order)
    assert [part.tolist() for part in first.data] == [order[:4], [7] * 4]


def test_an_object_that_has_been_read_begins_anew() -> None:
    stream, found = gemsc.Stream(Numbers(12), samples=10), epoch()
    for _ in range(2):  # compile reads samples, too
        assert float(stream[0][0][0]) == found[0][0][0]
        assert float(stream[1][0][0]) == found[0][1][0]
        batches = Batches(stream, 4, seed=0, shuffle=True)
        assert [b.data[0].tolist() for b in batches.epoch(0)] == found
        stream.begin(0)


def test_a_stream_that_ends_says_how_long_it_is() -> None:
    stream = gemsc.Stream(Numbers(7), samples=10)
    with pytest.raises(GemscError) as caught:
        list(Batches(stream, 5, seed=0, shuffle=True).epoch(0))
    assert "the stream ends after 7 samples, and an epoch takes 10" in str(caught.value)


def test_what_cannot_begin_anew_is_no_stream() -> None:
    with pytest.raises(GemscError, match="type generator cannot be read from its"):
        gemsc.Stream((n for n in range(3)), samples=3)
    with pytest.raises(GemscError, match="a Stream of 0 samples"):
        gemsc.Stream([1], samples=0)
    with pytest.raises(GemscError) as caught:
        num_samples(Numbers())
    assert "gemsc.Stream(stream, samples=" in str(caught.value.help)


class Pairs(Numbers):
    """With its own generator alone: ranks are threads here, and share the others."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = [*range(self.count)]
        random.Random(self.epoch).shuffle(order)
        for number in order:
            noise = torch.from_numpy(self.rng.random(WIDTH)).float()
            yield noise, torch.full((WIDTH,), float(number))


def pairs() -> gemsc.Stream:
    return gemsc.Stream(Pairs(13), samples=12)


def test_a_run_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    directory = program(tmp_path / "program")
    user = user_of(dataset=pairs, eval_dataset=pairs)
    whole = run(directory, user, "--epochs", "2")
    save = tmp_path / "run"
    run(directory, user, "--epochs", "2", "--save", save, "--checkpoint-every", 1,
        "--keep", 9)  # fmt: skip
    for step in (1, 3, 5):
        at = save / f"step-{step:06d}"
        rest = run(directory, user, "--epochs", "2", "--resume", at)
        for state, other in zip(whole, rest, strict=True):
            assert state.keys() == other.keys()
            assert all(torch.equal(state[name], other[name]) for name in state)
