"""The list scheduler: dependencies, limits, memory, and the text of actions."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_support import chain_of

from gemsc.errors import GemscError, InternalError
from gemsc.schedules import Action, Edge, Kind, Policy, StageCost, Task, replay, run
from gemsc.schedules.policies import SCHEDULES, place

UNIT = StageCost(1.0, 2.0, 1.0)


def row(*actions: str) -> tuple[Action, ...]:
    return tuple(map(Action.parse, actions))


def test_an_action_reads_as_stage_kind_and_micro_batch() -> None:
    assert str(Action(Kind.FORWARD, 2, 0)) == "2F0"
    assert str(Action(Kind.WEIGHT, 10, 12, replica=2)) == "10W12''"


@given(
    st.sampled_from(list(Kind)),
    st.integers(0, 99),
    st.integers(0, 999),
    st.integers(0, 3),
)
def test_what_an_action_writes_it_can_read(
    kind: Kind, stage: int, micro_batch: int, replica: int
) -> None:
    action = Action(kind, stage, micro_batch, replica)
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "2F", "F2", "2X0", "2F0 1F0", "-1F0"])
def test_other_text_is_no_action(text: str) -> None:
    with pytest.raises(ValueError, match="is not an action"):
        Action.parse(text)


def test_a_transfer_takes_its_time_between_ranks_and_none_within_one() -> None:
    chain = chain_of((UNIT, UNIT), (1,), seconds=0.5)
    assert run(chain, Policy()).makespan == 7.0
    joined = dataclasses.replace(chain, placement=((0, 0),))
    assert run(joined, Policy()).makespan == 6.0


def test_no_gradient_travels_where_there_is_none() -> None:
    edges = (Edge(0, 1, 0.5, gradient=False),)
    task = Task((UNIT, UNIT), edges, ((0, 1),), (1,))
    assert run(task, Policy()).makespan == 6.5


def test_a_skip_over_stages_is_waited_for() -> None:
    stages = (UNIT,) * 3
    task = chain_of(stages, (1,), skips=(Edge(0, 2, 5.0),))
    last = run(task, Policy()).ranks[2]
    assert [timed.start for timed in last] == [6.0, 7.0]
    # The gradient of the skip goes straight back: 9 + 5, longer than through stage 1.
    assert run(task, Policy()).ranks[0][1].start == 14.0


def test_branches_run_side_by_side() -> None:
    edges = (Edge(0, 1), Edge(0, 2), Edge(1, 3), Edge(2, 3))
    task = Task((UNIT,) * 4, edges, ((0, 1, 2, 3),), (1,))
    assert run(task, Policy()).grid().splitlines() == [
        "rank 0  0F0 .   .   .   .   .   .   0B0 --",
        "rank 1  .   1F0 .   .   .   1B0 --  .   .",
        "rank 2  .   2F0 .   .   .   2B0 --  .   .",
        "rank 3  .   .   3F0 3B0 --  .   .   .   .",
    ]
    assert task.stages_to_end == (3, 2, 2, 1)


def test_1f1b_holds_fewer_micro_batches_where_a_rank_has_several_stages() -> None:
    task = chain_of((UNIT,) * 8, (16,), placement=place("linear", 8, 4))
    assert run(task, SCHEDULES["1f1b"].policy).peak_live == (8, 6, 4, 2)


def test_a_folded_pipeline_is_nearly_as_fast_as_a_straight_one() -> None:
    half = StageCost(0.5, 1.0)
    task = chain_of((half,) * 8, (16,), placement=place("folded", 8, 4))
    assert task.placement == ((0, 1, 2, 3, 3, 2, 1, 0),)
    assert run(task, SCHEDULES["1f1b"].policy).makespan <= 3 * (16 + 4 - 1)


def test_gpipe_works_in_groups_that_fit_into_memory() -> None:
    task = chain_of((UNIT, UNIT), (4,), memory_cap=2)
    timeline = run(task, SCHEDULES["gpipe"].policy)
    assert timeline.peak_bytes == (2, 2)
    assert timeline.orders[1][:4] == row("1F0", "1F1", "1B0", "1B1")


def test_resident_bytes_count_towards_the_cap() -> None:
    heavy = StageCost(1.0, 2.0, saved_bytes=4, resident_bytes=10)
    task = chain_of((heavy, heavy), (4,), memory_cap=14)
    assert run(task, SCHEDULES["gpipe"].policy).peak_bytes == (14, 14)
    assert run(task, SCHEDULES["gpipe"].policy).peak_live == (1, 1)


def test_a_cap_that_nothing_fits_names_rank_bytes_and_a_way_out() -> None:
    small, large = StageCost(1, 2, saved_bytes=10), StageCost(1, 2, saved_bytes=2000)
    task = chain_of((small, large), (4,), memory_cap=100)
    with pytest.raises(GemscError) as caught:
        run(task, SCHEDULES["gpipe"].policy)
    assert caught.value.message == (
        "rank 1 needs 2,000 bytes for one micro-batch, but the limit is 100 bytes"
    )
    assert "--device-memory" in (caught.value.help or "")


def test_replicas_with_different_numbers_of_micro_batches_take_turns() -> None:
    task = chain_of((UNIT, UNIT), (3, 1), placement=place("mirrored", 2, 2, 2))
    timeline = run(task, SCHEDULES["master"].policy)
    assert timeline.peak_live == (1, 1)
    forwards = [a for a in timeline.orders[0] if a.kind is Kind.FORWARD]
    assert tuple(forwards) == row("0F0", "1F0'", "0F1", "0F2")


def test_the_bubble_is_the_idle_share() -> None:
    task = chain_of((UNIT, UNIT), (1,))
    assert run(task, Policy()).bubble == 0.5


def test_orders_that_block_each_other_are_our_fault() -> None:
    task = chain_of((UNIT, UNIT), (1,))
    with pytest.raises(InternalError, match="block each other at 0B0, 1B0"):
        replay(task, (row("0B0", "0F0"), row("1B0", "1F0")))


def test_an_edge_leads_to_a_later_stage() -> None:
    with pytest.raises(InternalError, match="later stage"):
        Task((UNIT, UNIT), (Edge(1, 0),), ((0, 1),), (1,))
