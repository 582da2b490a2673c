"""Batches of several shapes train as their samples do in one process."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from program_support import on_ranks
from shape_support import (
    IGNORED,
    LENGTHS,
    SIZES,
    TABLES,
    Functional,
    Scaled,
    Words,
    classes_of,
    compiled,
    counted,
    examples,
    sgd,
    texts,
)
from torch import Tensor, nn
from training_support import run, user_of

from gemsc.base.rng import seed_of
from gemsc.codegen.package import write_directory
from gemsc.compiler import CompiledProgram, compile
from gemsc.datasets.samples import joins_samples
from gemsc.errors import GemscError
from gemsc.ir.meta import facts
from gemsc.lowering.tracing import trace
from gemsc.lowering.variants import find_largest
from gemsc.plan import Plan
from gemsc.runtime.data.order import BatchOrder
from gemsc.runtime.data.shapes import (
    ShapeClasses,
    numbers_of,
)
from gemsc.runtime.training.datasets import shape_classes
from gemsc.runtime.training.trainer import Trainer


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


@pytest.mark.slow
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
    assert [shape.name for shape in plan.shapes] == ["4", "6", "8"]
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
    actual, states = run_of(tmp_path / "x", data, options, "--epochs", "2")
    assert actual == pytest.approx(losses, rel=1e-12)
    for of_rank in states:
        for name, tensor in of_rank.items():
            torch.testing.assert_close(tensor, state[name], rtol=1e-9, atol=1e-12)
    assert set(state) - set().union(*states) <= {"out.weight"}


@pytest.mark.slow
def test_each_shape_has_its_own_constants(tmp_path: Path, in_double: None) -> None:
    """A tensor of no module is another one for each length."""
    compiled(tmp_path, Scaled().double())
    shapes = examples()
    model = Scaled().double()
    merged: dict[str, Tensor] = {}
    for state in on_ranks(tmp_path, 2, Trainer.state_dict, dtype=torch.float64):
        merged |= state
    model.load_state_dict(merged | {"out.weight": merged["words.weight"]})

    def work(trainer: Trainer) -> list[float]:
        batches = [torch.cat([x, x]) for (x,) in shapes]
        losses = [trainer.evaluate(x, x).loss for x in batches]
        assert None not in losses
        return losses  # type: ignore[return-value]

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
    assert [shape.name for shape in program.plan.shapes] == ["8", "16"]
    assert program.plan.unchecked == ""  # a step of each is that of the model


def sharded(sizes: Sequence[int], trunk: str) -> CompiledProgram:
    pairs = zip(sizes, LENGTHS[-len(sizes) :], strict=True)
    shapes = [(torch.ones(pair, dtype=torch.int64),) for pair in pairs]
    targets = [x for (x,) in shapes]
    given: dict[str, Any] = {"ranks": 2, "shards": ("2",), "trunk": trunk}
    model = Words(count=False)
    return compile(model, shapes, loss=counted, example_target=targets, **given)


@pytest.mark.parametrize(
    ("sizes", "trunk", "chosen"),
    [
        pytest.param((8, 3, 1), "auto", "whole", marks=pytest.mark.slow),
        pytest.param((3, 2), "batch", "batch", marks=pytest.mark.slow),
        ((3, 1), "sequence", "sequence"),
    ],
)
def test_values_are_whole_where_a_shape_has_one_sample_and_two_ranks(
    sizes: Sequence[int], trunk: str, chosen: str
) -> None:
    plan = sharded(sizes, trunk).plan
    assert [stage.trunk for stage in plan.stages] == [chosen]
    assert plan.unchecked == ""  # a step of each shape is that of the model


def test_a_batch_of_one_is_not_split() -> None:
    message = "--trunk batch splits a dimension of 1 over 2 ranks in Words, 8"
    with pytest.raises(GemscError, match=message):
        sharded((3, 1), "batch")


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
    (small,) = (variant.program for variant in program.compilation.variants.values())
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
    per_epoch = len(run_of(folder, data, {}, "--epochs", "1")[0])
    other = {"micro_batches": 1}
    compiled(tmp_path / "y", Words().double(), **other)
    words = ("--epochs", "2", "--resume", str(folder / "run"))
    losses, _ = run_of(tmp_path / "y", data, other, *words)
    assert len(losses) > per_epoch  # smaller ones: a whole epoch of them
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
        on_epoch=lambda trainer, epoch, scores: figures.append(scores),
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
    total, count = (float(sum(parts)) for parts in zip(*terms, strict=True))
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
