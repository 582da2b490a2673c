"""What plan.toml, tables and pictures tell of branches; what of it can be edited."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import gemsc
from gemsc.compiler import CompiledProgram
from gemsc.errors import GemscError
from gemsc.plan import Plan
from gemsc.plan_tables import PlannedFork
from gemsc.planner.edited import EditedPlan
from gemsc.viz.graph import boxes_of
from gemsc.viz.listings import Listing, list_plan
from gemsc.viz.panel import panels_of
from gemsc.viz.timeline import draw_timeline

ONE = PlannedFork(
    name="one",
    join="cat",
    branches=["one.a", "one.b", "one.c"],
    seconds=[0.001, 0.006, 0.003],
    placed=[["one.b"], ["one.a", "one.c"]],
    saved_seconds=0.0035,
)
LEFT = PlannedFork(
    name="two",
    join="add",
    branches=["two.a", "two.b"],
    seconds=[0.0, 0.0],
    reason="its messages take longer",
)


@pytest.fixture(scope="module")
def program() -> CompiledProgram:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return gemsc.compile(model, (torch.randn(2, 4),), ranks=2, micro_batches=1)


@pytest.fixture(scope="module")
def plan(program: CompiledProgram) -> Plan:
    first, last = program.plan.stages
    shared = replace(first, branches=2, trunk="whole", forks=[ONE, LEFT])
    return replace(program.plan, stages=[shared, last])


def listing(plan: Plan, title: str) -> Listing:
    return next(table for table in list_plan(plan) if table[0].startswith(title))


def test_show_says_who_has_which_branch_what_it_saves_or_why_not(plan: Plan) -> None:
    _, columns = listing(plan, "branches")
    rows = list(zip(*(column.cells for column in columns), strict=True))
    shares = "one.b 60% | one.a 10%, one.c 30%"
    even = "83%"  # 5 ms on average, 6 on the first rank
    assert [column.title for column in columns][-1] == "not shared out"
    assert rows[0] == ("0", "one", shares, "10.0 ms", even, "3.5 ms", "")
    assert rows[1][2:] == (
        "two.a 0%, two.b 0%", "0 us", "-", "-", "its messages take longer",
    )  # fmt: skip
    _, inside = listing(plan, "inside stages")
    assert inside[1].cells == ("branches on 2 ranks",)


def test_a_rank_without_a_branch_is_a_dash(plan: Plan) -> None:
    idle = replace(ONE, placed=[["one.a", "one.b", "one.c"], []])
    stages = [replace(plan.stages[0], forks=[idle]), plan.stages[1]]
    _, columns = listing(replace(plan, stages=stages), "branches")
    assert columns[2].cells == ("one.a 10%, one.b 60%, one.c 30% | -",)
    assert idle.balance == 0.5


class Towers(nn.Module):
    """Two branches beside a shortcut, and a layer after them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 64)
        self.left, self.right = (
            nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64))
            for _ in range(2)
        )
        self.head = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.head(x + (self.left(x) + self.right(x)))


@pytest.fixture(scope="module")
def towers() -> CompiledProgram:
    return gemsc.compile(
        Towers(),
        (torch.randn(256, 64),),
        loss=nn.MSELoss(),
        example_target=torch.randn(256, 64),
        ranks=2,
        branches=("2",),
        trunk="whole",
        micro_batches=1,
    )


def test_branches_are_drawn_side_by_side_in_the_colours_of_their_ranks(
    towers: CompiledProgram,
) -> None:
    program = towers.compilation.program
    boxes = before, left, right, after = boxes_of(program)
    assert [box.name for box in (left, right)] == ["left", "right"]
    assert left.level == right.level == before.level + 0.5 == after.level - 0.5
    nodes = [node for box in boxes for node in box.nodes]
    assert nodes == list(program.compute_nodes)
    dot = towers.graph()
    form = r'{} .*\n.*\n.*\nrank (\d)" (class=.*)]'
    looks = [re.findall(form.format(box.key), dot) for box in (left, right)]
    assert {rank for ((rank, _),) in looks} == {"0", "1"}
    assert len({colours for ((_, colours),) in looks}) == 2
    edges = re.findall(r"(\w+) -> (\w+)(.*)", dot)
    assert {edge for edge in edges if edge[0] in {box.key for box in boxes}} == {
        (tail.key, head.key, "")
        for tail, head in (
            (before, left),
            (before, right),
            (before, after),
            (left, after),
            (right, after),
        )
    }


