"""Batches of several shapes: which samples are in them, and what is trained on them."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from program_support import on_ranks, weights_in
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from training_support import run, user_of

from gemsc.base.examples import target_like
from gemsc.base.rng import seed_of
from gemsc.codegen.package import write_directory
from gemsc.compiler import CompiledProgram, compile
from gemsc.datasets.samples import joins_samples
from gemsc.datasets.stream import Stream
from gemsc.errors import GemscError
from gemsc.ir.meta import facts
from gemsc.lowering.tracing import trace
from gemsc.lowering.variants import find_largest
from gemsc.plan import Plan
from gemsc.plan_tables import PlannedShape
from gemsc.runtime.data.batches import Batches
from gemsc.runtime.data.order import BatchOrder
from gemsc.runtime.data.shapes import (
    ShapeClasses,
    all_numbers,
    join_samples,
    numbers_of,
    shape_of_batch,
)
from gemsc.runtime.data.stream_batches import batches_of
from gemsc.runtime.training.datasets import shape_classes
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.transport.local import run_local
from gemsc.runtime.transport.transport import Transport
from gemsc.verify import steps as verify_steps

WORDS, WIDTH, IGNORED = 11, 4, -100
LENGTHS = (4, 6, 8)
SIZES = (3, 2, 1)  # samples of a micro-batch of each shape
TABLES = {n: torch.full((WIDTH,), 1.0 / n) for n in LENGTHS}  # no part of the model


class Words(nn.Module):
    """Attention to the words before, a tied head, a buffer that counts."""

    def __init__(self, count: bool = True) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.out.weight = self.words.weight
        self.a, self.b = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.c = nn.Linear(WIDTH, WIDTH)
        self.count = count
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def attend(self, layer: nn.Module, x: Tensor) -> Tensor:
        parts = layer(x).unsqueeze(1).chunk(3, -1)
        return x + F.scaled_dot_product_attention(*parts, is_causal=True).squeeze(1)

    def forward(self, words: Tensor) -> Tensor:
        if self.count:
            self.seen += 1
        x = self.attend(self.a, self.words(words))
        x = self.attend(self.b, x)
        return self.out(torch.tanh(self.c(x)))


class Functional(Words):
    """Its forward takes weights when it comes to them."""

    def forward(self, words: Tensor) -> Tensor:
        x = F.embedding(words, self.words.weight)
        x = torch.tanh(F.linear(x, self.c.weight))
        return F.linear(x, self.out.weight)


class Scaled(Words):
    """Another constant for each length."""

    def forward(self, words: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        x = self.attend(self.a, self.words(words)) * TABLES[words.shape[1]]
        return self.out(torch.tanh(self.c(self.attend(self.b, x))))


def counted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(
        output.flatten(0, 1), target.flatten(), reduction="sum", ignore_index=IGNORED
    )
    return total, (target != IGNORED).sum()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def examples() -> list[tuple[Tensor]]:
    pairs = zip(SIZES, LENGTHS, strict=True)
    return [(torch.arange(size * n).reshape(size, n) % WORDS,) for size, n in pairs]


def texts(count: int = 40, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        length = int(torch.randint(2, max(LENGTHS) + 1, (), generator=generator))
        line = torch.randint(1, WORDS, (length + 1,), generator=generator)
        found.append((line[:-1], line[1:]))
    return found


def compiled(folder: Path, model: nn.Module, **options: Any) -> CompiledProgram:
    shapes = examples()
    given: dict[str, Any] = {"ranks": 2, "micro_batches": 2, "check": False}
    program = compile(
        model,
        shapes,
        loss=counted,
        example_target=[x for (x,) in shapes],
        optimizer=sgd,
        **{**given, **options},
    )
    write_directory(program.compilation, folder)
    return program


def planned(length: int, size: int = 1, **sizes: list[int]) -> PlannedShape:
    return PlannedShape(
        name=str(length),
        variant=str(length),
        micro_batch_size=size,
        sizes=sizes or {"input.0": [length], "target": [length]},
        step_seconds=1.0,
        peak_bytes=[1],
    )


def classes_of(**how: Any) -> ShapeClasses:
    return ShapeClasses([planned(n) for n in LENGTHS], **how)


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
    kinds = [[row.shape for row in each] for each in (rows, again)]
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
    found = [
        ShapeClasses(shapes).number_of((torch.zeros(3, *size), 1))
        for size in ((4, 5), (5, 4), (5, 5), (4, 4))
    ]
    assert found == [0, 1, 2, 0]


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
    assert [each.tolist()[4:] for each in whole] == [[7, 7], [IGNORED] * 2]
    two = ShapeClasses([planned(6, **{"input.0": [6], "input.1": [6]})], ((7,), 0))
    (first, second), _ = two.padded(((words, words), 0), 0)
    assert (first.tolist()[4:], second.tolist()[4:]) == ([7, 7], [0, 0])
    of_numpy = [(words[:n].numpy(), words[:n].numpy()) for n in (3, 4)]
    short = ShapeClasses([planned(4)])
    batch = join_samples([short.padded(each, 0) for each in of_numpy], short, 0)
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
    found = numbers_of(shapes, data, 0, range(3))
    assert found == [0, 1, 2]
    assert {*map(type, found)} == {int}


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
        found = all_numbers(classes, data, 0, transport)
        assert found is not None
        return found.tolist()

    found = run_local(2, work) if is_shared else [work(None)]
    assert found == [[2, 256, 299, 0, 255]] * len(found)


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
    found = [*Batches(data, (2, 2, 2), seed=0, shuffle=False, **how).epoch(0)]
    assert calls == [(each.count, each.shape) for each in found]
    assert all(each.data[0].shape == (2, LENGTHS[each.shape]) for each in found)


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("count", [9, 11, 14, 15])
@pytest.mark.parametrize("array", [torch.tensor, np.array])
@pytest.mark.parametrize("streams", [False, True])
def test_a_collate_that_sorts_does_not_see_what_fills_up_a_batch(
    streams: bool, array: Any, count: int, part: int
) -> None:
    def collate(samples: list[Any], number: int) -> Any:
        found = sorted((int(x), str(y)) for x, y in samples)[::-1]
        return array([x for x, _ in found]), [y for _, y in found]

    numbers = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    data: Any = [(number, number.item()) for number in numbers]
    data = Stream(data) if streams else data
    shapes = ShapeClasses([planned(1)], collate=collate)
    how: dict[str, Any] = {"part": part, "num_parts": 2, "shapes": shapes}
    *_, last = batches_of(data, 8, seed=0, shuffle=False, **how).epoch(0)
    own = numbers[8:].tolist()[4 * part :][:4] or numbers[-1:].tolist()
    own = sorted(own)[::-1]
    own += own[-1:] * (4 - len(own))
    assert last.data[0].tolist() == own
    assert last.data[1] == [*map(str, own)]


def test_an_error_of_collate_has_its_line() -> None:
    shapes = classes_of(collate=lambda samples, number: samples[0][0].nothing)
    how: dict[str, Any] = {"shapes": shapes, "numbers": torch.zeros(3).long()}
    with pytest.raises(
        GemscError, match=r"collate\(\) fails: AttributeError"
    ) as caught:
        next(Batches(texts(3), (1, 1, 1), seed=0, shuffle=False, **how).epoch(0))
    assert caught.value.at is not None
    assert caught.value.at.file == __file__


# ------------------------------------------------------------- against one process


def in_one_process(
    model: Words, data: list[Any], batches: list[list[list[int]]]
) -> tuple[list[float], dict[str, Tensor]]:
    """Train without padding, sample by sample: batches of micro-batches of samples."""
    model = copy.deepcopy(model).double()
    optimizer, losses = sgd(model.named_parameters()), []
    for micro_batches in batches:
        total = terms = torch.zeros(())
        for part in micro_batches:
            if model.count:  # once for each micro-batch
                model.seen -= len(part) - 1
            for index in part:
                words, target = data[index]
                one, count = counted(model(words[None]), target[None])
                total, terms = total + one, terms + count
        (total / terms).backward()
        losses.append(float((total / terms).detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


OPTIONS: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "data": {"ranks": 4, "data": 2, "micro_batches": 1},
    "parts of the optimizer": {
        "ranks": 2,
        "data": 2,
        "micro_batches": 1,
        "shard": "optimizer",
    },
    "mirrored": {"schedule": "bidirectional"},
    "deferred": {"schedule": "zb-h1", "micro_batches": 3},
    "recomputed": {"recompute": ("all",)},
    "three stages": {"ranks": 3},
}


def run_of(folder: Path, data: list[Any], options: dict[str, Any], *words: str) -> Any:
    losses: list[float] = []

    def on_step(trainer: Trainer, report: Any) -> None:
        if trainer.transport.rank == 0:
            losses.append(report.loss)

    user = user_of(
        dataset=lambda: data,
        optimizer=sgd,
        pad_value=(0, IGNORED),
        on_step=on_step,
    )
    ranks, dtype = options.get("ranks", 2), torch.float64
    states = run(
        folder, user, *words, "--save", str(folder / "run"), ranks=ranks, dtype=dtype
    )
    return losses, states


def test_that_zeros_fill_up_targets_is_told(tmp_path: Path, capfd: Any) -> None:
    """They are a class like others."""
    compiled(tmp_path / "x", Words())
    for given in ({}, {"pad_value": (0, IGNORED)}):
        run(tmp_path / "x", user_of(dataset=texts, **given), "--steps", 1)
        note = "filled up with zeros, which the loss counts; pad_value = (0, -100)"
        assert (note in capfd.readouterr().out) == (not given)


@pytest.mark.slow
@pytest.mark.by_day(4)
@pytest.mark.parametrize("way", OPTIONS)
def test_a_padded_run_is_that_of_the_samples_themselves(
    way: str, tmp_path: Path, in_double: None
) -> None:
    options, data = OPTIONS[way], texts()
    model = Words(count=way not in ("mirrored", "data", "parts of the optimizer"))
    program = compiled(tmp_path / "x", model.double(), **options)
    plan, kinds = program.plan, set[int]()
    assert [each.name for each in plan.shapes] == ["4", "6", "8"]
    expected: list[list[list[int]]] = []
    shapes = ShapeClasses(plan.shapes)
    numbers = torch.tensor(numbers_of(shapes, data, 0, range(len(data))))
    order = BatchOrder(
        len(data),
        plan.batch_sizes,
        plan.batch_sizes,
        seed=0,
        shuffle=True,
        shapes=numbers,
    )
    for epoch in range(2):
        for i in range(len(order)):
            row = order.epoch(epoch).row(i)
            kinds.add(row.shape)
            size = SIZES[row.shape]
            parts = range(0, len(row.indices), size)
            expected.append([row.indices[at : at + size] for at in parts])
    assert kinds == {0, 1, 2}
    losses, state = in_one_process(model, data, expected)
    found, states = run_of(tmp_path / "x", data, options, "--epochs", "2")
    assert found == pytest.approx(losses, rel=1e-12)
    for each in states:
        for name, tensor in each.items():
            torch.testing.assert_close(tensor, state[name], rtol=1e-9, atol=1e-12)
    assert set(state) - set().union(*states) <= {"out.weight"}


@pytest.mark.slow
def test_each_shape_has_its_own_constants(tmp_path: Path, in_double: None) -> None:
    """A tensor of no module is another one for each length."""
    compiled(tmp_path, Scaled().double())
    shapes = examples()
    model = Scaled().double()
    found: dict[str, Tensor] = {}
    for state in on_ranks(tmp_path, 2, Trainer.state_dict, dtype=torch.float64):
        found |= state
    model.load_state_dict(found | {"out.weight": found["words.weight"]})

    def work(trainer: Trainer) -> list[float]:
        batches = [torch.cat([x, x]) for (x,) in shapes]
        found = [trainer.evaluate(x, x).loss for x in batches]
        assert None not in found
        return found  # type: ignore[return-value]

    for losses in on_ranks(tmp_path, 2, work, dtype=torch.float64):
        wanted = [counted(model.eval()(x), x) for (x,) in shapes]
        means = [float(total / count) for total, count in wanted]
        assert losses == pytest.approx(means, rel=1e-12)


class Switching(Words):
    """Another constant in evaluation."""

    def forward(self, words: Tensor) -> Tensor:
        x = self.attend(self.a, self.words(words))
        x = x * TABLES[LENGTHS[0] if self.training else LENGTHS[1]]
        return self.out(torch.tanh(self.c(self.attend(self.b, x))))


@pytest.mark.slow
def test_evaluation_has_its_own_constants() -> None:
    (words,) = examples()[0]
    options: dict[str, Any] = {"ranks": 2, "micro_batches": 2}
    program = compile(
        Switching(), (words,), loss=counted, example_target=words, **options
    )
    assert program.plan.unchecked == ""  # it is that of the model


class Pixels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.b(torch.relu(self.a(x))))))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"tiles": ("2x1",)}, {"shards": ("2",)}, {"tiles": ("2x1", "1"), "ranks": 3}],
    ids=["tiles", "shards", "a stage of tiles"],
)
def test_stages_are_split_for_each_shape(options: dict[str, Any]) -> None:
    shapes = [(torch.randn(2, 3, *size),) for size in ((8, 16), (16, 16))]
    targets = [torch.randint(2, (2, *x.shape[2:])) for (x,) in shapes]
    options = {"ranks": 2, "micro_batches": 2, **options}
    loss = nn.CrossEntropyLoss()
    program = compile(Pixels(), shapes, loss=loss, example_target=targets, **options)
    assert [each.name for each in program.plan.shapes] == ["8", "16"]
    assert program.plan.unchecked == ""  # a step of each is that of the model


def test_values_are_whole_where_a_shape_has_one_sample_and_two_ranks() -> None:
    def sharded(sizes: Sequence[int], trunk: str) -> CompiledProgram:
        pairs = zip(sizes, LENGTHS, strict=True)
        shapes = [(torch.ones(pair, dtype=torch.int64),) for pair in pairs]
        targets = [x for (x,) in shapes]
        given: dict[str, Any] = {"ranks": 2, "shards": ("2",), "trunk": trunk}
        model = Words(count=False)
        return compile(model, shapes, loss=counted, example_target=targets, **given)

    for sizes, trunk, found in (
        ((8, 3, 1), "auto", "whole"),
        ((8, 3, 2), "batch", "batch"),
        ((8, 3, 1), "sequence", "sequence"),
    ):
        plan = sharded(sizes, trunk).plan
        assert [stage.trunk for stage in plan.stages] == [found]
        assert plan.unchecked == ""  # a step of each shape is that of the model
    message = "--trunk batch splits a dimension of 1 over 2 ranks in Words, 8"
    with pytest.raises(GemscError, match=message):
        sharded((8, 3, 1), "batch")


def test_a_shape_has_too_few_samples_however_its_graph_is_written() -> None:
    shapes = [(torch.ones(size, dtype=torch.int64),) for size in ((8, 4), (1, 8))]
    targets = [x for (x,) in shapes]
    given: dict[str, Any] = {"shards": ("2",), "trunk": "batch", "check": False}
    given |= {"loss": counted, "example_target": targets, "ranks": 2}
    message = "--trunk batch splits a dimension of 1 over 2 ranks in Functional, 8"
    with pytest.raises(GemscError, match=message):
        compile(Functional(), shapes, **given)


class Deep(nn.Module):
    """A model that does more with small pictures than with large ones."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(20 if x.shape[-1] < 16 else 1):
            x = torch.relu(self.conv(x))
        return self.head(x.mean((2, 3)))


