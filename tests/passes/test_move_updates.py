"""What forward changes without data changes where it is seen first."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemsc import compile
from gemsc.compiler import trace
from gemsc.errors import GemscError
from gemsc.frontend.record import record
from gemsc.passes.constants.move_updates import MoveUpdates

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def layers() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)
    )


class Teacher(nn.Module):
    """A teacher of which all weights follow a student's, at one end of forward."""

    def __init__(self, calls: int = 1, *, late: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.student = layers()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.head, self.calls, self.late = nn.Linear(3, 3), calls, late
        self.register_buffer("steps", torch.zeros(()))

    @torch.no_grad()
    def follow(self) -> None:
        self.steps += 1
        share = 1 / (self.steps + 1)
        trained, others = self.student.parameters(), self.teacher.parameters()
        for theirs, ours in zip(others, trained, strict=True):
            theirs.mul_(1 - share).add_(share * ours)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.late:
            self.follow()
        output = self.head(self.student(x))
        with torch.no_grad():
            wanted = sum(self.teacher(x + call) for call in range(self.calls))
        if self.training and self.late:
            self.follow()
        return (output - wanted).square().mean(1)


def mean(output: Tensor) -> Tensor:
    return output.mean()


def compared(model: nn.Module, **options: Any) -> Any:
    """Return the program of a model that computes what the model does."""
    program = compile(model, (X,), loss=mean, **{"micro_batches": 2, **options})
    assert program.plan.unchecked == ""
    return program


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    "options",
    [
        {"ranks": 4},
        {"ranks": 2, "schedule": "interleaved", "micro_batches": 4},
        {"ranks": 2, "recompute": "all"},
        {"ranks": 4, "data": 2},
        {"ranks": 4, "data": 2, "shard": "optimizer"},
    ],
    ids=str,
)
@pytest.mark.parametrize(("calls", "late"), [(1, False), (2, False), (1, True)])
def test_a_teacher_is_cut_between_its_layers(
    calls: int, late: bool, options: dict[str, Any]
) -> None:
    program = compared(Teacher(calls, late=late), **options)
    names = [name for stage in program.plan.stages for name in stage.blocks]
    assert any(name.startswith("student") for name in names)
    files = program.rank_modules().values()
    assert any("def advance_state" in file for file in files) == ("data" in options)
    if calls == 1:
        assert sum(name.startswith("teacher") for name in names) > 1


class FollowsTheData(Teacher):
    """Its first weight is changed, behind both, by what the student gives."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.student(x)
        with torch.no_grad():
            wanted = self.teacher(x)
            if self.training:
                self.teacher[0].weight.mul_(1 + y.mean())
        return (self.head(y) - wanted).square().mean(1)


@pytest.mark.slow
def test_what_needs_another_tower_stays_behind_it() -> None:
    compared(FollowsTheData(), ranks=2)
    models = {FollowsTheData(): False, Teacher(late=True): True}
    for model, are_inside in models.items():
        towers = trace(model, (X,), loss=mean).program.towers or ()
        names = {node.name for tower in towers for node in tower}
        assert len(towers) == 2
        assert ("mul" in names) == are_inside


class Pictures(nn.Module):
    """A teacher of pictures: twice, once before its weights change again."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.head = nn.Conv2d(4, 2, 3, padding=1)

    @torch.no_grad()
    def follow(self) -> None:
        pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
        for theirs, ours in pairs:
            theirs.mul_(0.9).add_(ours, alpha=0.1)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.follow()
        y = self.student(x) + self.teacher(x)
        if self.training:
            self.follow()
        return self.head(y * self.teacher(x + 1))