def test_the_timeline_shows_which_rank_computes_which_branch_and_who_waits(
    plan: Plan, towers: CompiledProgram
) -> None:
    first = plan.stages[0]
    cost = replace(first.cost, forward=0.004, backward=0.013)
    after = replace(ONE, name="next", trunk_seconds=0.001, placed=[["one.c"], []])
    shared = replace(
        first, forks=[replace(ONE, trunk_seconds=0.002), LEFT, after],
        cost=cost, talking_seconds=0.001,
    )  # fmt: skip
    changed = replace(plan, stages=[shared, plan.stages[1]])
    (panel,) = panels_of(changed)
    assert panel.branches[1] == ()
    assert [
        (box.place, round(16 * box.start, 9), round(16 * box.end, 9), box.names)
        for box in panel.branches[0]
    ] == [
        (0, 2, 8, "one.b"),
        (0, 8, 8, ""),
        (1, 2, 6, "one.a, one.c"),
        (1, 6, 8, ""),
        (0, 9, 12, "one.c"),
        (0, 12, 12, ""),
        (1, 9, 9, ""),
        (1, 9, 12, ""),
    ]  # of 16 ms without messages
    drawn = draw_timeline("", panels_of(towers.plan))
    form = r'class="{} \S*" x="(.*?)" y="(.*?)" width="(.*?)" .*<title>(.*)</title>'
    actions = re.findall(form.format("box action"), drawn)
    boxes = re.findall(form.format("branches"), drawn)
    assert [name for *_, name in boxes] == ["left", "right"] * 2
    assert len({y for _, y, *_ in boxes}) == 2  # one line for each rank
    gaps = []
    for (x, _, width, _), (at, _, length, _) in zip(actions, boxes[::2], strict=True):
        before = (float(at) - float(x)) / float(width)
        gaps.append((before, 1 - before - float(length) / float(width)))
    forward, backward = gaps
    assert backward == pytest.approx(forward[::-1], abs=1e-3)
    assert forward[1] > 1.5 * forward[0] > 0  # the head comes last, and the loss


def test_branches_that_are_not_shared_out_are_not_drawn_apart(
    towers: CompiledProgram,
) -> None:
    program = towers.compilation.program
    forks = tuple(replace(f, reason="gains nothing") for f in program.shards[0].forks)
    shards = {0: replace(program.shards[0], forks=forks)}
    boxes = boxes_of(replace(program, shards=shards))
    assert [box.name for box in boxes] == [block.name for block in program.blocks or ()]


def edited(plan: Plan, folder: Path, old: str = "", new: str = "") -> EditedPlan:
    path = folder / "plan.toml"
    text = plan.to_toml(folder)
    assert old in text
    path.write_text(text.replace(old, new, 1))
    return EditedPlan.read(path)


def test_a_plan_keeps_its_branches(plan: Plan, tmp_path: Path) -> None:
    kept = edited(plan, tmp_path)
    assert kept.plan.stages == plan.stages
    assert kept.placed() == {"cat": [["one.b"], ["one.a", "one.c"]]}


B, C = (f'        "one.{name}",\n' for name in "bc")  # lines of ranks 0 and 1


def test_a_fork_may_cost_a_little_that_others_save(plan: Plan, tmp_path: Path) -> None:
    stage = next(stage for stage in plan.stages if stage.forks)
    forks = [replace(fork, saved_seconds=-2e-6) for fork in stage.forks]
    stages = [replace(s, forks=forks) if s is stage else s for s in plan.stages]
    path = tmp_path / "plan.toml"
    path.write_text(replace(plan, stages=stages).to_toml(tmp_path))
    assert Plan.read(path).stages[stage.index].forks == forks


def test_a_branch_is_moved_by_moving_its_line(plan: Plan, tmp_path: Path) -> None:
    twice = edited(plan, tmp_path, B, B + C)
    with pytest.raises(GemscError, match=r"'one\.c' of one is on several ranks"):
        twice.placed()
    path = tmp_path / "plan.toml"
    before, after = path.read_text().split(B + C)
    path.write_text(before + B + C + after.replace(C, ""))
    placed = EditedPlan.read(path).placed()
    assert placed == {"cat": [["one.b", "one.c"], ["one.a"]]}


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (f"    [\n{B}    ],\n", "", "has branches of 1 ranks, stage 0 has 2"),
        (B, "", r"'one\.b' of one is on no rank"),
        (B, f'{B}"one.d"', r"'one\.d' of one is none of its branches"),
    ],
)
def test_branches_that_cannot_be_placed_are_refused_at_their_line(
    plan: Plan, tmp_path: Path, old: str, new: str, says: str
) -> None:
    with pytest.raises(GemscError, match=says) as caught:
        edited(plan, tmp_path, old, new).placed()
    lines = (tmp_path / "plan.toml").read_text().splitlines()
    assert caught.value.at is not None
    told = lines[caught.value.at.line - 1]
    assert told.startswith("placed = ") or "one.d" in told


def test_a_plan_that_places_branches_otherwise_is_refused(
    plan: Plan, tmp_path: Path
) -> None:
    given = edited(plan, tmp_path)
    given.check_shared(plan)
    other = replace(ONE, placed=[["one.a", "one.b"], ["one.c"]])
    stages = [replace(plan.stages[0], forks=[other]), plan.stages[1]]
    with pytest.raises(GemscError, match="branches of one cannot be placed so"):
        given.check_shared(replace(plan, stages=stages))
