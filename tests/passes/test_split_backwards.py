"""The last backward of a step sends before it computes weight gradients."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import MODELS
from parity_support import traced
from plan_support import metered_peaks
from rich.console import Console
from schedule_support import chain_of, proved
from threads import run_on_threads
from torch import nn

from gemsc import CompileOptions
from gemsc.codegen.package import write_directory
from gemsc.compiler import lower
from gemsc.planner.explain import task_of, timeline_of
from gemsc.runtime.worker.deferral import Deferred
from gemsc.schedules import (
    SCHEDULES,
    Kind,
    StageCost,
    Timeline,
    run,
    split_last_backwards,
)
from gemsc.viz.terminal import show

SECONDS = 1.0
STAGE = StageCost(
    1.0,
    2.0,
    SECONDS,
    saved_bytes=100,
    transient_bytes=3,
    first_transient_bytes=7,
    gradient_bytes=20,
    waiting_bytes=50,
)


def split_stages(timeline: Timeline) -> list[int]:
    """Return the stages whose weight gradients are actions of their own."""
    weights = {a for o in timeline.orders for a in o if a.kind is Kind.WEIGHT}
    return sorted(action.stage for action in weights)


# ---------------------------------------------------------------- in a schedule


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize(
    ("schedule", "micro_batches", "earlier"),
    [
        ("gpipe", 1, None),  # stage by stage
        ("1f1b", 1, None),
        ("1f1b", 2, 1),  # then the rank before is still busy
        ("1f1b", 4, 1),
        ("1f1b", 9, 1),
        ("gpipe", 4, 0),  # the rank before is busy with the backward before
    ],
)
def test_a_step_is_shorter_by_weight_gradients(
    num_stages: int, schedule: str, micro_batches: int, earlier: int | None
) -> None:
    """For equal stages, B = 2F = 2W: 3 (M + N - 1) without."""
    task = chain_of([STAGE] * num_stages, [micro_batches])
    plain = run(task, SCHEDULES[schedule].policy)
    assert plain.makespan == 3 * (micro_batches + num_stages - 1)
    split = split_last_backwards(task, plain)
    count = num_stages - 1 if earlier is None else earlier
    assert split.makespan == plain.makespan - count * SECONDS
    assert split_stages(split) == [*range(num_stages - count, num_stages)]
    for order, before in zip(split.orders, plain.orders, strict=True):
        assert [a for a in order if a.kind is not Kind.WEIGHT] == [*before]


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "basic"])
def test_what_is_held_meanwhile_is_counted(schedule: str, micro_batches: int) -> None:
    stage = replace(
        STAGE, split_transient_bytes=400, first_split_transient_bytes=450,
        waiting_gradient_bytes=15, waiting_bytes=300,
    )  # fmt: skip
    task = chain_of([replace(STAGE, resident_bytes=1000), stage], [micro_batches])
    plain = run(task, SCHEDULES[schedule].policy)
    split = split_last_backwards(task, plain)
    if schedule == "gpipe" and micro_batches > 1:
        assert split == plain
        return
    assert split_stages(split) == [1]
    # before the last backward all else is done; the first one makes the gradients
    meanwhile = 100 + (450 if micro_batches == 1 else 400 + 20)
    assert split.peak_bytes[1] == meanwhile
    proved(task, split)


def test_no_rank_holds_more_than_the_fullest_did() -> None:
    leaner = replace(STAGE, first_split_transient_bytes=7, waiting_bytes=87)
    task = chain_of([STAGE, leaner, leaner], [1])
    plain = run(task, SCHEDULES["1f1b"].policy)
    assert plain.peak_bytes == (107, 107, 107)
    assert split_stages(split_last_backwards(task, plain)) == [1, 2]
    for more in ({"first_split_transient_bytes": 8}, {"waiting_bytes": 88}):
        fuller = chain_of([STAGE, leaner, replace(leaner, **more)], [1])
        split = split_last_backwards(fuller, plain)
        assert split_stages(split) == [1]
        assert split.makespan == plain.makespan - SECONDS
        assert split.peak_bytes == (107, 107, 107)


def test_what_all_backwards_split_is_left_as_it_is() -> None:
    task = chain_of([STAGE] * 3, [4])
    plain = run(task, SCHEDULES["zb-h1"].policy)
    assert split_last_backwards(task, plain) is plain


# ------------------------------------------------------------------ in a program


@pytest.mark.slow
@pytest.mark.by_day(7)
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("name", ["resnet18", "unet", "encoder", "densecnn", "mlp"])
def test_memory_of_a_program_that_splits_backwards(
    name: str, micro_batches: int, tmp_path: Path
) -> None:
    options = CompileOptions(ranks=3, micro_batches=micro_batches)
    program = lower(traced(name), options)
    plan = program.plan
    task = task_of(plan)
    split = split_stages(timeline_of(plan))
    assert split
    assert 0 not in split
    slower = run(task, SCHEDULES["1f1b"].policy)
    assert timeline_of(plan).makespan < slower.makespan
    assert max(plan.peak_bytes) <= max(slower.peak_bytes)

    write_directory(program.compilation, tmp_path / "program")
    batch = MODELS[name].inputs(micro_batches, torch.float32)
    record = run_on_threads(tmp_path / "program", 3, [batch] * 2, dtype=torch.float32)
    assert record.peak_bytes == metered_peaks(plan)
    for rank, text in enumerate(program.rank_modules().values()):
        last = micro_batches - 1
        assert ("deferred=" in text) == (rank in split)
        assert (f"weights_stage{rank}(worker, {last})" in text) == (rank in split)


@pytest.mark.slow(1)
@pytest.mark.by_day(2)
@pytest.mark.parametrize(
    "choice",
    [
        {"tiles": ("3x1",), "ranks": 3},
        {"recompute": ("all",)},
        {"offload": ("all",)},
        {"ranks": 1},
    ],
    ids=str,
)
def test_what_splits_none(choice: dict[str, Any]) -> None:
    options = replace(CompileOptions(ranks=2, micro_batches=2), **choice)
    program = lower(traced("unet"), options)
    assert not split_stages(timeline_of(program.plan))
    assert "deferred=" not in "".join(program.rank_modules().values())


def test_weights_with_hooks_are_left_to_autograd() -> None:
    """An optimizer may register hooks; they must see each gradient."""
    layer, hooked = nn.Linear(3, 3), nn.Linear(3, 3)
    seen: list[int] = []
    hooked.weight.register_post_accumulate_grad_hook(lambda _: seen.append(1))
    hooked.bias.register_hook(lambda gradient: seen.append(2))
    deferred = Deferred()
    with deferred.forward():
        y = hooked(layer(torch.randn(2, 3)))
    y.sum().backward()
    assert sorted(seen) == [1, 2]
    assert hooked.weight.grad is not None
    assert layer.weight.grad is None
    deferred.compute()
    assert layer.weight.grad is not None


def test_show_says_so() -> None:
    plan = lower(traced("unet"), CompileOptions(ranks=3, micro_batches=1)).plan
    console = Console(width=200, record=True, file=io.StringIO())
    show(plan, console)
    stages = ", ".join(map(str, split_stages(timeline_of(plan))))
    line = f"deferred weight gradients: stage {stages} first sends the gradients of its"
    assert line in console.export_text()
    alone = lower(traced("unet"), CompileOptions(ranks=1)).plan
    show(alone, console)
    assert "deferred weight gradients" not in console.export_text()
