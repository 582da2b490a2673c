"""Batches of several shapes: which samples are in them, and how they are padded."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from shape_support import (
    IGNORED,
    LENGTHS,
    classes_of,
    planned,
    texts,
)
from torch import Tensor
from torch.utils.data import TensorDataset

from gemsc.datasets.stream import Stream
from gemsc.errors import GemscError
from gemsc.runtime.data.batches import Batches
from gemsc.runtime.data.order import BatchOrder
from gemsc.runtime.data.shapes import (
    ShapeClasses,
    all_numbers,
    join_samples,
    numbers_of,
)
from gemsc.runtime.data.stream_batches import batches_of
from gemsc.runtime.transport.local import run_local
from gemsc.runtime.transport.transport import Transport

# ------------------------------------------------------------------- order


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("trains_rest", [True, False])
def test_each_sample_is_once_in_a_batch_of_its_shape(
    shuffle: bool, trains_rest: bool
) -> None:
    shapes = torch.randint(3, (101,), generator=torch.Generator().manual_seed(0))
    sizes, least = (8, 6, 4), (2, 3, 1) if trains_rest else (8, 6, 4)
    order = BatchOrder(101, sizes, least, seed=7, shuffle=shuffle, shapes=shapes)
    rows = [order.epoch(3).row(i) for i in range(len(order))]
    seen = Counter(i for row in rows for i in row.indices)
    assert max(seen.values()) == 1
    for row in rows:
        assert {int(shapes[i]) for i in row.indices} == {row.shape}
        assert len(row.indices) <= sizes[row.shape]
        assert len(row.indices) % least[row.shape] == 0
    for shape, (size, few) in enumerate(zip(sizes, least, strict=True)):
        count = int((shapes == shape).sum())
        used = sum(len(row.indices) for row in rows if row.shape == shape)
        assert used == count - count % size + (count % size) // few * few * trains_rest
    again = [order.epoch(4).row(i) for i in range(len(order))]
    assert (again == rows) is not shuffle
    mixed, other = ({frozenset(row.indices) for row in side} for side in (rows, again))
    assert (mixed == other) is not shuffle
    kinds = [[row.shape for row in side] for side in (rows, again)]
    assert sorted(kinds[0]) == sorted(kinds[1])  # an epoch has as many batches
    if shuffle:
        assert kinds[0] != kinds[1]
        assert kinds[0] != sorted(kinds[0])


def test_a_shape_without_samples_has_no_batch() -> None:
    shapes = torch.tensor([2, 0, 2, 2])
    order = BatchOrder(4, (1, 1, 2), (1, 1, 1), seed=0, shuffle=False, shapes=shapes)
    rows = [order.epoch(0).row(i) for i in range(len(order))]
    assert rows == [([1], 0), ([0, 2], 2), ([3], 2)]


# ----------------------------------------------------------- classes, padding


@pytest.mark.parametrize(
    ("length", "number"), [(1, 0), (4, 0), (5, 1), (6, 1), (7, 2), (8, 2)]
)
def test_a_sample_is_of_the_smallest_shape_that_it_fits(
    length: int, number: int
) -> None:
    words = torch.zeros(length)
    assert classes_of().number_of((words, words)) == number
    # in whichever order they are given
    turned = ShapeClasses([planned(n) for n in reversed(LENGTHS)])
    assert turned.number_of((words, words)) == 2 - number


def test_pictures_fit_in_both_directions() -> None:
    shapes = [
        planned(1, **{"input.0": [3, *size]}) for size in ((4, 8), (8, 4), (8, 8))
    ]
    numbers = [
        ShapeClasses(shapes).number_of((torch.zeros(3, *size), 1))
        for size in ((4, 5), (5, 4), (5, 5), (4, 4))
    ]
    assert numbers == [0, 1, 2, 0]


def test_padding_stands_at_the_end_with_the_value_of_each_tensor() -> None:
    sizes = {"input.words": [6], "input.mask": [2, 6], "target.ends": [6]}
    value = ({"words": 9, "other": 1}, {"ends": IGNORED})
    shapes = ShapeClasses([planned(6, **sizes)], value)
    sample = (
        {"words": torch.arange(4), "mask": torch.ones(2, 4).bool(), "kept": 3},
        {"ends": torch.ones(5).long().numpy(), "label": torch.tensor(2)},
    )
    inputs, target = shapes.padded(sample, 0)
    assert inputs["words"].tolist() == [0, 1, 2, 3, 9, 9]
    assert inputs["mask"].tolist() == [[True] * 4 + [False] * 2] * 2
    assert inputs["kept"] == 3
    assert target["ends"].tolist() == [1] * 5 + [IGNORED]
    assert target["label"] == 2
    words = torch.arange(4)
    whole = ShapeClasses([planned(6)], (7, IGNORED)).padded((words, words), 0)
    assert [tensor.tolist()[4:] for tensor in whole] == [[7, 7], [IGNORED] * 2]
    two = ShapeClasses([planned(6, **{"input.0": [6], "input.1": [6]})], ((7,), 0))
    (first, second), _ = two.padded(((words, words), 0), 0)
    assert (first.tolist()[4:], second.tolist()[4:]) == ([7, 7], [0, 0])
    of_numpy = [(words[:n].numpy(), words[:n].numpy()) for n in (3, 4)]
    short = ShapeClasses([planned(4)])
    batch = join_samples([short.padded(sample, 0) for sample in of_numpy], short, 0)
    assert batch[0].tolist() == [[0, 1, 2, 0], [0, 1, 2, 3]]
    assert classes_of(pad_value=5).padded((words, words), 1)[1].tolist()[4:] == [5, 5]


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.uint8, -100),
        (torch.int64, 0.5),
        (torch.bool, 2),
        (torch.float32, "0"),
        (torch.float16, -1e9),
        (torch.int64, (0,)),
        (torch.int64, None),
    ],
)
def test_padding_that_a_tensor_cannot_hold_is_refused(
    dtype: torch.dtype, value: Any
) -> None:
    words = torch.ones(3).to(dtype)
    with pytest.raises(GemscError, match=r"pad_value gives .* for target, which is"):
        classes_of(pad_value=(0, value)).padded((words, words), 0)


@pytest.mark.parametrize(
    ("how", "length", "message"),
    [
        (
            {},
            9,
            r"it does not fit any shape: input\[0\] \[9\], target \[9\]; the shapes",
        ),
        ({"bucket": lambda sample: 3}, 2, "bucket returns 3, which is not the index"),
        ({"bucket": lambda sample: "4"}, 2, "bucket returns '4'"),
        ({"bucket": lambda sample: True}, 2, "bucket returns True"),
        ({"bucket": lambda sample: torch.tensor(1.0)}, 2, r"bucket returns tensor\(1"),
    ],
)
def test_a_sample_of_no_shape_is_refused(how: Any, length: int, message: str) -> None:
    data = [(torch.zeros(n), torch.zeros(n)) for n in (2, length)]
    with pytest.raises(GemscError, match=f"sample [01]: {message}"):
        numbers_of(classes_of(**how), data, 0, range(2))


def test_a_grey_picture_gets_no_colours_of_zeros() -> None:
    sizes = {"input.0": [3, 8, 8], "target": [4, 8, 8]}
    shapes = ShapeClasses([planned(8, **sizes)])
    masks = torch.ones(1, 6, 8)  # of four
    data = [(torch.ones(channels, 8, 5), masks) for channels in (3, 2, 1)]
    assert numbers_of(shapes, data, 0, range(2)) == [0, 0]
    with pytest.raises(GemscError, match=r"sample 2: .* input\[0\] \[1, 8, 5\]"):
        numbers_of(shapes, data, 0, range(3))


@pytest.mark.parametrize("kind", [np.int64, torch.tensor])
def test_a_bucket_may_be_an_integer_of_a_library(kind: Any) -> None:
    shapes = classes_of(bucket=lambda sample: kind(len(sample[0]) // 3))
    data = [(torch.zeros(n), torch.zeros(n)) for n in (2, 5, 8)]
    numbers = numbers_of(shapes, data, 0, range(3))
    assert numbers == [0, 1, 2]
    assert {*map(type, numbers)} == {int}


def test_a_sample_that_grows_is_refused_when_it_is_read() -> None:
    class Growing:
        lengths = itertools.chain([3], itertools.repeat(5))

        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return torch.zeros(n := next(self.lengths)), torch.zeros(n)

    data, shapes = Growing(), classes_of()
    numbers = torch.tensor(numbers_of(shapes, data, 0, range(1)))
    how: dict[str, Any] = {"shapes": shapes, "numbers": numbers}
    batches = Batches(data, (1, 1, 1), seed=0, shuffle=False, **how)
    with pytest.raises(
        GemscError, match=r"sample 0: input\[0\] has shape \[5\], but its"
    ):
        next(batches.epoch(0))


def test_a_dataset_may_know_its_shapes_without_being_read() -> None:
    class Known(TensorDataset):
        def bucket(self, index: int) -> int:
            return index % 3

        def __getitem__(self, index: int) -> Any:
            raise AssertionError

    assert numbers_of(classes_of(), Known(torch.zeros(6)), 0, range(2, 6)) == [
        2,
        0,
        1,
        2,
    ]


@pytest.mark.parametrize("is_shared", [False, True])
def test_there_may_be_more_shapes_than_a_byte_can_count(is_shared: bool) -> None:
    classes = ShapeClasses([planned(n) for n in range(1, 301)])
    data = [(torch.zeros(n), torch.zeros(n)) for n in (3, 257, 300, 1, 256)]

    def work(transport: Transport | None) -> Any:
        numbers = all_numbers(classes, data, 0, transport)
        assert numbers is not None
        return numbers.tolist()

    of_ranks = run_local(2, work) if is_shared else [work(None)]
    assert of_ranks == [[2, 256, 299, 0, 255]] * len(of_ranks)


def test_the_files_own_functions_choose_and_join() -> None:
    calls: list[tuple[int, int]] = []

    def collate(samples: list[Any], number: int) -> Any:
        calls.append((len(samples), number))
        wide = torch.full((len(samples), LENGTHS[number]), 10)
        return wide, torch.tensor([len(words) for words, _ in samples])

    shapes = classes_of(bucket=lambda sample: 2 - len(sample[0]) % 2, collate=collate)
    data = texts(8)
    numbers = torch.tensor(numbers_of(shapes, data, 0, range(8)))
    assert numbers.tolist() == [2 - len(words) % 2 for words, _ in data]
    how: dict[str, Any] = {"shapes": shapes, "numbers": numbers}
    batches = [*Batches(data, (2, 2, 2), seed=0, shuffle=False, **how).epoch(0)]
    assert calls == [(batch.count, batch.shape) for batch in batches]
    assert all(batch.data[0].shape == (2, LENGTHS[batch.shape]) for batch in batches)


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("count", [9, 11, 14, 15])
@pytest.mark.parametrize("array", [torch.tensor, np.array])
@pytest.mark.parametrize("streams", [False, True])
def test_a_collate_that_sorts_does_not_see_what_fills_up_a_batch(
    streams: bool, array: Any, count: int, part: int
) -> None:
    def collate(samples: list[Any], number: int) -> Any:
        pairs = sorted((int(x), str(y)) for x, y in samples)[::-1]
        return array([x for x, _ in pairs]), [y for _, y in pairs]

    numbers = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    data: Any = [(number, number.item()) for number in numbers]
    data = Stream(data) if streams else data
    shapes = ShapeClasses([planned(1)], collate=collate)
    how: dict[str, Any] = {"part": part, "num_parts": 2, "shapes": shapes}
    *_, last = batches_of(data, 8, seed=0, shuffle=False, **how).epoch(0)
    wanted = numbers[8:].tolist()[4 * part :][:4] or numbers[-1:].tolist()
    wanted = sorted(wanted)[::-1]
    wanted += wanted[-1:] * (4 - len(wanted))
    assert last.data[0].tolist() == wanted
    assert last.data[1] == [*map(str, wanted)]


def test_an_error_of_collate_has_its_line() -> None:
    shapes = classes_of(collate=lambda samples, number: samples[0][0].nothing)
    how: dict[str, Any] = {"shapes": shapes, "numbers": torch.zeros(3).long()}
    with pytest.raises(
        GemscError, match=r"collate\(\) fails: AttributeError"
    ) as caught:
        next(Batches(texts(3), (1, 1, 1), seed=0, shuffle=False, **how).epoch(0))
    assert caught.value.at is not None
    assert caught.value.at.file == __file__
