"""Streams: datasets without [index], in parts on ranks, and resumed in between."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from program_support import WIDTH
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    TensorDataset,
    get_worker_info,
)
from training_support import program, run, user_of

import gemsc
from gemsc.datasets.samples import num_samples
from gemsc.datasets.stream import ENDLESS, as_dataset
from gemsc.errors import GemscError
from gemsc.plan_tables import PlannedShape
from gemsc.runtime.data.batches import Batch
from gemsc.runtime.data.shapes import ShapeClasses, all_numbers
from gemsc.runtime.data.shared import SharedData
from gemsc.runtime.data.stream_batches import StreamBatches, batches_of
from gemsc.runtime.data.stream_reader import Mark
from gemsc.runtime.training.checkpoints import Position
from gemsc.runtime.training.epochs import Epochs
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.transport.local import run_local
from gemsc.runtime.transport.transport import Transport


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
    batches = batches_of(stream, 4, **options)
    try:
        return [b.data[0].tolist() for b in batches.epoch(number, first)]
    finally:
        batches.close()


def test_an_epoch_is_the_beginning_of_the_stream_in_its_order() -> None:
    batches = epoch()
    order = [*range(12)]
    random.Random(0).shuffle(order)
    assert [int(s[0]) for batch in batches for s in batch] == order[:8]
    assert epoch(1) != batches
    assert epoch(1) == epoch(1)


class Late(Numbers):
    """It makes its generator when it begins to read for the first time."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        del self.rng

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        if not hasattr(self, "rng"):
            self.rng = np.random.default_rng()
        yield from super().__iter__()


def test_no_sample_is_lost_where_a_generator_is_found_late() -> None:
    first, again = (reading(Late(12)).rows for _ in range(2))
    assert first == again
    known = [[int(row[0]) for row in rows] for rows in reading(Numbers(12)).rows]
    assert [[int(row[0]) for row in rows] for rows in first] == known


@pytest.mark.slow
def test_random_numbers_of_a_sample_depend_on_nothing_else() -> None:
    batches = epoch()
    torch.rand(5), random.random(), np.random.rand()  # another rank drew more
    assert epoch() == batches
    assert epoch(first=1) == batches[1:]  # a run that goes on
    halves = [epoch(part=part, num_parts=2) for part in (0, 1)]
    assert [a + b for a, b in zip(*halves, strict=True)] == batches
    assert epoch(workers=3) == batches
    assert len({tuple(s[1:]) for batch in batches for s in batch}) == 8


def test_the_last_batch_of_an_evaluation_is_filled_up() -> None:
    *_, last = epoch(shuffle=False)
    assert [last[1]] * 2 == last[2:]
    assert last[0] != last[1]


def test_a_function_makes_pairs_of_what_the_stream_gives() -> None:
    stream = gemsc.Stream(Numbers(12), samples=10, pair=lambda item: (item[1], 7))
    first = next(batches_of(stream, 4, seed=0, shuffle=True).epoch(0))
    order = [*range(12)]
    random.Random(0).shuffle(order)
    assert [part.tolist() for part in first.data] == [order[:4], [7] * 4]


def test_an_object_that_has_been_read_begins_anew() -> None:
    stream, known = gemsc.Stream(Numbers(12), samples=10), epoch()
    for _ in range(2):  # compile reads samples, too
        first = [float(sample[0]) for sample, _ in islice(stream, 2)]
        assert first == [row[0] for row in known[0][:2]]
        batches = batches_of(stream, 4, seed=0, shuffle=True)
        assert [b.data[0].tolist() for b in batches.epoch(0)] == known


def test_a_stream_that_ends_says_how_long_it_is() -> None:
    stream = gemsc.Stream(Numbers(7), samples=10)
    with pytest.raises(GemscError) as caught:
        list(batches_of(stream, 5, seed=0, shuffle=True).epoch(0))
    assert "the stream ends after 7 samples, and an epoch takes 10" in str(caught.value)


