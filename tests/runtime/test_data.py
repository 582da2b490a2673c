"""Batches are the same on every rank, whatever is random in the samples."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from gemsc.base.rng import seed_of
from gemsc.errors import GemscError
from gemsc.runtime.data.batches import Batches
from gemsc.runtime.data.held_generators import SeededReader, held_generators


class Noisy:
    """Samples with their index, and random numbers of every generator."""

    def __init__(self, size: int = 10) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        noise = [torch.rand(()).item(), random.random(), np.random.rand()]
        return torch.tensor([float(index), *noise]), index


def epoch(number: int = 0, first: int = 0, **options: Any) -> list[list[list[float]]]:
    options = {"size": 4, "seed": 0, "shuffle": True, **options}
    size = options.pop("size")
    dataset = options.pop("dataset", Noisy())
    return [
        b.data[0].tolist()
        for b in Batches(dataset, size, **options).epoch(number, first)
    ]


def indices(batches: list[list[list[float]]]) -> list[int]:
    return [int(sample[0]) for batch in batches for sample in batch]


def test_every_rank_reads_the_same_samples_with_the_same_noise() -> None:
    one = epoch()
    torch.rand(5), random.random(), np.random.rand()  # another rank drew more
    assert epoch() == one


@pytest.mark.slow
def test_workers_give_what_one_process_gives() -> None:
    assert epoch(workers=2) == epoch()
    options = {"seed": 0, "shuffle": True, "part": 1, "num_parts": 2}
    one, two = (
        [batch.digests for batch in Batches(Noisy(), 4, workers=n, **options).epoch(0)]
        for n in (0, 2)
    )
    assert one == two
    assert [len(digests) for digests in one] == [3, 0]  # and the first one of part 0


def test_each_epoch_has_another_order_and_other_noise() -> None:
    assert indices(epoch(0)) != indices(epoch(1))
    noise = [{s[0]: s[1:] for b in epoch(n, size=5) for s in b} for n in (0, 1)]
    assert noise[0].keys() == noise[1].keys()
    assert all(noise[0][i] != noise[1][i] for i in noise[0])
    assert epoch(seed=1) != epoch()


class Curriculum:
    """Samples that depend on the epoch that it was told."""

    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index), float(self.epoch)]), index


def parts(dataset: Curriculum) -> Any:
    given: Any = dataset
    whole = Subset(given, range(4)), Subset(given, range(4, 8))
    return ConcatDataset(whole)


@pytest.mark.parametrize("kind", [lambda dataset: dataset, parts])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_dataset_is_told_which_epoch_begins(kind: Any, workers: int) -> None:
    read = Batches(kind(Curriculum()), 4, seed=0, shuffle=True, workers=workers)
    for number in (3, 4, 7):  # a run that goes on begins with any
        first = 1 if number == 3 else 0
        told = [b.data[0][:, 1].tolist() for b in read.epoch(number, first)]
        assert told == [[float(number)] * 4] * (2 - first)
    read.close()


def test_training_drops_a_batch_that_is_not_full() -> None:
    batches = Batches(Noisy(), 4, seed=0, shuffle=True)
    assert len(batches) == 2
    seen = indices(epoch())
    assert len(seen) == 8 == len(set(seen))


def test_evaluation_fills_the_last_batch_up_and_says_how_much_counts() -> None:
    batches = Batches(Noisy(), 4, seed=0, shuffle=False)
    assert len(batches) == 3
    taken = list(batches.epoch(0))
    assert [len(row.indices) for row in batches.rows(0)] == [4, 4, 2]
    assert [batch.is_full for batch in taken] == [True, True, False]
    assert taken[2].data[1].tolist() == [8, 9, 9, 9]


def test_copies_of_the_model_share_a_batch() -> None:
    whole = epoch(size=4)
    halves = [epoch(size=4, part=part, num_parts=2) for part in range(2)]
    assert [a + b for a, b in zip(*halves, strict=True)] == whole


def test_a_copy_may_have_nothing_that_counts_in_the_last_batch() -> None:
    parts = [
        list(Batches(Noisy(9), 4, seed=0, shuffle=False, part=p, num_parts=2).epoch(0))
        for p in range(2)
    ]
    assert [batches[-1].data[1].tolist() for batches in parts] == [[8, 8], [8, 8]]
    assert not any(batches[-1].is_full for batches in parts)


def test_an_epoch_can_be_gone_on_with() -> None:
    assert epoch(first=1) == epoch()[1:]


class CountedTensor(Tensor):
    """Counts the elements of all that is taken out of it."""

    taken = 0

    def __getitem__(self, place: Any) -> Tensor:
        picked: Tensor = super().__getitem__(place)
        CountedTensor.taken += picked.numel()
        return picked


@pytest.mark.slow(1)
@pytest.mark.parametrize("part", [0, 1])
def test_of_the_order_of_an_epoch_each_batch_takes_its_own_samples(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And does so as it is read: the first one waits for no other."""
    permuted = torch.randperm

    def counted(*given: Any, **how: Any) -> Tensor:
        return permuted(*given, **how).as_subclass(CountedTensor)

    monkeypatch.setattr(torch, "randperm", counted)
    options: dict[str, Any] = {"seed": 0, "shuffle": True, "part": part}
    batches = Batches(Noisy(1000), 4, num_parts=2, **options)
    monkeypatch.setattr(CountedTensor, "taken", 0)
    stream = iter(batches.epoch(0))
    next(stream)
    assert 0 < CountedTensor.taken < 20
    assert len([*stream]) == 249
    assert CountedTensor.taken < 3 * 1000
    monkeypatch.setattr(CountedTensor, "taken", 0)
    next(batches.rows(0, 3))
    assert CountedTensor.taken == 4