@pytest.mark.parametrize(
    "options",
    [
        {"ranks": 2, "tiles": "2x1"},
        pytest.param(
            {"ranks": 4, "tiles": "1x2", "data": 2, "micro_batches": 1},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"ranks": 4, "tiles": "2x1", "shards": "2"}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_a_teacher_of_pictures_is_cut_into_tiles(options: dict[str, Any]) -> None:
    given = {"loss": mean, "micro_batches": 2, **options}
    program = compile(Pictures(), (torch.randn(2, 3, 8, 8),), **given)
    assert program.plan.unchecked == ""
    text = program.rank_modules()["rank0.py"]
    assert "# gather" not in text


def order(model: nn.Module) -> list[str]:
    """Return the names of a graph's nodes after the pass."""
    program = MoveUpdates().apply(record(model, (X,)))
    return [node.name for node in program.compute_nodes]


class Changed(nn.Module):
    """Calls `change(self, x)` before its layers; what it changes is used behind."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("scale", torch.ones(6))
        self.register_buffer("other", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        self.change(self, x)
        y = self.norm(self.first(x * self.other))
        return self.second(y) * self.scale.clone()


def grows(model: Any, x: Tensor) -> None:
    model.scale.mul_(2)


def grows_by_a_count(model: Any, x: Tensor) -> None:
    model.other.add_(1)
    model.scale.mul_(model.other)


def follows_the_norm(model: Any, x: Tensor) -> None:
    model.scale.copy_(model.norm.running_mean)


def follows_what_changes_later(model: Any, x: Tensor) -> None:
    model.scale.add_(model.other)
    model.other.mul_(x.detach().mean())


def follows_the_data(model: Any, x: Tensor) -> None:
    model.scale.add_(x.detach().mean(0))


def is_drawn(model: Any, x: Tensor) -> None:
    model.scale.add_(torch.rand(6))


def is_used_before(model: Any, x: Tensor) -> None:
    """What is put in its place needs no data: that is done once it is known."""
    model.scale = model.scale.mul(2) + model.first.weight.sum()


@pytest.mark.slow(4)
@pytest.mark.parametrize(
    ("change", "pair"),
    [
        (grows, ["mul", "clone"]),
        (grows_by_a_count, ["mul", "clone"]),
        (follows_the_norm, ["copy", "y"]),  # the norm's call changes what it follows
        (follows_what_changes_later, ["add", "mul"]),
        (follows_the_data, []),
        (is_drawn, []),
        (is_used_before, ["add", "copy_"]),
    ],
)
def test_a_change_goes_no_further_than_it_may(change: Any, pair: list[str]) -> None:
    """It and what it stands before then; it stays where it is if it needs data."""
    model = Changed(change)
    names = order(model)
    before = [node.name for node in record(model, (X,)).compute_nodes]
    assert sorted(names) == sorted(before)
    assert (names == before) == (not pair)
    assert pair in ([], *map(list, pairwise(names)))


class ChangedBehind(Changed):
    """Calls it behind all layers; what it changes was used before."""

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * self.other
        y = self.second(self.norm(self.first(scaled)))
        output = y + self.scale
        self.change(self, x)
        return output


def other_grows(model: Any, x: Tensor) -> None:
    model.other.mul_(2).sub_(1)


def other_follows_the_norm(model: Any, x: Tensor) -> None:
    model.other.copy_(model.norm.running_mean)


def both_follow_each_other(model: Any, x: Tensor) -> None:
    model.other.sub_(model.scale)
    model.scale.mul_(2)


def other_follows_the_data(model: Any, x: Tensor) -> None:
    model.other.copy_(x.detach().mean(0))


@pytest.mark.parametrize(
    ("change", "moved"),
    [
        (other_grows, ["scaled", "mul", "sub"]),
        (other_follows_the_norm, ["norm", "copy"]),
        (both_follow_each_other, ["scaled", "sub", "first"]),
        (other_follows_the_data, []),
    ],
)
def test_a_change_behind_all_goes_back_no_further_than_it_may(
    change: Any, moved: list[str]
) -> None:
    model = ChangedBehind(change)
    names = order(model)
    before = [node.name for node in record(model, (X,)).compute_nodes]
    assert sorted(names) == sorted(before)
    assert (names == before) == (not moved)
    size = len(moved)
    assert moved in ([], *(names[i : i + size] for i in range(len(names))))
    if change is both_follow_each_other:  # the other one, not before it is read
        assert names.index("mul") == len(names) - 1


def follow_the_data(model: Any, x: Tensor) -> None:
    for tensor in (model.scale, model.other):
        tensor.add_(x.detach().mean(0))


def test_what_keeps_layers_together_is_told_once_for_each_line() -> None:
    with pytest.raises(GemscError, match="2 stages need at least 2 blocks") as told:
        compile(Changed(follow_the_data), (X,), loss=mean, ranks=2)
    line = follow_the_data.__code__.co_firstlineno + 2
    first, *others = told.value.__notes__
    assert first.startswith("forward changes 'scale' and 1 more at ")
    assert first.endswith(f".py:{line}: all that uses it stays on one rank")
    assert not any("forward changes" in other for other in others)


class Labels(nn.Module):
    """Looks up each pixel, and shortens the rows that it finds."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4, max_norm=0.5)
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.table(x[:, 0]).movedim(-1, 1)
        return self.b(self.a(y).tanh())


def test_rows_that_one_tile_alone_looks_up_change_on_all() -> None:
    x = torch.ones(2, 1, 8, 8, dtype=torch.int64)
    x[:, :, 4:] = 2
    program = compile(Labels(), (x,), loss=mean, ranks=2, tiles="2x1", micro_batches=1)
    assert program.plan.unchecked == ""


class Filled(nn.Module):
    """Fills a table in a loop, as a decoder does, with what `new(x)` makes of it."""

    def __init__(self, new: Any, *, late: bool = False) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        self.cell, self.new, self.late = nn.Linear(6, 6), new, late

    def forward(self, x: Tensor) -> Tensor:
        table = self.new(x)
        y = self.encoder(x)
        for place in range(3):
            y = self.cell(y)
            table[place] = y
            if self.late:
                y.mul_(2)
        return table.transpose(0, 1)


def zeros(x: Tensor) -> Tensor:
    return torch.zeros(3, *x.shape)


def like(x: Tensor) -> Tensor:
    return torch.zeros_like(x.expand(3, -1, -1))


def drawn(x: Tensor) -> Tensor:
    return torch.rand(3, *x.shape)


@pytest.mark.parametrize("new", [zeros, like, lambda x: x.new_zeros(3, *x.shape)])
def test_a_table_is_filled_where_it_is_read(new: Any) -> None:
    names = order(Filled(new))
    fills = [name for name in names if name.startswith("setitem")]
    assert names[-4:] == [*fills, "transpose"]
    assert len(fills) == 3


def test_what_fills_a_table_goes_before_changes_of_what_it_takes() -> None:
    names = order(Filled(zeros, late=True))
    first = names.index("setitem")
    assert names[first - 1 : first + 2] == ["zeros", "setitem", "mul"]
    assert order(Filled(drawn)) == [
        node.name for node in record(Filled(drawn), (X,)).compute_nodes
    ]


@pytest.mark.parametrize("late", [False, True])
def test_a_loop_that_fills_a_table_is_cut(late: bool) -> None:
    model = Filled(zeros, late=late)
    program = compile(model, (X,), loss=mean, ranks=3, micro_batches=2)
    assert program.plan.unchecked == ""