def test_a_plan_has_room_for_whichever_shape_needs_most() -> None:
    shapes = [(torch.randn(2, 3, size, size),) for size in (8, 64)]
    given: dict[str, Any] = {"loss": F.cross_entropy, "ranks": 2}
    target = torch.zeros(2, dtype=torch.int64)
    plan = compile(Deep(), shapes, example_target=[target, target], **given).plan
    small, large = plan.shapes
    assert small.variant == ""
    assert small.peak_bytes < large.peak_bytes
    peaks = zip(small.peak_bytes, large.peak_bytes, strict=True)
    assert plan.peak_bytes == [max(pair) for pair in peaks]
    assert [sum(row.values()) for row in plan.memory] == plan.peak_bytes


def test_of_shapes_that_take_as_long_the_largest_costs_most() -> None:
    graphs = {str(n): trace(nn.ReLU(), (torch.randn(2, n),)) for n in (2, 4, 3)}
    same = {"forward_seconds": 1.0, "backward_seconds": 1.0}
    for node in [node for g in graphs.values() for node in g.program.graph.nodes]:
        facts.set(node, replace(facts(node), **same))
    assert find_largest(graphs) == "4"


class Branches(nn.Module):
    """Two branches whose cost does not depend on the size of the picture."""

    def __init__(self) -> None:
        super().__init__()
        pools = [nn.Identity(), nn.Identity(), *(nn.AdaptiveAvgPool2d(8),) * 2]
        pairs = zip(pools, (1, 2, 12, 7), strict=True)
        self.parts = nn.ModuleList(
            nn.Sequential(pool, *convs(count), nn.AdaptiveAvgPool2d(1))
            for pool, count in pairs
        )
        self.head = nn.Conv2d(12, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([part(x) for part in self.parts], 1)).flatten(1)


