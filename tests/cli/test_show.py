"""`gemsc show`: tables fit the terminal, whatever its width and the plan's size."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
import torch
from plan_support import made_up_plan
from rich.console import Console
from torch import nn

from gemsc.base.units import show_seconds
from gemsc.compiler import lower, trace
from gemsc.costs.hardware import read_hardware
from gemsc.options import CompileOptions
from gemsc.plan import Plan
from gemsc.planner.explain import speed, timeline_of
from gemsc.viz.design import sample
from gemsc.viz.listings import column, fitted
from gemsc.viz.report import report
from gemsc.viz.terminal import show, strips


def printed(width: int, *renderables: object, num_ranks: int = 0) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    if num_ranks:
        show(made_up_plan(num_ranks), console)
    for renderable in renderables:
        console.print(renderable)
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


def test_the_speed_is_that_of_all_replicas_with_sums_and_update() -> None:
    plan = replace(made_up_plan(4, micro_batches=8), step_seconds=0.3)
    plan = replace(plan, ending_seconds=0.1, data=3, ranks=12, peak_flops=1e12)
    rate = speed(plan)
    assert rate.samples_per_second == pytest.approx(3 * 8 * 2 / 0.4)
    assert rate.flops_per_second == pytest.approx(3 * (3 * 8) * 4e9 / 0.4)
    assert rate.peak_share == pytest.approx(rate.flops_per_second / 12e12)
    assert rate.tokens_per_second == 0
    assert str(replace(rate, dtype="tf32")) == (
        "120 samples/s, 720.0 GFLOP/s: 6% of the devices' peak (tf32)"
    )
    shared = speed(replace(plan, options={"per_device": 3}, tokens=50))
    assert shared.peak_share == pytest.approx(3 * rate.peak_share)
    assert "120 samples/s (6,000 tokens/s), " in str(shared)
    for peak in (0.0, 50e9):  # of 12 devices, which it exceeds
        assert "peak" not in str(speed(replace(plan, peak_flops=peak)))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_words_are_tokens_and_the_peak_is_that_of_the_precision(precision: str) -> None:
    layers = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4))
    options = CompileOptions(ranks=1, precision=precision, hardware="a100")
    for inputs, tokens in (
        (torch.zeros(3, 7, dtype=torch.long), 7),
        (torch.rand(3, 4), 0),
    ):
        model = layers if tokens else layers[1]
        traced = trace(model, (inputs,), check=False, precision=precision)
        plan = lower(traced, options).plan
        assert (plan.tokens, plan.micro_batch_size) == (tokens, 3)
        dtype = "tf32" if precision == "float32" else precision
        assert plan.peak_dtype == dtype
        assert plan.peak_flops == read_hardware("a100").device.peak_flops[dtype]


def test_the_peak_is_that_of_what_is_computed_in() -> None:
    device = read_hardware("a100").device
    assert device.peak("bfloat16") == ("bfloat16", device.peak_flops["bfloat16"])
    assert device.peak("float32")[0] == "tf32"
    core = read_hardware("cpu-core").device
    assert core.peak("float32") == ("float32", core.peak_flops["float32"])
    assert core.peak("complex64")[0] == "float32"


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