def test_fewer_samples_than_a_batch_are_no_batch_of_training() -> None:
    assert len(Batches(Noisy(3), 4, seed=0, shuffle=True)) == 0
    assert len(Batches(Noisy(3), 4, seed=0, shuffle=False)) == 1


def test_a_dataset_without_a_length_is_refused() -> None:
    with pytest.raises(GemscError, match="does not say how many"):
        Batches(iter([]), 4, seed=0, shuffle=True)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([torch.zeros(2), torch.zeros(2)], "does not return .input, target. pairs"),
        ([{"x": 1, "y": None}] * 2, "type dict, with the keys 'x', 'y'"),
        ([(1, 2, 3)] * 2, "type tuple, of length 3"),
        ([(torch.zeros(2), 0), None], "sample 1: .* pairs: a sample is of type None"),
        ([(torch.zeros(2), 0), (torch.zeros(3), 0)], "cannot be collated"),
        ([(object(), 0), (object(), 0)], "cannot be collated"),
    ],
)
def test_samples_that_make_no_batch_are_refused(samples: Any, message: str) -> None:
    with pytest.raises(GemscError, match=message):
        epoch(dataset=samples, size=2)


def test_seeds_depend_on_every_part() -> None:
    seeds = {seed_of(a, b, c) for a in range(5) for b in range(5) for c in range(5)}
    assert len(seeds) == 125
    assert seed_of(1, 23) != seed_of(12, 3)
    assert all(0 <= seed < 2**64 for seed in seeds)


# Generators that a dataset has of its own


class Randomizable:
    """Draws as MONAI's transforms do: a generator of each, one of all at first."""

    R = np.random.RandomState()

    def set_random_state(self, seed: int) -> None:
        self.R = np.random.RandomState(seed)

    def __call__(self) -> float:
        return self.R.rand()


class Compose(Randomizable):
    def __init__(self, *transforms: Any) -> None:
        self.transforms = transforms

    def set_random_state(self, seed: int) -> None:
        super().set_random_state(seed)
        for transform in self.transforms:
            transform.set_random_state(self.R.randint(2**31))

    def __call__(self) -> Any:
        return [transform() for transform in self.transforms]


def composed(seed: int | None) -> Any:
    transforms = Compose(Randomizable(), Compose(Randomizable(), Randomizable()))
    if seed is not None:
        transforms.set_random_state(seed)
    return transforms


class Slotted:
    __slots__ = ("generator", "unset")

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.generator.seed()

    def __call__(self) -> float:
        return torch.rand((), generator=self.generator).item()


class Late:
    """Has a generator only once it has drawn."""

    def __init__(self) -> None:
        self.generator: Any = None

    def __call__(self) -> float:
        if self.generator is None:
            self.generator = random.Random()
        return self.generator.random()


OF_THE_FILE = random.Random()


def of_the_file() -> list[float]:
    return [OF_THE_FILE.random() for _ in range(2)]