def convs(count: int) -> list[nn.Module]:
    return [nn.Conv2d(3, 3, 3, padding=1) for _ in range(count)]


@pytest.mark.slow
def test_branches_are_on_the_ranks_that_suit_the_largest_shape() -> None:
    shapes = [(torch.randn(2, 3, size, size),) for size in (8, 128)]
    target = torch.zeros(2, dtype=torch.int64)
    options: dict[str, Any] = {"ranks": 2, "branches": ("2",), "loss": F.cross_entropy}
    program = compile(Branches(), shapes, example_target=[target, target], **options)
    assert program.plan.unchecked == ""
    alone = compile(Branches(), shapes[0], example_target=target, **options)
    (small,) = (each.program for each in program.compilation.variants.values())
    assert small.shards[0].placed == program.compilation.program.shards[0].placed
    assert small.shards[0].placed != alone.compilation.program.shards[0].placed


@pytest.mark.slow
def test_a_run_goes_on_in_the_middle_of_an_epoch(
    tmp_path: Path, in_double: None
) -> None:
    data = texts(60)
    compiled(tmp_path / "x", Words().double())
    options: dict[str, Any] = {}
    whole, states = run_of(tmp_path / "x", data, options, "--epochs", "2")
    for number, steps in enumerate((3, len(whole) // 2 + 2)):
        first, _ = run_of(tmp_path / "x", data, options, "--steps", str(steps))
        words = ("--epochs", "2", "--resume", str(tmp_path / "x/run"))
        second, again = run_of(tmp_path / "x", data, options, *words)
        assert first + second == whole, number
        for one, other in zip(states, again, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_other_batches_go_on_where_an_epoch_ends_only(
    tmp_path: Path, in_double: None
) -> None:
    data, folder = texts(60), tmp_path / "x"
    compiled(folder, Words().double())
    each = len(run_of(folder, data, {}, "--epochs", "1")[0])
    other = {"micro_batches": 1}
    compiled(tmp_path / "y", Words().double(), **other)
    words = ("--epochs", "2", "--resume", str(folder / "run"))
    found, _ = run_of(tmp_path / "y", data, other, *words)
    assert len(found) > each  # smaller ones: a whole epoch of them
    run_of(folder, data, {}, "--steps", "3")
    of_rest = {}, ("--last-batch", "train", *words)
    for options, given in ((other, words), of_rest):
        with pytest.raises(GemscError, match="from the middle of an epoch") as caught:
            run_of(folder if given != words else tmp_path / "y", data, options, *given)
        assert "the same --last-batch" in str(caught.value.help)


@pytest.mark.parametrize(
    ("collate", "found"),
    [
        (lambda samples, number: samples, True),
        (lambda samples, number=0: samples, True),
        (lambda samples: samples, False),
        (lambda samples, padding=-1: samples, False),
        (lambda *samples: samples, False),
        (dict, False),
    ],
)
def test_a_collate_that_is_gemscs_takes_a_number(collate: Any, found: bool) -> None:
    assert joins_samples(collate) == found


def test_a_collate_without_a_number_is_refused_where_there_are_shapes(
    tmp_path: Path,
) -> None:
    compiled(tmp_path, Words())
    user = user_of(collate=lambda samples, padding=-1: samples)
    with pytest.raises(GemscError, match="collate takes no number of a shape"):
        shape_classes(Plan.read(tmp_path / "plan.toml"), user, "dataset")


def padded_to_largest(samples: list[Any], number: int) -> Any:
    assert number == 0
    size = LENGTHS[2]
    words = [F.pad(words, (0, size - len(words))) for words, _ in samples]
    targets = [F.pad(t, (0, size - len(t)), value=IGNORED) for _, t in samples]
    return torch.stack(words), torch.stack(targets)


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    "how",
    [
        {"collate": padded_to_largest},
        {"pad_value": (0, IGNORED)},
        {"pad_value": (0, IGNORED), "collate": lambda samples, pad=-1: samples[9]},
    ],
    ids=["collate", "pad_value", "a collate of a loader"],
)
def test_one_shape_is_padded_as_the_file_says(
    how: dict[str, Any], tmp_path: Path, in_double: None
) -> None:
    data, (words,) = texts(12), examples()[2]
    model, seen = Words().double(), list[float]()
    options: dict[str, Any] = {"ranks": 2, "micro_batches": 2, "check": False}
    program = compile(
        model, (words,), loss=counted, example_target=words, optimizer=sgd, **options
    )
    write_directory(program.compilation, tmp_path)
    user = user_of(
        dataset=lambda: data,
        example_target=lambda: words,
        loss=counted,
        optimizer=sgd,
        **how,
        on_step=lambda trainer, report: seen.append(report.loss),
    )
    user = replace(user, example_inputs=lambda: (words,))
    if how == {"collate": padded_to_largest}:  # it makes a target, too
        target = replace(user, example_target=None).make_target((words,))
        assert target.shape == words.shape
    words_of_run = ("--save", str(tmp_path / "run"))
    run(tmp_path, user, *words_of_run, dtype=torch.float64)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed_of(0, 0)))
    pairs = [[[a], [b]] for a, b in order.view(-1, 2).tolist()]
    assert seen[::2] == pytest.approx(in_one_process(model, data, pairs)[0], rel=1e-12)


