"""The partition is the best there is, over all ways to cut."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemsc.planner.partition import partition

Rows = Sequence[Sequence[float]]

weights = st.integers(0, 9).map(float)


@st.composite
def rows_of_weights(draw: st.DrawFn, same: bool = False) -> list[list[float]]:
    items = draw(st.integers(1, 7))
    parts = draw(st.integers(1, items))
    row = st.lists(weights, min_size=items, max_size=items)
    if same:
        return [draw(row)] * parts
    return [draw(row) for _ in range(parts)]


def every_partition(rows: Rows) -> Iterator[list[int]]:
    parts, items = len(rows), len(rows[0])
    for cuts in itertools.combinations(range(1, items), parts - 1):
        yield list(cuts)


def loads(rows: Rows, cuts: list[int]) -> list[float]:
    """Return the weight of each part."""
    edges = [0, *cuts, len(rows[0])]
    spans = itertools.pairwise(edges)
    return [sum(row[a:b]) for row, (a, b) in zip(rows, spans, strict=True)]


def largest(rows: Rows, cuts: list[int]) -> float:
    return max(loads(rows, cuts))


@given(rows_of_weights(same=True))
@settings(deadline=None, max_examples=100)
def test_no_other_partition_has_a_smaller_largest_part(rows: Rows) -> None:
    cuts = partition(rows)
    assert len(cuts) == len(rows) - 1
    assert largest(rows, cuts) == min(largest(rows, c) for c in every_partition(rows))


@pytest.mark.slow
@given(rows_of_weights())
@settings(deadline=None, max_examples=100)
def test_items_may_weigh_something_else_in_each_part(rows: Rows) -> None:
    best = min(largest(rows, cuts) for cuts in every_partition(rows))
    assert largest(rows, partition(rows)) == best


@pytest.mark.slow
@given(rows_of_weights(), st.data(), st.sampled_from([0.0, 0.02, 0.5]))
@settings(deadline=None, max_examples=100)
def test_among_the_good_partitions_the_best_in_all_is_taken(
    rows: Rows, data: st.DataObject, slack: float
) -> None:
    gaps = len(rows[0]) - 1
    costs = data.draw(st.lists(weights, min_size=gaps, max_size=gaps))
    taken = partition(rows, cut_costs=costs, slack=slack)
    least = min(largest(rows, cuts) for cuts in every_partition(rows))
    good = [c for c in every_partition(rows) if largest(rows, c) <= least * (1 + slack)]
    assert taken in good

    def price(cuts: Sequence[int]) -> float:
        """Return what the docstring of `partition` says."""
        dearest = max(costs, default=0.0) or 1.0
        shares = [load / (least or 1.0) for load in loads(rows, list(cuts))]
        cut_price = sum(0.5 * costs[cut - 1] / dearest for cut in cuts)
        return sum(share**16 for share in shares) + cut_price

    assert price(taken) == pytest.approx(min(map(price, good)), rel=1e-9)


def test_a_second_part_that_is_nearly_the_largest_is_avoided() -> None:
    row = [10.0, 5.0, 1.0, 8.6]  # 10, 5, 9.6 or 10, 6, 8.6
    assert partition([row] * 3, cut_costs=[1.0, 1.0, 1.0]) == [1, 3]
    # unless its cut is dear
    assert partition([row] * 3, cut_costs=[1.0, 0.0, 1.0]) == [1, 2]


def test_as_many_parts_as_items_leave_one_item_each() -> None:
    row = [5.0, 0.0, 0.0, 1.0]
    assert partition([row] * 4) == [1, 2, 3]
    assert partition([row] * 4, cut_costs=[9.0, 9.0, 9.0]) == [1, 2, 3]


def test_one_part_holds_all() -> None:
    assert partition([[1.0, 2.0]]) == []
    assert partition([[1.0]], cut_costs=[]) == []


def test_no_part_is_empty_even_if_nothing_weighs_anything() -> None:
    cuts = partition([[0.0] * 5] * 3, cut_costs=[1.0, 0.0, 1.0, 0.0])
    assert cuts == [2, 4]


def test_more_parts_than_items_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot split 2 items into 3 parts"):
        partition([[1.0, 2.0]] * 3)


@pytest.mark.nightly
def test_a_thousand_items_on_64_parts_take_seconds_at_most() -> None:
    numbers = random.Random(0)
    row = [numbers.random() for _ in range(1000)]
    start = time.process_time()
    cuts = partition([row] * 64, cut_costs=[1.0] * 999)
    assert time.process_time() - start < 10
    # within the slack of the best: with less, 64 parts would not do
    assert greedy_parts(row, largest([row] * 64, cuts) / 1.020001) > 64


def greedy_parts(row: Sequence[float], limit: float) -> int:
    """Return how few parts of at most `limit` hold the row."""
    parts, load = 1, 0.0
    for weight in row:
        if load + weight > limit:
            parts, load = parts + 1, 0.0
        load += weight
    return parts
