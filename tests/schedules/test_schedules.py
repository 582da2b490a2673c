"""Every schedule: its figures, and what must be true of it for any task."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_support import (
    chain_of,
    equal_task,
    least_memory,
    proved,
    random_task,
)

from gemsc.schedules import SCHEDULES, StageCost, Task, Timeline, place, replay, run
from gemsc.schedules.engine import find_orders
from gemsc.schedules.loops import find_loops, num_lines

NAMES = list(SCHEDULES)
# Sharing a rank in other ways than a schedule is made for must work as well.
PLACEMENTS = ["linear", "looped", "folded", "mirrored"]


def schedule(name: str, num_ranks: int, num_micro_batches: int) -> Timeline:
    """Schedule equal stages; on four ranks or so; M counts both replicas' together."""
    entry = SCHEDULES[name]
    chunks = 2 if name in ("interleaved", "zb-v", "v-half") else 1
    task = equal_task(entry, num_ranks, num_micro_batches, chunks=chunks)
    return run(task, entry.policy)


# -- figures ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "makespans", "peaks"),
    [
        ("basic", (48, 96, 192), (1, 1, 1, 1)),
        ("master", (39, 75, 147), (1, 1, 1, 1)),
        ("mast", (39, 75, 147), (1, 1, 1, 1)),
        ("bidirectional", (24, 48, 96), (2, 2, 2, 2)),
        ("gpipe", (21, 33, 57), (8, 8, 8, 8)),
        ("1f1b", (21, 33, 57), (4, 3, 2, 1)),
        # Stages are half as large here: 11 of them are 5.5 of the others.
        ("interleaved", (16.5, 28.5, 52.5), (11, 9, 7, 5)),
        ("chimera", (16, 30, 58), (3, 4, 4, 3)),
        ("zb-h1", (15, 27, 51), (4, 4, 4, 4)),
        ("zb-v", (13.5, 25.5, 49.5), (8, 8, 8, 8)),  # also halves
        ("v-half", (14.5, 26.5, 50.5), (6, 6, 6, 6)),
    ],
)
def test_four_equal_stages_take_the_time_and_memory_of_the_literature(
    name: str, makespans: tuple[float, ...], peaks: tuple[int, ...]
) -> None:
    assert tuple(schedule(name, 4, m).makespan for m in (4, 8, 16)) == makespans
    assert schedule(name, 4, 8).peak_live == peaks


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("m", [1, 2, 4, 8, 16])
def test_equal_stages_take_what_the_formulas_say(n: int, m: int) -> None:
    assert schedule("basic", n, m).makespan == 3 * m * n
    assert schedule("gpipe", n, m).makespan == 3 * (m + n - 1)
    assert schedule("1f1b", n, m).makespan == 3 * (m + n - 1)
    assert schedule("1f1b", n, m).peak_live == tuple(min(m, n - s) for s in range(n))
    assert schedule("master", n, 2 * m).makespan == m * (4 * n + 2) + n - 1
    assert schedule("bidirectional", n, 2 * m).makespan == 3 * n * m
    if m % n == 0:
        assert schedule("interleaved", n, m).makespan == 3 * m + 3 * (n - 1) / 2
    if m >= n:
        assert schedule("zb-h1", n, m).makespan == 3 * m + n - 1


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("extra", [0, 1, 3, 8, 14])
def test_in_a_v_no_rank_is_idle_once_it_has_begun(n: int, extra: int) -> None:
    """F = B = W: zero bubble, with the memory of 1F1B's first rank on every rank.

    Source: Qi and others, Zero Bubble Pipeline Parallelism, 2024, section 4.
    """
    m = n + extra
    half = StageCost(0.5, 1.0, 0.5, saved_bytes=1, waiting_bytes=1)
    rows = place("folded", 2 * n, n)
    task = chain_of((half,) * (2 * n), (m,), placement=rows)
    timeline = run(task, SCHEDULES["zb-v"].policy)
    late = timeline.makespan - 3 * m - (n - 1) / 2
    assert 0 <= late <= (n / 4 if n > 4 else 0)
    assert max(timeline.peak_bytes) == 2 * n
    assert timeline.makespan < schedule("zb-h1", n, m).makespan


def picture(text: str) -> list[str]:
    """Return the rows of a grid written into a test, without the margin."""
    return [line.strip() for line in text.strip().splitlines()]


def test_1f1b_reads_as_a_staircase() -> None:
    assert schedule("1f1b", 3, 4).grid().splitlines() == picture("""
        rank 0  0F0 0F1 0F2 .   .   .   .   0B0 --  0F3 0B1 --  .   0B2 --  .   0B3 --
        rank 1  .   1F0 1F1 .   .   1B0 --  1F2 1B1 --  1F3 1B2 --  .   1B3 --  .   .
        rank 2  .   .   2F0 2B0 --  2F1 2B1 --  2F2 2B2 --  2F3 2B3 --  .   .   .   .
    """)


def test_mirrored_replicas_take_turns_in_the_memory_of_one_run() -> None:
    assert schedule("mast", 2, 2).grid().splitlines() == picture("""
        rank 0  0F0  .    .    .    0B0  --   1F0' 1B0' --   .    .
        rank 1  .    1F0  1B0  --   0F0' .    .    .    .    0B0' --
    """)