@pytest.mark.slow
def test_held_out_samples_are_scored_once_each(tmp_path: Path, in_double: None) -> None:
    data, held_out = texts(30), texts(23, seed=1)
    model = Words(count=False).double()
    compiled(tmp_path, model, ranks=4, data=2)
    counts: list[int] = []

    def metrics(output: Tensor, target: Tensor) -> dict[str, Tensor]:
        counts.append(len(target))
        assert output.shape[:2] == target.shape
        return {"words": (target != IGNORED).sum() / len(target)}

    figures: list[Any] = []
    user = user_of(
        dataset=lambda: data,
        eval_dataset=lambda: held_out,
        loss=counted,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
        pad_value=(0, IGNORED),
        metrics=metrics,
        on_epoch=lambda trainer, epoch, found: figures.append(found),
    )
    run(
        tmp_path,
        user,
        "--epochs",
        "1",
        "--save",
        str(tmp_path / "run"),
        ranks=4,
        dtype=torch.float64,
    )
    assert sum(counts) == 23
    terms = [counted(model(words[None]), target[None]) for words, target in held_out]
    total, count = (float(sum(each)) for each in zip(*terms, strict=True))
    assert figures[0]["loss"] == pytest.approx(total / count, rel=1e-12)
    assert figures[0]["words"] == pytest.approx(count / 23)


