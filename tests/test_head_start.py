"""The last backward of a step sends before it computes weight gradients."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import MODELS
from parity_support import traced
from rich.console import Console
from schedule_support import proved
from support import run_on_threads
from torch import nn

from gemsc import CompileOptions
from gemsc.codegen.package import write_directory
from gemsc.compiler import lower
from gemsc.planner.from_plan import task_of, timeline_of
from gemsc.planner.head_start import with_head_starts
from gemsc.runtime.worker.deferral import Deferred
from gemsc.schedules import SCHEDULES, HeadStart, StageCost, Task, run
from gemsc.viz.tables import show

SECONDS = 1.0


@dataclass
class Possible:
    """Head starts that are the same for any number of layers."""

    stages: dict[int, HeadStart]

    def of(self, stage: int, level: int) -> HeadStart | None:
        """Stands for that of `HeadStarts`."""
        return self.stages.get(stage) if level else None


STAGE = StageCost(
    1.0,
    2.0,
    SECONDS,
    saved_bytes=100,
    transient_bytes=3,
    first_transient_bytes=7,
    gradient_bytes=20,
)


def chain(num_stages: int, micro_batches: int, head_start: HeadStart | None) -> Task:
    """Return equal stages; all but the first have the head start."""
    later = replace(STAGE, head_start=head_start)
    return Task.chain([STAGE, *[later] * (num_stages - 1)], [micro_batches])


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
    task = chain(num_stages, micro_batches, None)
    plain = run(task, SCHEDULES[schedule].policy)
    assert plain.makespan == 3 * (micro_batches + num_stages - 1)
    possible = dict.fromkeys(range(num_stages), HeadStart(SECONDS))
    faster, found = with_head_starts(task, plain, Possible(possible))
    count = num_stages - 1 if earlier is None else earlier
    assert found.makespan == plain.makespan - count * SECONDS
    assert found.orders == plain.orders
    ahead = [stage.head_start is not None for stage in faster.stages]
    assert ahead == [False] * (num_stages - count) + [True] * count


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "basic"])
def test_the_checker_counts_what_is_held_meanwhile(
    schedule: str, micro_batches: int
) -> None:
    task = chain(3, micro_batches, HeadStart(SECONDS, 400, 450))
    timeline = run(task, SCHEDULES[schedule].policy)
    # before the last backward all else is done; the first one makes the gradients
    meanwhile = 100 + (450 if micro_batches == 1 else 400 + 20)
    most = 100 * timeline.peak_live[1] + (3 + 20 if micro_batches > 1 else 0)
    assert timeline.peak_bytes[1] == max(meanwhile, most)
    proved(task, timeline)


def test_nobody_becomes_the_fullest_by_it() -> None:
    task = chain(3, 1, None)
    timeline = run(task, SCHEDULES["1f1b"].policy)
    assert timeline.peak_bytes == (107, 107, 107)
    possible = {1: HeadStart(SECONDS, 0, 7), 2: HeadStart(SECONDS, 0, 8)}  # too much
    faster, found = with_head_starts(task, timeline, Possible(possible))
    assert [stage.head_start for stage in faster.stages] == [None, possible[1], None]
    assert found.makespan == timeline.makespan - SECONDS
    assert found.peak_bytes == (107, 107, 107)
    task = replace(task, memory_cap=108)
    roomy, _ = with_head_starts(task, timeline, Possible(possible))
    assert roomy.stages[2].head_start == possible[2]


# ------------------------------------------------------------------ in a program


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("name", ["resnet18", "unet", "encoder", "densecnn", "mlp"])
def test_memory_of_a_program_that_has_them(
    name: str, micro_batches: int, tmp_path: Path
) -> None:
    options = CompileOptions(ranks=3, micro_batches=micro_batches)
    program = lower(traced(name), options)
    plan = program.plan
    task = task_of(plan)
    ahead = [stage.index for stage in plan.stages if stage.head_start_layers]
    assert ahead
    assert 0 not in ahead
    without = replace(
        task, stages=tuple(replace(s, head_start=None) for s in task.stages)
    )
    slower = run(without, SCHEDULES["1f1b"].policy)
    assert timeline_of(plan).makespan < slower.makespan
    assert max(plan.peak_bytes) == max(slower.peak_bytes)

    write_directory(program.compilation, tmp_path / "program")
    batch = MODELS[name].inputs(micro_batches, torch.float32)
    record = run_on_threads(tmp_path / "program", 3, [batch] * 2, dtype=torch.float32)
    assert record.peak_bytes == plan.peak_bytes
    for rank, text in enumerate(program.rank_modules().values()):
        assert ("HEAD_STARTS" in text) == (rank in ahead)
        assert (f'worker.weights("stage{rank}", m)' in text) == (rank in ahead)


@pytest.mark.parametrize(
    "choice",
    [
        {"tiles": ("3x1",), "ranks": 3},
        {"recompute": ("all",)},
        {"offload": ("all",)},
        {"schedule": "zb-h1"},
        {"ranks": 1},
    ],
    ids=str,
)
def test_what_has_none(choice: dict[str, Any]) -> None:
    options = replace(CompileOptions(ranks=2, micro_batches=2), **choice)
    program = lower(traced("unet"), options)
    assert not any(stage.head_start_layers for stage in program.plan.stages)
    assert "HEAD_STARTS" not in "".join(program.rank_modules().values())


def test_weights_with_hooks_are_left_to_autograd() -> None:
    """An optimizer may register hooks; they must see each gradient."""
    layer, hooked = nn.Linear(3, 3), nn.Linear(3, 3)
    seen: list[int] = []
    hooked.weight.register_post_accumulate_grad_hook(lambda _: seen.append(1))
    hooked.bias.register_hook(lambda gradient: seen.append(2))
    deferred = Deferred(lambda tensors: None)
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
    stages = [str(stage.index) for stage in plan.stages if stage.head_start_layers]
    line = "deferred weight gradients: in its last backward, stage "
    line += f"{', '.join(stages)} first sends the gradients of its inputs"
    assert line in console.export_text()
    alone = lower(traced("unet"), CompileOptions(ranks=1)).plan
    show(alone, console)
    assert "deferred weight gradients" not in console.export_text()