def in_a_closure() -> Any:
    generator = np.random.Generator(np.random.MT19937())
    return partial(lambda high: high * generator.random(), 2.0)


class Drawing(Noisy):
    def __init__(self, *draws: Any, size: int = 10) -> None:
        super().__init__(size)
        self.options = {"several": [*draws]}

    def __getitem__(self, index: int) -> Any:
        sample, target = super().__getitem__(index)
        drawn = [torch.tensor(draw()).flatten() for draw in self.drawn()]
        return torch.cat([sample, *drawn]), target

    def drawn(self) -> list[Any]:
        return [
            draw
            for step in self.options["several"]
            for draw in (step.transforms if isinstance(step, Compose) else [step])
        ]


OWN = {
    "MONAI, with a seed": lambda: composed(0),
    "MONAI, without": lambda: composed(None),
    "slots, torch": Slotted,
    "made by the first sample": Late,
    "the user's file": lambda: of_the_file,
    "closure, NumPy": in_a_closure,
    "method, NumPy": lambda: np.random.default_rng().random,
    "method, Python": lambda: random.Random().random,
    "another algorithm": lambda: np.random.Generator(np.random.SFC64()).random,
}


@pytest.mark.slow(2)
@pytest.mark.parametrize("name", OWN)
def test_generators_that_a_dataset_holds_are_seeded_for_each_sample(name: str) -> None:
    """So a sample is the same wherever and after whatever it is read."""
    dataset = Drawing(OWN[name]())
    draws = {s[0]: s[4:] for batch in epoch(2, dataset=dataset, size=5) for s in batch}
    other = Drawing(OWN[name]())
    epoch(0, dataset=other)
    for options in ({}, {"first": 1}, {"workers": 2}):
        for sample in chain(*epoch(2, dataset=other, **options)):
            assert sample[4:] == draws[sample[0]]
    drawn = [number for numbers in draws.values() for number in numbers]
    assert len({*drawn}) == len(drawn) >= 10
    for batches in epoch(1, dataset=dataset), epoch(2, dataset=dataset, seed=8):
        assert batches[0][0][4] not in drawn


def test_an_epoch_with_more_samples_is_refused() -> None:
    """Batches are those of as many samples as the first epoch has."""

    class Growing(Curriculum):
        def __len__(self) -> int:
            return 8 + max(self.epoch, 0)

    read = Batches(Growing(), 4, seed=0, shuffle=True)
    assert len([*read.epoch(0)]) == 2
    with pytest.raises(GemscError, match=r"set_epoch\(1\) makes len\(\) .* 9, not 8"):
        next(read.epoch(1))


def test_two_generators_of_a_dataset_give_different_numbers() -> None:
    dataset = Drawing(random.Random().random, random.Random().random)
    (*_, one, other) = epoch(dataset=dataset)[0][0]
    assert one != other


def test_a_generator_that_an_epoch_brings_is_seeded_too() -> None:
    class New:
        def set_epoch(self, number: int) -> None:
            self.rng = random.Random()

    def drawn() -> list[float]:
        dataset = New()
        reader = SeededReader(dataset, 0)
        return [reader.read(i, 0, lambda: dataset.rng.random()) for i in range(2)]

    assert drawn() == drawn()


def test_generators_that_all_share_are_seeded_as_ever() -> None:
    shared = Drawing(np.random.rand, random.random, np.random.mtrand._rand.rand)
    seed = seed_of(0, 0, 3)
    sample = epoch(dataset=shared, shuffle=False)[0][3]
    numpy, python = np.random.RandomState(seed % 2**32), random.Random(seed)
    assert sample[2] == torch.tensor(python.random())
    assert sample[5] == torch.tensor(python.random())
    wanted = [torch.tensor(numpy.rand()).item() for _ in range(3)]
    assert [sample[3], sample[4], sample[6]] == wanted
    torch.manual_seed(seed)
    assert sample[1] == torch.rand(())


def test_of_a_long_list_only_the_first_items_are_looked_at() -> None:
    """Those of a million samples would be looked at in each epoch."""
    generators = [random.Random() for _ in range(1500)]
    assert len(held_generators([generators])) == 1000
    assert len(held_generators({"a": generators[:3], 0: {"0": generators[2:4]}})) == 4