@pytest.mark.slow
def test_a_last_batch_of_each_shape_trains(tmp_path: Path, in_double: None) -> None:
    data = texts(41)
    compiled(tmp_path, Words().double())
    samples: list[int] = []
    user = user_of(
        dataset=lambda: data,
        optimizer=sgd,
        pad_value=(0, IGNORED),
        on_step=lambda trainer, report: samples.append(report.samples),
    )
    words = ("--last-batch", "train", "--save", str(tmp_path / "run"))
    run(tmp_path, user, *words, dtype=torch.float64)
    kinds = Counter(numbers_of(classes_of(), data, 0, range(41)))
    wanted = sum(n - n % SIZES[kind] for kind, n in kinds.items())
    assert sum(samples) == 2 * wanted  # both ranks count


# ------------------------------------------------------------------ own loops, errors


@pytest.mark.slow
def test_a_step_knows_its_shape_by_the_batch(tmp_path: Path) -> None:
    plan = compiled(tmp_path, Words()).plan
    batches = [torch.cat([x, x]) for (x,) in examples()]

    def work(trainer: Trainer) -> None:
        for number in (2, 0, 1, 1, 2):
            trainer.step(batches[number], batches[number])
            assert trainer.program.num_micro_batches == 2
            assert trainer.worker.steps.done
        with pytest.raises(GemscError, match=r"has none of the shapes .*: 4, 6, 8"):
            trainer.step(torch.zeros(4, 7).long(), torch.zeros(4, 7).long())
        for number in (-1, 3):
            with pytest.raises(GemscError, match=f"there is no shape {number}"):
                trainer.step(batches[2], batches[2], shape=number)
        with pytest.raises(GemscError, match="does not determine its shape"):
            trainer.step(None, None)
        one = batches[0] if trainer.transport.rank == 0 else None
        other = batches[0] if trainer.transport.rank == 1 else None
        trainer.step(one, other, shape=0)

    on_ranks(tmp_path, 2, work)
    assert shape_of_batch(plan, {"input": (batches[1],), "target": None}) == 1
    both = {"input": (batches[1],), "target": batches[0]}
    with pytest.raises(GemscError, match="has none of the shapes"):
        shape_of_batch(plan, both)