def test_what_cannot_begin_anew_is_no_stream() -> None:
    with pytest.raises(GemscError, match="type generator cannot be read from its"):
        gemsc.Stream((n for n in range(3)), samples=3)
    with pytest.raises(GemscError, match="a Stream of 0 samples"):
        gemsc.Stream([1], samples=0)
    with pytest.raises(GemscError) as caught:
        num_samples(Numbers())
    assert "gemsc.Stream(it)" in str(caught.value.help)


class Shards(Numbers):
    """Four shards of different sizes, each for one worker; a note of what was made."""

    def __init__(self, *sizes: int, epochs: bool = True) -> None:
        super().__init__()
        self.sizes = sizes or (5, 8, 6, 7)
        self.epochs = epochs
        self.made: list[int] = []

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        info = get_worker_info()
        part, count = (info.id, info.num_workers) if info else (0, 1)
        for shard in range(len(self.sizes))[part::count]:
            for number in range(self.sizes[shard]):
                self.made.append(100 * shard + number)
                yield torch.tensor([float(self.made[-1]), self.rng.random()]), 0


class Stateful(Numbers):
    """It goes on where it was, and is `off` by so many samples."""

    def __init__(self, count: int = 22, off: int = 0) -> None:
        super().__init__(count)
        self.at, self.off, self.made = 0, off, 0

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        while self.at < self.count:
            self.at += 1
            self.made += 1
            yield torch.tensor([float(self.at), torch.rand(()).item()]), 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"] + (self.off if state["at"] else 0)


Rows = list[list[list[float]]]


@dataclass
class Reading:
    """What an epoch gave, where it was after each batch, and what was said."""

    rows: Rows
    marks: list[dict[int, Mark]]
    notes: list[str]
    batches: list[Batch]


def reading(
    source: Any,
    *,
    first: int = 0,
    marks: dict[int, Mark] | None = None,
    parts: int = 1,
    part: int = 0,
    copies: int | None = None,
    size: int = 4,
    epoch: int = 0,
    keeps: bool = True,
    **options: Any,
) -> Reading:
    """Read an epoch as one of `copies` of a model, of a stream in `parts`."""
    given = {"part": part, "num_parts": copies or parts, "shuffle": True, **options}
    batches = batches_of(as_dataset(source), size, seed=0, keeps_marks=keeps, **given)
    assert isinstance(batches, StreamBatches)
    batches.split(parts)
    batches.resume(epoch, marks or {})
    read = Reading([], [], [], [])
    try:
        for batch in batches.epoch(epoch, first):
            read.rows.append(batch.data[0].tolist())
            read.marks.append(batches.marks(epoch))
            read.notes += batch.notes
            read.batches.append(batch)
    finally:
        batches.close()
    return read


