"""Why a plan is as it is: the parts of a step, the slowest stage, what would help."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_support import made_up_plan

from gemsc.planner.explain import explain


def test_the_parts_add_up_to_the_step() -> None:
    plan = made_up_plan(seconds=(0.01, 0.013, 0.011, 0.02), message_seconds=0.004)
    why = explain(plan)
    assert why.step_seconds == pytest.approx(plan.step_seconds, rel=1e-9)
    assert min(seconds for _, seconds in why.parts) > 0
    mean = 8 * 3 * (0.01 + 0.013 + 0.011 + 0.02) / 4
    assert why.work_seconds == pytest.approx(mean)
    assert why.imbalance_seconds == pytest.approx(8 * 3 * 0.02 - mean)


def test_equal_stages_lose_what_the_formula_says() -> None:
    """1F1B on N equal stages: M (f + b) of work, (N - 1)(f + b) around it."""
    why = explain(made_up_plan(4, 8))
    assert why.imbalance_seconds == pytest.approx(0, abs=1e-12)
    assert why.message_seconds == pytest.approx(0, abs=1e-12)
    assert why.fill_seconds == pytest.approx(3 * 0.03)
    assert "filling and draining the pipeline costs most, 27%" in why.line
    assert "more --micro-batches help" in why.line


def test_the_slowest_stage_is_named_with_the_imbalance() -> None:
    why = explain(made_up_plan(4, 64, seconds=(0.01, 0.01, 0.02, 0.01)))
    assert (why.slowest_stage, why.slowest_ranks) == (2, "rank 2")
    assert why.imbalance == pytest.approx(0.6)
    assert "stage 2 on rank 2 is slowest, 60% above the average rank" in why.line
    assert "these 8 blocks cannot be balanced better over 4 stages" in why.line


def test_stages_that_were_given_could_be_chosen() -> None:
    plan = made_up_plan(4, 64, seconds=(0.01, 0.01, 0.02, 0.01))
    why = explain(replace(plan, options={**plan.options, "balance": "explicit"}))
    assert "without --blocks, --cuts and --placement gemsc chooses" in why.advice


def test_a_block_that_is_too_large_is_named() -> None:
    seconds = (0.01, 0.01, 0.02, 0.01)
    why = explain(made_up_plan(4, 64, seconds=seconds, num_blocks=1))
    assert "it is one block, layer2.block0, which cannot be cut" in why.line


def test_slow_messages_are_named() -> None:
    why = explain(made_up_plan(4, 4, message_seconds=0.1))
    assert "messages cost most" in why.line
    assert why.message_seconds > 0.5 * why.step_seconds


def test_where_nothing_is_lost_nothing_is_advised() -> None:
    why = explain(made_up_plan(2, 200))
    assert why.line.endswith("% of the step is work")
    assert why.advice == ""


def test_one_micro_batch_at_a_time_calls_for_another_schedule() -> None:
    why = explain(made_up_plan(4, 8, schedule="basic"))
    assert "--schedule 1f1b overlaps micro-batches" in why.line


def test_what_ranks_of_a_stage_wait_for_each_other_is_a_part_of_the_step() -> None:
    plan = made_up_plan(2, 8)  # stages of 0.03 s
    stages = [replace(stage, talking_seconds=0.012) for stage in plan.stages]
    talking = explain(replace(plan, stages=stages))
    assert talking.talking_seconds == pytest.approx(8 * 0.012)
    assert talking.work_seconds == pytest.approx(8 * 0.018)
    assert talking.step_seconds == pytest.approx(plan.step_seconds, rel=1e-9)
    assert "messages and sums inside stages cost most, 36% of the step" in talking.line
    assert "sums inside stages (36%)" in talking.parts_line