def test_what_cannot_be_seeded_is_left_alone() -> None:
    state = np.random.RandomState(np.random.PCG64(1))  # takes no seed
    assert held_generators([state, random.Random, np.random, state.rand]) == {}

    class Odd:
        def __getattr__(self, name: str) -> Any:
            raise ValueError(name)

    assert held_generators(Odd()) == {}


# Samples that cannot be had


class Faulty:
    """Pairs of numbers; sample 3 is not like the others."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        if index == 3 and self.fault == "raises":
            raise ValueError("not a TIFF file")
        if index == 3 and self.fault == "ends":
            os._exit(1)
        size = 3 if index == 3 and self.fault == "shape" else 2
        return torch.full((size,), float(os.getpid())), index


@pytest.mark.slow(1)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raises", "sample 3 cannot be read: ValueError: not a TIFF file"),
        ("shape", "sample 3 has shape [3], sample 2 [2]"),
    ],
)
def test_a_sample_that_cannot_be_had_is_named(
    workers: int, fault: str, message: str
) -> None:
    batches = Batches(Faulty(fault), 2, seed=0, shuffle=False, workers=workers)
    read = batches.epoch(0)
    next(read)
    with pytest.raises(GemscError) as caught:
        next(read)
    assert message in caught.value.message
    assert "Traceback" not in str(caught.value)
    if fault == "raises":
        at = caught.value.at
        assert at is not None
        assert at.text == 'raise ValueError("not a TIFF file")'


HERE = Path(__file__).parent
PLACES = {"PYTHONPATH": str(HERE.parent / "support")}
READS_AND_ENDS = """
from gemsc.errors import GemscError
from gemsc.runtime.data.batches import Batches
from test_data import Faulty

try:
    list(Batches(Faulty("ends"), 2, seed=0, shuffle=False, workers=1).epoch(0))
except GemscError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_process_that_reads_and_ends_is_an_error() -> None:
    # torch raises wherever its signal comes: in pytest, if this were its process
    command = [sys.executable, "-c", READS_AND_ENDS]
    done = subprocess.run(
        command,
        cwd=HERE,
        env=os.environ | PLACES,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "a process that reads the dataset has died" in done.stdout


@pytest.mark.parametrize("error", [ConnectionResetError("by peer"), EOFError("of it")])
def test_a_process_that_ends_while_its_tensors_are_fetched_is_an_error(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(loader: object) -> None:
        raise error

    batches = Batches(Noisy(), 1, seed=0, shuffle=False)
    monkeypatch.setattr("torch.utils.data.DataLoader.__iter__", lambda loader: loader)
    monkeypatch.setattr("torch.utils.data.DataLoader.__next__", fails, raising=False)
    with pytest.raises(GemscError, match=r"has died: (by peer|of it)"):
        next(batches.epoch(0))


CLOSES = """
import time
from multiprocessing import active_children
from gemsc.runtime.data.batches import Batches
from test_data import Noisy

class Slow(Noisy):
    def __getitem__(self, index):
        if index:
            time.sleep(1000)
        return super().__getitem__(index)

batches = Batches(Slow(), 1, seed=0, shuffle=False, workers=2)
read = batches.epoch(0)
next(read)
readers = active_children()
batches.close()
print([reader.exitcode for reader in readers], flush=True)
time.sleep(0.1)
"""


@pytest.mark.slow
def test_processes_that_read_end_in_the_middle_of_a_sample() -> None:
    command = [sys.executable, "-c", CLOSES]
    done = subprocess.run(
        command,
        cwd=HERE,
        env=os.environ | PLACES,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("[-9, -9]\n", "", 0)


def test_processes_that_read_stay_from_epoch_to_epoch() -> None:
    batches = Batches(Faulty(""), 2, seed=0, shuffle=True, workers=1)
    alone = Batches(Faulty(""), 2, seed=0, shuffle=True)
    seen: set[float] = set()
    for epoch, stop in ((0, 3), (1, 1), (2, 3)):  # the second one is left half-way
        numbers = []
        for batch in itertools.islice(batches.epoch(epoch), stop):
            seen |= {*batch.data[0].flatten().tolist()}
            numbers.append(batch.data[1].tolist())
        wanted = [batch.data[1].tolist() for batch in alone.epoch(epoch)]
        assert numbers == wanted[:stop]
    assert len(seen) == 1
    assert seen != {float(os.getpid())}