def test_two_mirrored_runs_at_once_take_the_time_of_one() -> None:
    assert schedule("bidirectional", 2, 2).grid().splitlines() == picture("""
        rank 0  0F0  1F0' 1B0' --   0B0  --
        rank 1  0F0' 1F0  1B0  --   0B0' --
    """)


def test_the_page_of_schedules_has_these_figures() -> None:
    page = Path(__file__).parents[2] / "docs" / "pipeline.md"
    _, figures = page.read_text().split("### Figures", 1)
    figures, _ = figures.split("\n##", 1)
    rows = [line for line in figures.splitlines() if line.startswith("| `")]
    lines = []
    for name, entry in SCHEDULES.items():
        chunks = 2 if entry.placement in ("looped", "folded") else 1
        makespans = [schedule(name, 4, m).makespan for m in (4, 8, 16)]
        task = equal_task(entry, 4, 8, chunks=chunks)
        kept = dataclasses.replace(task.stages[0], saved_bytes=1, waiting_bytes=1)
        task = dataclasses.replace(task, stages=(kept,) * len(task.stages))
        peaks = [peak / chunks for peak in run(task, entry.policy).peak_bytes]
        cells = [f"`{name}`", *map("{:g}".format, makespans)]
        cells += [" ".join(map("{:g}".format, peaks)), f"{entry.num_replicas}"]
        lines.append(f"| {' | '.join(cells)} |")
    assert rows[1:] == lines  # the first is the heading


# -- properties ------------------------------------------------------------------------


@pytest.mark.slow(1)
@pytest.mark.by_day(6)
@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from([None, *PLACEMENTS]))
@settings(max_examples=15, deadline=None)
def test_any_task_gets_a_correct_schedule(
    name: str, seed: int, kind: str | None
) -> None:
    task = random_task(SCHEDULES[name], seed, kind=kind)
    proved(task, run(task, SCHEDULES[name].policy))


@pytest.mark.slow(1)
@pytest.mark.by_day(6)
@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from([None, *PLACEMENTS]))
@settings(max_examples=15, deadline=None)
def test_a_memory_cap_is_never_exceeded(name: str, seed: int, kind: str | None) -> None:
    task = random_task(SCHEDULES[name], seed, kind=kind, capped=True)
    timeline = run(task, SCHEDULES[name].policy)
    assert task.memory_cap is not None
    assert max(timeline.peak_bytes) <= task.memory_cap
    proved(task, timeline)


@pytest.mark.slow(5)
@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=10, deadline=None)
def test_evaluation_has_forwards_only(name: str, seed: int) -> None:
    task = random_task(SCHEDULES[name], seed, has_backward=False)
    proved(task, run(task, SCHEDULES[name].policy))


@pytest.mark.parametrize("name", NAMES)
def test_the_same_task_gets_the_same_schedule(name: str) -> None:
    task = random_task(SCHEDULES[name], 7)
    assert run(task, SCHEDULES[name].policy) == run(task, SCHEDULES[name].policy)


def uneven(name: str, seed: int, num_micro_batches: int) -> Task:
    """Return a chain on four ranks with random times, the same for each M."""
    entry = SCHEDULES[name]
    stages = 8 if name == "interleaved" else 4
    base = random_task(entry, seed).stages
    costs = [base[s % len(base)] for s in range(stages)]
    costs = [
        dataclasses.replace(c, forward=c.forward * (1 + (s * 37 % 11) / 10))
        for s, c in enumerate(costs)
    ]
    micro_batches = (num_micro_batches,) * entry.num_replicas
    placement = place(entry.placement, stages, 4, entry.num_replicas)
    return chain_of(costs, micro_batches, placement=placement)


@pytest.mark.slow(6)
@pytest.mark.by_day(12)
@pytest.mark.parametrize(("name", "most"), [("basic", 3), ("gpipe", 4), ("1f1b", 14)])
@pytest.mark.parametrize("seed", range(8))
def test_the_text_does_not_grow_with_the_micro_batches(
    name: str, most: int, seed: int
) -> None:
    for m in (4, 64, 256):
        timeline = run(uneven(name, seed, m), SCHEDULES[name].policy)
        for order in timeline.orders:
            assert num_lines(find_loops(order)) <= most


@pytest.mark.by_day(40)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(8))
def test_a_short_text_costs_little_time(name: str, seed: int) -> None:
    task = uneven(name, seed, 16)
    policy = SCHEDULES[name].policy
    free = replay(task, find_orders(task, policy))
    assert run(task, policy).makespan <= 1.05 * free.makespan


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_fits_into_the_memory_of_one_micro_batch(name: str) -> None:
    entry = SCHEDULES[name]
    task = equal_task(entry, 4, 8)
    task = dataclasses.replace(task, memory_cap=least_memory(task, entry.policy))
    assert max(run(task, entry.policy).peak_live) == 1


@pytest.mark.slow
def test_512_micro_batches_on_8_ranks_take_seconds_at_most() -> None:
    task = chain_of((StageCost(1.0, 2.0),) * 8, (512,))
    timeline = run(task, SCHEDULES["1f1b"].policy)
    assert timeline.makespan == 3 * (512 + 7)
    assert max(num_lines(find_loops(order)) for order in timeline.orders) == 7