def tensors(stage: nn.Module) -> list[tuple[str, Tensor]]:
    return [*stage.named_parameters(), *stage.named_buffers()]


@pytest.mark.slow
def test_the_weights_of_all_shapes_are_the_same_tensors(tmp_path: Path) -> None:
    compiled(tmp_path, Words())

    def work(trainer: Trainer) -> int:
        own = {n: t for each in trainer.stages.values() for n, t in tensors(each)}
        for name in trainer.plan.variants:
            trainer.worker.use(name)
            stages = trainer.worker.stages
            assert stages is not trainer.stages
            assert trainer.worker.updates._program is trainer.worker.program
            for stage in stages.values():
                assert all(tensor is own[key] for key, tensor in tensors(stage))
        return len(own)

    assert min(on_ranks(tmp_path, 2, work)) > 0


@pytest.mark.slow
def test_a_program_of_several_shapes_saves_one_model(tmp_path: Path) -> None:
    compiled(tmp_path, Words())
    batches = [torch.cat([x, x]) for (x,) in examples()]

    def work(trainer: Trainer) -> dict[str, Tensor]:
        for batch in batches:
            trainer.step(batch, batch)  # the last one is of the largest shape
        trainer.step(batches[0], batches[0])
        trainer.save(tmp_path / "saved")
        return trainer.state_dict()

    states = on_ranks(tmp_path, 2, work, optimizer=sgd)
    saved = weights_in(tmp_path / "saved")
    for state in states:
        for name, tensor in state.items():
            assert torch.equal(saved[name], tensor)
    assert saved["seen"] == 8