def test_each_replica_reads_its_part_and_no_more() -> None:
    sources = Shards(), Shards()
    one, other = (
        reading(source, parts=2, part=part) for part, source in enumerate(sources)
    )
    numbers = [[int(row[0]) for rows in r.rows for row in rows] for r in (one, other)]
    assert numbers[0] == [0, 1, 2, 3, 4, *range(200, 205)]  # of 11, in batches of 2
    assert numbers[1] == [*range(100, 108), *range(300, 306)]  # of 15
    assert {number // 100 % 2 for number in sources[0].made} == {0}
    assert min(sources[1].made) == 0  # the first of all, to be compared
    batches = batches_of(as_dataset(Shards()), 4, seed=0, shuffle=True, num_parts=2)
    assert isinstance(batches, StreamBatches)
    batches.split(2)
    assert batches.indices(1) == [4, 6, 5, 7]


@pytest.mark.slow(1)
@pytest.mark.parametrize("workers", [0, 1])
def test_all_parts_in_one_process_are_what_replicas_read(workers: int) -> None:
    whole = reading(Shards(), parts=2, copies=1, workers=workers).rows
    halves = [reading(Shards(), parts=2, part=part).rows for part in (0, 1)]
    assert [a + b for a, b in zip(*halves, strict=False)] == whole
    assert len(whole) == 5  # the shorter one ends it
    drawn = {row[1] for rows in whole for row in rows}
    assert len(drawn) == 20 - 1  # the first one of a part draws as reading begins
    quarters = [reading(Shards(), parts=2, copies=4, part=p).rows for p in range(4)]
    assert [a + b + c + d for a, b, c, d in zip(*quarters, strict=False)] == whole


class Drawn(Numbers):
    """Each reader draws the order anew, and takes what is its own."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        order = [*range(self.count)]
        random.shuffle(order)
        info = get_worker_info()
        for number in order[info.id :: info.num_workers] if info else order:
            yield torch.tensor([float(number)]), number


def test_what_is_drawn_as_reading_begins_is_alike_in_all_parts() -> None:
    orders = []
    for epoch in (0, 1):
        parts = [
            reading(Drawn(24), parts=3, part=part, size=6, epoch=epoch).rows
            for part in range(3)
        ]
        numbers = [int(n) for rows in parts for batch in rows for (n,) in batch]
        assert sorted(numbers) == [*range(24)]
        orders.append(numbers)
    assert orders[0] != orders[1]


class Asking(Numbers):
    """Asks who it is, and gives all of its samples to everyone."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        if (info := get_worker_info()) is not None:
            assert 0 <= info.id < info.num_workers
        return super().__iter__()


class Restless(Numbers):
    """Begins otherwise at each reading, whoever reads."""

    readings = itertools.count()

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        first = next(self.readings)
        for number in range(first, first + self.count):
            yield torch.tensor([float(number)]), number


@pytest.mark.parametrize(
    ("source", "splits"),
    [
        (Shards(), True),
        (Restless(), False),
        (gemsc.Stream(Shards()), True),
        (gemsc.Stream(Shards(), split=False), False),
        (Shards(5, 5), False),  # nothing is left for a third
        (Numbers(), False),
        (Asking(), False),
        (gemsc.Stream([(torch.rand(1), n) for n in range(9)]), False),
    ],
)
def test_only_what_differs_from_part_to_part_is_split(
    source: Any, splits: bool
) -> None:
    def found(part: int, **options: Any) -> bool:
        batches = batches_of(
            as_dataset(source), 6, seed=0, part=part, num_parts=3, **options
        )
        assert isinstance(batches, StreamBatches)
        return batches.can_split()

    assert all(found(part, shuffle=True) for part in range(3)) == splits
    assert not found(0, shuffle=False)  # an evaluation is of all samples
    assert not found(0, shuffle=True, least=2)  # the rest is of whoever has some
    assert get_worker_info() is None


def test_nobody_knows_the_end_before_the_last_batch() -> None:
    read = reading(Numbers(11))
    assert [batch.ends for batch in read.batches] == [False, True]
    assert all(batch.is_full and batch.count == 4 for batch in read.batches)
    read = reading(Numbers(11), part=0, copies=2)  # its own is there, others are not
    assert [batch.ends for batch in read.batches] == [False, True]
    assert [len(rows) for rows in read.rows] == [2, 2]
    assert [batch.ends for batch in reading(Numbers(12)).batches] == [False] * 2 + [
        True
    ]
    assert not reading(Numbers(3)).batches


def test_what_is_left_is_trained_where_the_number_is_known() -> None:
    stream = gemsc.Stream(Numbers(30), samples=11)
    order = [*range(30)]
    random.Random(0).shuffle(order)
    read = reading(stream, least=2)
    assert [batch.count for batch in read.batches] == [4, 4, 2]
    assert [int(row[0]) for row in read.rows[2]] == [*order[8:10], order[9], order[9]]
    assert len(reading(stream).batches) == 2


@pytest.mark.slow(1)
@pytest.mark.parametrize("part", [0, 1])
def test_an_evaluation_takes_all_that_comes(part: int) -> None:
    for count in range(1, 10):
        options: dict[str, Any] = {"shuffle": False, "part": part, "copies": 2}
        known = reading(gemsc.Stream(Numbers(count), samples=count), **options)
        read = reading(Numbers(count), **options)
        assert read.rows == known.rows
        counts = [min(4, count - first) for first in range(0, count, 4)]
        for side in (known, read):
            assert [batch.count for batch in side.batches] == counts
            assert [batch.is_full for batch in side.batches] == [n == 4 for n in counts]
        assert [batch.ends for batch in read.batches][-1]


@pytest.mark.slow(1)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_stream_goes_on_by_its_state(workers: int, parts: int) -> None:
    for part in range(parts):
        options: dict[str, Any] = {"parts": parts, "part": part, "size": 4 * parts}
        whole = reading(Stateful(), workers=workers, **options)
        for first in range(1, len(whole.rows)):
            source = Stateful()
            marks = whole.marks[first - 1]
            assert marks[part].first == 4 * (first - 1)
            later = reading(source, first=first, marks=marks, **options)
            assert later.rows == whole.rows[first:]
            assert not later.notes
            assert source.made == 0 if parts > 1 else source.made <= 22 - 4 * first + 4


class Ordered(Stateful):
    """It draws its order as reading begins, wherever that is."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return self._of(torch.randperm(self.count).tolist())

    def _of(self, order: list[int]) -> Iterator[tuple[Tensor, int]]:
        while self.at < self.count:
            self.at += 1
            yield torch.tensor([float(order[self.at - 1])]), 0


def test_what_is_drawn_as_reading_begins_is_so_wherever_it_goes_on() -> None:
    whole = reading(Ordered())
    later = reading(Ordered(), first=2, marks=whole.marks[1])
    assert later.rows == whole.rows[2:]
    assert not later.notes


@pytest.mark.parametrize("others", [Shards, Numbers])
def test_a_stream_is_split_if_all_ranks_can(others: Any) -> None:
    def split(transport: Transport) -> tuple[bool, int]:
        source = as_dataset(others() if transport.rank else Shards())
        options: dict[str, Any] = {"part": transport.rank, "num_parts": 2}
        batches = batches_of(source, 4, seed=0, shuffle=True, **options)
        assert isinstance(batches, StreamBatches)
        done = SharedData(batches, transport, "dataset", None).split(reads=True)
        return done, batches.num_parts

    can = others is Shards
    assert run_local(2, split) == [(can, 1 + can)] * 2


def test_a_state_is_not_trusted() -> None:
    whole = reading(Stateful())
    for off in (-1, 1, 100):
        source = Stateful(off=off)
        later = reading(source, first=3, marks=whole.marks[2])
        assert later.rows == whole.rows[3:]
        (note,) = later.notes
        assert note.startswith("12 samples of the stream were read again, and dropped")
        assert note.endswith("its state_dict() does not bring it back")


class Loading(DataLoader):
    """A loader with a state, as that of torchdata: the number of batches it gave."""

    at = first = 0

    def __iter__(self) -> Iterator[Any]:
        first, self.first = self.first, 0
        for self.at, batch in enumerate(super().__iter__(), 1):
            if self.at > first:
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = self.first = state["at"]


def rows_of(*numbers: int) -> TensorDataset:
    return TensorDataset(
        torch.arange(*numbers)[:, None].float(), torch.arange(*numbers)
    )


def test_batches_of_a_loader_are_taken_apart() -> None:
    one = DataLoader(rows_of(22), batch_size=5, shuffle=True)
    other = DataLoader(rows_of(22), batch_size=None, shuffle=True)
    both = [reading(gemsc.Stream(loader)).rows for loader in (one, other)]
    assert both[0] == both[1]
    flat = [int(number) for rows in both[0] for (number,) in rows]
    assert len({*flat}) == 20
    assert flat != sorted(flat)
    names = DataLoader([("a", 1), ("b", 2)], batch_size=2)
    with pytest.raises(GemscError, match="of the DataLoader cannot be split"):
        reading(gemsc.Stream(names))


def test_a_loader_goes_on_within_one_of_its_batches() -> None:
    def loader() -> Loading:
        return Loading(rows_of(22), batch_size=5)

    whole = reading(loader())
    states = [marks[0].state for marks in whole.marks]
    assert states == [None, *({"at": number} for number in range(4))]
    for first in range(1, 5):
        later = reading(loader(), first=first, marks=whole.marks[first - 1])
        assert later.rows == whole.rows[first:]
        assert not later.notes


class Piped(Numbers):
    """Counts epochs itself, as the shuffled parts of a WebDataset do."""

    def __init__(self) -> None:
        super().__init__(12)
        self.epoch = -1
        self.pipeline = [self]

    set_epoch = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        self.epoch += 1
        return super().__iter__()


def test_who_counts_epochs_is_told_which_one_begins() -> None:
    for number in (2, 0, 1, 1):
        order = [*range(12)]
        random.Random(number).shuffle(order)
        batches = reading(Piped(), epoch=number).rows
        assert [int(row[0]) for rows in batches for row in rows] == order


@pytest.mark.parametrize("workers", [0, 1])
def test_without_a_state_what_came_before_is_read_again(workers: int) -> None:
    whole = reading(Numbers(22), workers=workers)
    later = reading(Numbers(22), first=4, marks=whole.marks[3], workers=workers)
    assert later.rows == whole.rows[4:]
    (note,) = later.notes
    assert note.startswith("16 samples of the stream were read again")
    assert note.endswith("it has no state_dict() that a checkpoint can hold")


@pytest.mark.parametrize("make", [Stateful, Numbers])
def test_data_that_have_changed_are_noticed(make: Any) -> None:
    marks = reading(make(22)).marks[2]
    changed = {0: replace(marks[0], digest="of something else")}
    (note,) = reading(make(22), first=3, marks=changed).notes
    assert note.startswith("warning: the stream does not repeat what it returned")


def test_batches_of_another_size_go_on_at_the_same_sample() -> None:
    small, large = (reading(Stateful(24), size=size) for size in (2, 6))
    flat = [row for rows in small.rows for row in rows]
    assert flat == [row for rows in large.rows for row in rows]
    later = reading(Stateful(24), size=6, first=2, marks=small.marks[5])
    assert [row for rows in later.rows for row in rows] == flat[12:]
    assert not later.notes
    later = reading(Stateful(24), size=6, first=1, marks=small.marks[4])  # 10 of 12
    assert [row for rows in later.rows for row in rows] == flat[6:]
    for keeps in (True, False):
        within = {"size": 4, "first": 2, "marks": large.marks[1]}  # 8 of 6 to 11
        later = reading(Stateful(24), keeps=keeps, **within)
        assert [row for rows in later.rows for row in rows] == flat[8:]


def test_steps_are_counted_as_if_all_batches_had_the_new_size() -> None:
    """Nine steps of two samples: seven of an epoch, and two of the one that goes on."""
    batches = StreamBatches(gemsc.Stream(Numbers(40)), 4, seed=0, shuffle=True)
    epochs, steps = Epochs(batches, None, 2), SimpleNamespace(done=9)
    trainer: Any = SimpleNamespace(worker=SimpleNamespace(steps=steps))
    state = {"num_samples": ENDLESS, "epoch": 1, "batch_size": 2, "sample": 4}
    Position(trainer, epochs).load_state_dict(state)
    assert (epochs.now, epochs.start, steps.done) == (1, 3, 4)


def test_an_epoch_begins_where_the_one_before_it_ends() -> None:
    requests: Any = SimpleNamespace(agreed=lambda name: True, done=lambda name: None)
    batches = StreamBatches(gemsc.Stream(Numbers(40)), 4, seed=0, shuffle=True)
    epochs = Epochs(batches, None, 2)
    assert epochs.end(5, requests)
    assert epochs.place(7) == (1, 2)
    known = StreamBatches(gemsc.Stream(Numbers(8), samples=8), 4, seed=0, shuffle=True)
    of_steps = Epochs(known, 3, 1)
    assert [of_steps.left(done) for done in range(4)] == [2, 1, 1, 0]
    assert [of_steps.ends(step, requests) for step in (1, 2, 3)] == [False, True, True]


def test_marks_are_those_of_one_epoch() -> None:
    """A rank that reads nothing in the next one has none that were farther on."""
    stream, marks = gemsc.Stream(Numbers(12), samples=10), {0: Mark(4, None, 0, 4, "")}
    batches = StreamBatches(stream, 4, seed=0, shuffle=True)
    batches.resume(1, marks)
    assert [batches.marks(epoch) for epoch in (1, 2)] == [marks, {}]
    assert [batch.notes for batch in batches.epoch(2, 1)] == [()]
    assert len(next(batches.epoch(1, 1)).notes) == 1


def test_what_can_only_be_iterated_is_a_stream() -> None:
    assert isinstance(as_dataset(Numbers()), gemsc.Stream)
    stream = gemsc.Stream(Numbers())
    numbers, pair = [1, 2], iter([])
    for given in (stream, numbers, pair, None, Both()):
        assert as_dataset(given) is given
    with pytest.raises(TypeError):
        len(stream)


class Both(Numbers):
    """Has samples by their number as well."""

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index)]), index


class Pairs(Numbers):
    """With its own generator alone: ranks are threads here, and share the others."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = [*range(self.count)]
        random.Random(self.epoch).shuffle(order)
        info = get_worker_info()
        for number in order[info.id :: info.num_workers] if info else order:
            noise = torch.from_numpy(self.rng.random(WIDTH)).float()
            yield noise, torch.full((WIDTH,), float(number))


class Placed(Pairs):
    """Goes on by a state, with a tensor that does not stand in a checkpoint's text."""

    at = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.at < self.count:
            self.at += 1
            noise = torch.from_numpy(self.rng.random(WIDTH)).float()
            yield noise, torch.full((WIDTH,), float(self.at))

    def state_dict(self) -> dict[str, Any]:
        return {"at": torch.full((99,), self.at), "of": (1, None)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["of"] == (1, None)
        self.at = int(state["at"][7])


class Opaque(Placed):
    """With a state that no checkpoint holds."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "lock": object()}


def with_number(trainer: Trainer) -> tuple[int, dict[str, Tensor]]:
    return trainer.step_number, trainer.state_dict()


def known() -> gemsc.Stream:
    return gemsc.Stream(Pairs(13), samples=12)


def unknown() -> Pairs:
    return Pairs(27)


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    ("data", "copies", "steps", "said"),
    [
        (known, 1, 6, "it has no state_dict()"),
        (unknown, 1, 12, "it has no state_dict()"),
        (unknown, 2, 6, "it has no state_dict()"),
        (lambda: Placed(13), 1, 6, ""),
        (lambda: Opaque(13), 1, 6, "it has no state_dict()"),
    ],
)
def test_a_run_goes_on_in_the_middle_of_an_epoch(
    data: Any,
    copies: int,
    steps: int,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory = program(tmp_path / "program", ranks=2 * copies, data=copies)
    user = user_of(dataset=data, eval_dataset=data)
    words: list[Any] = ["--epochs", "2"]
    ranks = 2 * copies
    whole = run(directory, user, *words, ranks=ranks)
    save = tmp_path / "run"
    kept = "--save", save, "--checkpoint-every", 1, "--keep", 99
    run(directory, user, *words, *kept, ranks=ranks)
    assert len([*save.glob("step-*")]) == steps
    for step in (1, steps // 2, steps // 2 + 1, steps - 1):
        at = save / f"step-{step:06d}"
        resumed = run(
            directory, user, *words, "--resume", at, ranks=ranks, result=with_number
        )
        for state, (number, other) in zip(whole, resumed, strict=True):
            assert number == steps
            assert state.keys() == other.keys()
            assert all(torch.equal(state[name], other[name]) for name in state)
    text = capsys.readouterr().out
    assert "warning" not in text
    assert said in text
    assert bool(said) == ("were read again" in text)


@pytest.mark.slow
def test_an_end_is_one_for_all_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 27 samples one part has 14, the other 13: 7 and 6 batches of 2."""
    directory = program(tmp_path / "program", ranks=4, data=2, micro_batches=1)
    user = user_of(dataset=unknown)
    words: list[Any] = ["--epochs", "2", "--save", tmp_path / "run"]
    words += ["--checkpoint-every", 5, "--keep", 99]
    counts = run(directory, user, *words, ranks=4, result=Trainer.step_number.fget)
    assert counts == [12] * 4
    said = capsys.readouterr().out
    ends = "ends after 6 steps, with the data of replica 2; what the others had left"
    assert f"epoch 1 {ends}" in said
    assert f"epoch 2 {ends}" in said
    assert "epoch 1/2 6  loss" in said
    saved = sorted(path.name for path in (tmp_path / "run").glob("step-*"))
    assert saved == ["step-000005", "step-000010", "step-000012"]


@pytest.mark.slow
def test_steps_go_over_as_many_epochs_as_they_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, save = program(tmp_path / "program"), tmp_path / "run"
    user = user_of(dataset=unknown)
    whole = run(directory, user, "--steps", "14")
    assert "ends after" not in capsys.readouterr().out  # it does for all
    run(directory, user, "--steps", "6", "--save", save)  # an epoch, as it turns out
    resumed = run(directory, user, "--steps", "14", "--resume", save)
    for state, other in zip(whole, resumed, strict=True):
        assert all(torch.equal(state[name], other[name]) for name in state)
    with pytest.raises(GemscError, match="has already done 6 of 6 steps"):
        run(directory, user, "--steps", "6", "--resume", save)
    with pytest.raises(GemscError, match=r"already done all of 1 epoch\n"):
        run(directory, user, "--epochs", "1", "--resume", save)


@pytest.mark.slow
def test_replicas_go_on_with_the_parts_of_others(tmp_path: Path) -> None:
    """Two replicas, then one: it reads both of their parts."""
    two, one = (
        program(
            tmp_path / str(copies),
            ranks=2 * copies,
            data=copies,
            micro_batches=4 // copies,
        )
        for copies in (2, 1)
    )
    user, save = user_of(dataset=unknown), tmp_path / "run"
    whole = run(two, user, "--epochs", "2", ranks=4)
    run(two, user, "--steps", "4", "--save", save, ranks=4)
    resumed = run(one, user, "--epochs", "2", "--resume", save)
    for state, other in zip(whole[:2], resumed, strict=True):
        for name in state:
            close = {"rtol": 1e-5, "atol": 1e-6}
            torch.testing.assert_close(state[name], other[name], **close)


@pytest.mark.slow
def test_a_run_goes_on_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rank in the middle reads nothing, and knows of the first checkpoint alone."""
    directory, user = program(tmp_path / "program", ranks=3), user_of(dataset=unknown)
    whole = run(directory, user, "--epochs", "2", ranks=3)
    saves = [tmp_path / str(number) for number in range(2)]
    run(directory, user, "--steps", "5", "--save", saves[0], ranks=3)
    words = "--steps", "8", "--resume", saves[0], "--save", saves[1]
    run(directory, user, *words, ranks=3)
    resumed = run(directory, user, "--epochs", "2", "--resume", saves[1], ranks=3)
    for state, other in zip(whole, resumed, strict=True):
        assert all(torch.equal(state[name], other[name]) for name in state)
    said = capsys.readouterr().out
    assert "20 samples of the stream were read again" in said
    assert "8 samples of the stream were read again" in said
    assert "warning" not in said


@pytest.mark.slow
def test_what_needs_the_end_says_so(tmp_path: Path) -> None:
    directory = program(tmp_path / "program")
    with pytest.raises(GemscError) as caught:
        run(directory, user_of(dataset=unknown), "--last-batch", "train")
    assert "--last-batch train needs to know how many samples" in str(caught.value)
    with pytest.raises(GemscError) as caught:
        run(directory, user_of(dataset=lambda: Pairs(3)))
    assert "dataset ends before its first batch of 4 samples" in str(caught.value)
    saved = tmp_path / "run"
    run(directory, user_of(dataset=known), "--steps", "1", "--save", saved)
    with pytest.raises(GemscError) as caught:
        run(directory, user_of(dataset=unknown), "--resume", saved)
    assert "with 12 samples, but dataset() now has a stream without" in str(
        caught.value
    )


class Torn(Pairs):
    """From an epoch on, its order is another one on each rank."""

    def __init__(self, order: int, since: int) -> None:
        super().__init__(27)
        self.order, self.since = order, since

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch if epoch < self.since else self.order


@pytest.mark.slow(1)
@pytest.mark.parametrize(("split", "since"), [(True, 0), (False, 0), (False, 1)])
def test_replicas_that_read_another_order_are_stopped(
    split: bool, since: int, tmp_path: Path
) -> None:
    """Those that read the whole compare its first sample, in each epoch."""
    directory = program(tmp_path / "program", ranks=2, data=2)
    numbers = iter(range(99))
    lock = threading.Lock()

    def torn() -> gemsc.Stream:
        with lock:
            return gemsc.Stream(Torn(next(numbers), since), split=split)

    wrong = "dataset returns different data on ranks 0 and 1: sample 0, in epoch "
    wrong += str(since + 1)
    with pytest.raises(GemscError, match=wrong):
        run(directory, user_of(dataset=torn), "--epochs", "2", ranks=2)


class Short(Numbers):
    """Samples of 1, 2 or 3 numbers."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        for number in range(self.count):
            yield torch.ones(1 + number % 3), number


def of_length(length: int) -> PlannedShape:
    sizes = {"input.0": [length]}
    return PlannedShape(
        name=str(length),
        variant="",
        micro_batch_size=1,
        sizes=sizes,
        step_seconds=1.0,
        peak_bytes=[1],
    )


def test_samples_of_a_stream_are_padded() -> None:
    shapes = ShapeClasses([of_length(3)], pad_value=7)
    whole = reading(Short(22), shapes=shapes)
    ones = [1.0, 1.0, 1.0, 7.0, 7.0]
    flat = [row for rows in whole.rows for row in rows]
    assert flat == [ones[2 - n % 3 :][:3] for n in range(20)]
    later = reading(Short(22), first=3, marks=whole.marks[2], shapes=shapes)
    assert later.rows == whole.rows[3:]
    (note,) = later.notes  # no warning: they are the same
    assert note.startswith("12 samples of the stream were read again")
    narrow = ShapeClasses([of_length(2)])
    with pytest.raises(
        GemscError, match=r"sample 2: input\[0\] has shape \[3\], but its"
    ):
        reading(Short(22), shapes=narrow)


def test_shapes_of_a_stream_are_not_known_beforehand() -> None:
    shapes = ShapeClasses([of_length(2), of_length(3)])
    with pytest.raises(GemscError, match="of a Stream cannot be known in advance"):
        all_numbers(shapes, as_dataset(Short()), 0)
    inputs = [(torch.zeros(2, n),) for n in (2, 3)]
    user = user_of(dataset=Short, loss=torch.nn.MSELoss())
    user = replace(user, example_inputs=lambda: inputs)
    with pytest.raises(GemscError, match="of a Stream cannot be known in advance"):
        user.make_targets(user.make_shapes())
