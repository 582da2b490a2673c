"""What skips something in a DAG of stages, and what is side by side."""

from __future__ import annotations

from gemsc.schedules.paths import beside, skipping

# 0 -> 1 -> 2 -> 5 is one way, 0 -> 3 -> 4 -> 5 the other
FORK = [(0, 1), (1, 2), (2, 5), (0, 3), (3, 4), (4, 5)]


def test_what_a_tower_sends_to_its_join_is_no_skip() -> None:
    assert skipping(FORK) == set()


def test_an_edge_beside_a_longer_path_is_a_skip() -> None:
    assert skipping([*FORK, (1, 5), (0, 2), (0, 5), (5, 1)]) == {(1, 5), (0, 2), (0, 5)}


def test_stages_are_side_by_side_if_no_path_leads_from_one_to_the_other() -> None:
    assert beside(1, 6, FORK) == [3, 4]
    assert beside(4, 6, FORK) == [1, 2]
    assert beside(0, 6, FORK) == beside(5, 6, FORK) == []
