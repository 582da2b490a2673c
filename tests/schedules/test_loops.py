"""Loops in lists of actions: what they read like, and that they mean the same."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_support import chain_of, equal_task, random_task

from gemsc.schedules import SCHEDULES, Action, Kind, StageCost, run
from gemsc.schedules.loops import Loop, expand, find_loops, num_lines


def row(text: str) -> tuple[Action, ...]:
    return tuple(map(Action.parse, text.split()))


def read(actions: tuple[Action, ...]) -> list[str]:
    return [str(step) for step in find_loops(actions)]


def test_1f1b_reads_as_fill_steady_state_and_drain() -> None:
    timeline = run(equal_task(SCHEDULES["1f1b"], 4, 8), SCHEDULES["1f1b"].policy)
    assert read(timeline.orders[1]) == [
        "for m in range(0, 2): 1F(m)",
        "for m in range(2, 8): 1F(m) 1B(m-2)",
        "for m in range(6, 8): 1B(m)",
    ]


def test_gpipe_reads_as_two_loops() -> None:
    timeline = run(equal_task(SCHEDULES["gpipe"], 4, 8), SCHEDULES["gpipe"].policy)
    assert read(timeline.orders[2]) == [
        "for m in range(0, 8): 2F(m)",
        "for m in range(0, 8): 2B(m)",
    ]


def test_mirrored_runs_read_as_one_loop() -> None:
    timeline = run(equal_task(SCHEDULES["master"], 4, 8), SCHEDULES["master"].policy)
    assert read(timeline.orders[0]) == [
        "for m in range(0, 4): 0F(m) 0B(m) 3F(m)' 3B(m)'"
    ]


def test_a_single_action_stays_straight() -> None:
    assert find_loops(row("0F0 0B0")) == row("0F0 0B0")
    assert find_loops(()) == ()


def test_a_loop_may_take_larger_steps() -> None:
    assert read(row("0F0 0F1 1F0 1F1 0F2 0F3 1F2 1F3 0F4 0F5 1F4 1F5")) == [
        "for m in range(0, 5, 2): 0F(m) 0F(m+1) 1F(m) 1F(m+1)"
    ]


def test_a_loop_may_go_down() -> None:
    (loop,) = find_loops(row("0F5 0F4 0F3"))
    assert loop == Loop(5, 2, ((Action(Kind.FORWARD, 0, 0), 0),), -1)
    assert expand((loop,)) == row("0F5 0F4 0F3")


actions = st.builds(
    Action,
    st.sampled_from(list(Kind)),
    st.integers(0, 1),
    st.integers(0, 3),
    st.integers(0, 1),
)


@given(st.lists(actions, max_size=40).map(tuple))
def test_the_steps_stand_for_exactly_the_actions(order: tuple[Action, ...]) -> None:
    steps = find_loops(order)
    assert expand(steps) == order
    assert num_lines(steps) <= len(order)


@pytest.mark.slow(5)
@pytest.mark.parametrize("name", list(SCHEDULES))
@given(seed=st.integers(0, 2**32))
@settings(max_examples=10, deadline=None)
def test_the_loops_of_a_schedule_are_the_schedule(name: str, seed: int) -> None:
    timeline = run(random_task(SCHEDULES[name], seed), SCHEDULES[name].policy)
    for order in timeline.orders:
        steps = find_loops(order)
        assert expand(steps) == order
        for step in steps:
            if isinstance(step, Loop):
                kinds = [action.kind for action, _ in step.body]
                at = kinds.index(Kind.FORWARD) if Kind.FORWARD in kinds else 0
                assert step.body[at][1] == 0


def test_2000_actions_are_no_matter_of_minutes() -> None:
    task = chain_of((StageCost(1.0, 2.0),) * 2, (1000,))
    order = run(task, SCHEDULES["1f1b"].policy).orders[0]
    start = time.perf_counter()
    assert num_lines(find_loops(order)) == 5
    assert time.perf_counter() - start < 5