@pytest.mark.parametrize(
    ("inputs", "target", "message"),
    [
        (
            examples(),
            torch.zeros(3),
            "example_target has one shape, but example_inputs has 3",
        ),
        (
            examples(),
            [torch.zeros(3)],
            "example_target has one shape, but example_inputs has 3",
        ),
        (
            [*examples(), (torch.zeros(5, 8).long(),)],
            [torch.zeros(3)] * 4,
            "two shapes with equal samples: 8",
        ),
        (
            [*examples(), (torch.zeros(5, 9),)],
            [torch.zeros(3)] * 4,
            r"its \[0\]\[0\] is int64, its \[3\]\[0\] float32",
        ),
    ],
)
def test_examples_that_do_not_fit_are_refused(
    inputs: Any, target: Any, message: str
) -> None:
    with pytest.raises(GemscError, match=message):
        compile(Words(), inputs, loss=counted, example_target=target, ranks=2)


LINES = [(torch.zeros(2, n),) for n in (4, 8)]
PICTURES = [(torch.zeros(2, 3, *size),) for size in ((4, 8), (8, 8))]
NAMED = [{"words": torch.zeros(2, n), "kind": torch.zeros(2)} for n in (4, 8)]


@pytest.mark.parametrize(
    ("sample", "shapes", "wanted"),
    [
        ((torch.zeros(5), torch.zeros(5)), LINES, ([4], [8])),
        ((torch.zeros(5), torch.zeros(3, 5)), LINES, ([3, 4], [3, 8])),
        ((torch.zeros(5), torch.tensor(1)), LINES, ([], [])),
        ((torch.zeros(5), torch.zeros(10)), LINES, ([10], [10])),
        ((torch.zeros(3, 4, 6), torch.zeros(4, 6)), PICTURES, ([4, 8], [8, 8])),
        (
            (torch.zeros(3, 4, 6), torch.zeros(1, 4, 6)),
            PICTURES,
            ([1, 4, 8], [1, 8, 8]),
        ),
        ((torch.zeros(3, 4, 6), torch.zeros(3)), PICTURES, ([3], [3])),
        (({"words": torch.zeros(7), "kind": 1}, torch.zeros(7)), NAMED, ([4], [8])),
    ],
)
def test_a_target_has_the_sizes_that_its_inputs_have(
    sample: Any, shapes: Any, wanted: tuple[list[int], list[int]]
) -> None:
    found = [target_like(sample, shapes, number) for number in range(2)]
    assert [list(target.shape) for target in found] == [*wanted]


