"""`gemsc show`: tables fit the terminal, whatever its width and the plan's size."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from plan_support import made_up_plan
from rich.console import Console

from gemsc.base.units import show_seconds
from gemsc.plan import Plan
from gemsc.planner.from_plan import timeline_of
from gemsc.viz.columns import column, fitted, sample
from gemsc.viz.report import report
from gemsc.viz.strip import strips
from gemsc.viz.tables import show


def printed(width: int, *renderables: object, num_ranks: int = 0) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    if num_ranks:
        show(made_up_plan(num_ranks), console)
    for each in renderables:
        console.print(each)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return [line.rstrip() for line in text.splitlines()]


@pytest.mark.by_day(4)
@pytest.mark.parametrize("num_ranks", [2, 4, 300])
@pytest.mark.parametrize("width", [80, 120, 200])
def test_no_line_is_longer_than_the_terminal(width: int, num_ranks: int) -> None:
    lines = printed(width, num_ranks=num_ranks)
    assert max(map(len, lines)) <= width
    assert not [line for line in lines if line.startswith("│") != line.endswith("│")]
    for title in ("stages", "skip", "transfers", "memory", "step", "why this split"):
        assert [line for line in lines if title in line]


def test_a_wide_terminal_shows_all_of_a_stage() -> None:
    heads = {word for line in printed(200, num_ranks=4) for word in line.split()}
    assert {"blocks", "ranks", "work", "weights", "saved", "forward", "share"} <= heads


def test_a_narrow_one_keeps_times_and_memory() -> None:
    heads = {word for line in printed(80, num_ranks=4) for word in line.split()}
    assert {"ranks", "weights", "saved", "forward", "backward"} <= heads
    assert "share" not in heads


def test_what_keeps_no_activations_is_named_and_the_peak_taken_apart() -> None:
    plan = made_up_plan(2)
    assert "recomputed" not in str(told(plan))
    stages = [
        replace(plan.stages[0], recompute=["enter..down", "up"]),
        replace(plan.stages[1], offload=["head"]),
    ]
    part = {"parameters": 1, "optimizer": 2, "gradients": 3, "activations": 4}
    part = {key: size * 2**20 for key, size in part.items()}
    memory = [part | {"working": 6, "messages": 5}] * 2
    lines = told(replace(plan, stages=stages, memory=memory))
    assert [line.split() for line in lines if "enter..down" in line] == [
        ["│", "0", "│", "enter..down,", "up", "│", "│"]
    ]
    assert [line.split() for line in lines if "│ head" in line] == [
        ["│", "1", "│", "│", "head", "│"]
    ]
    (head,) = [line for line in lines if "optimizer" in line]
    titles = [title.strip() for title in head.split("┃")]
    wanted = ["rank", "peak", "weights", "optimizer", "gradients", "on their way"]
    assert titles[1:9] == [*wanted, "messages", "activations"]
    row = next(line for line in lines[lines.index(head) :] if line.startswith("│ 0"))
    sizes = [cell.strip() for cell in row.split("│")]
    assert sizes[3:9] == ["1.0 MiB", "2.0 MiB", "3.0 MiB", "6 B", "5 B", "4.0 MiB"]


def told(plan: Plan) -> list[str]:
    console = Console(file=io.StringIO(), width=160)
    show(plan, console)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_of_many_ranks_a_sample_is_shown() -> None:
    lines = printed(120, num_ranks=300)
    assert len(lines) < 400
    assert [line for line in lines if re.search(r"memory: \d\d of 300 ranks", line)]
    assert [line for line in lines if line.startswith("rank 299")]


def test_columns_fold_before_they_go_and_nothing_is_cut() -> None:
    name = "".join(map(str, range(30)))
    columns = (
        column("name", [name], left=True, shrinks=True),
        column("kept", ["1234567"]),
        column("less", ["1234567"], drop=1),
        column("least", ["1234567"], drop=2),
    )
    wide, narrow = (printed(width, fitted("t", columns, width)) for width in (90, 35))
    assert "least" in wide[2]
    assert "least" not in narrow[2]
    assert "kept" in narrow[2]
    assert max(map(len, narrow)) <= 35
    for lines in (wide, narrow):
        cells = [line.split("│")[1].strip() for line in lines if line[0] == "│"]
        assert "".join(cells) == name


def test_the_default_machine_and_shared_cores_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = made_up_plan(4, 2)
    monkeypatch.setattr("gemsc.planner.explain.num_cores", lambda: 2)
    text = " ".join(told(plan))
    assert "cpu-core is a default, not this machine" in text
    busy = sum(t.end - t.start for row in timeline_of(plan).ranks for t in row)
    least = show_seconds(max(plan.step_seconds, busy / 2))
    assert (
        f"4 ranks on the 2 cores of this machine take at least {least} a step" in text
    )
    page = report(plan)
    assert show_seconds(max(plan.step_seconds, busy / 2) + plan.ending_seconds) in page
    assert "at least: 2 cores for 4 ranks" in page
    elsewhere = replace(plan, options={"hardware": "a100"})
    assert "at least" not in report(elsewhere)
    other = " ".join(told(elsewhere))
    assert "note:" not in other
    monkeypatch.setattr("gemsc.planner.explain.num_cores", lambda: 4)
    assert "cores of this machine" not in " ".join(told(plan))


def test_a_sample_has_both_ends_and_what_is_wanted() -> None:
    assert sample(5, 9) == [0, 1, 2, 3, 4]
    chosen = sample(1000, 10, (777,))
    assert len(chosen) <= 10
    assert {0, 777, 999} <= set(chosen)
    assert chosen == sorted(chosen)


def test_the_step_is_drawn_to_scale() -> None:
    """Two equal stages, two micro-batches: B takes twice as long as F."""
    plan = made_up_plan(2, 2)
    first, second, _ = (line.plain for line in strips(plan, 8 + 36, 8))
    assert first == "rank 0  F0--F1--        B0======    B1======"
    assert second == "rank 1      F0--B0======F1--B1======"
    assert len(first) == 44