def test_targets_of_a_dataset_become_those_of_each_shape() -> None:
    data = texts(5)
    user = replace(user_of(dataset=lambda: data, loss=counted), example_inputs=examples)
    found = user.make_targets(user.make_shapes())
    assert [list(each.shape) for each in found] == [[3, 4], [2, 6], [1, 8]]
    own = data[0][1]
    assert found[2][0, : len(own)].equal(own)
    assert user.make_inputs()[0].shape == (2, 6)
    assert user.make_target(user.make_inputs()).equal(found[1])
    labels = user_of(dataset=lambda: [(x, 1) for x, _ in data], loss=counted)
    found = replace(labels, example_inputs=examples).make_targets(user.make_shapes())
    assert [each.tolist() for each in found] == [[1, 1, 1], [1, 1], [1]]


def test_two_inputs_of_a_model_are_not_two_shapes(tmp_path: Path) -> None:
    """As they were before there were shapes: a list of tensors is a tuple of them."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Any) -> Tensor:
            y = y[0] if isinstance(y, tuple) else y
            return self.b(self.a(x if isinstance(x, Tensor) else x[0])) + y.sum(1, True)

    x, y = torch.randn(2, 4), torch.randn(2, 4)
    for inputs in ([x, torch.randn(2, 5)], [(x,), (y,)]):
        program = compile(
            Pair(),
            inputs,
            loss=lambda o, t: (o - t).square().mean(),
            example_target=x,
            ranks=2,
        )
        assert not program.plan.shapes
        assert [*program.rank_modules()] == ["rank0.py", "rank1.py"]


@pytest.mark.slow
def test_a_plan_keeps_its_shapes(tmp_path: Path) -> None:
    program = compiled(tmp_path, Words())
    plan = Plan.read(tmp_path / "plan.toml")
    assert plan.shapes == program.plan.shapes
    assert plan.micro_batch_sizes == [*SIZES]
    assert plan.batch_sizes == [6, 4, 2]
    assert sorted(plan.variants) == sorted(
        each.name for each in plan.shapes if each.variant
    )
    assert plan.shapes[plan.first_shape or 0].variant == ""
    names = {f"rank{rank}{v}.py" for rank in (0, 1) for v in ("", "_4", "_6", "_8")}
    assert len({*program.rank_modules()} & names) == 6


@pytest.mark.parametrize("count", [0, 1, 40])
def test_verify_has_a_batch_of_each_shape(count: int) -> None:
    """From the dataset, where that has one, whatever its first batches are."""
    words = torch.arange(2)
    data = [(words, words)] * (count > 0) + texts(count)
    plan: Any = SimpleNamespace(
        shapes=[planned(n, size) for n, size in zip(LENGTHS, SIZES, strict=True)],
        batch_sizes=SIZES,
        memory_format="as-given",
        data=1,
        micro_batches=1,
    )
    user: Any = SimpleNamespace(
        dataset=data if data else None,
        make_dataset=lambda: data,
        make_shapes=examples,
        make_targets=lambda shapes: [x for (x,) in shapes],
        pad_value=None,
        bucket=None,
        collate=None,
        line_of=lambda name: None,
    )
    found = verify_steps._batches(user, plan, 1)
    lengths = [x.shape[1] for (x,), _ in found]
    assert sorted(lengths) == sorted(LENGTHS)
    given = [x for (x,) in examples()]
    made = [x for (x,), _ in found if any(torch.equal(x, each) for each in given)]
    assert len(made) == {0: 3, 1: 3, 40: 0}[count]
