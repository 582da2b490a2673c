"""Sums over ranks: the published formulas on equal links, and shared interfaces."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from gemsc.costs.collectives import BUCKET_BYTES, ROUNDS, allreduce, sum_seconds
from gemsc.costs.hardware import Allreduce, LinkSpeed, Network
from gemsc.runtime.worker import reduction

LATENCY, BANDWIDTH, ADDING = 3e-6, 2e9, 5e9
LINK = LinkSpeed(latency=LATENCY, bandwidth=BANDWIDTH)
MIB = 2**20


def network(algorithm: str, per_node: int = 4096, **changes: object) -> Network:
    sums = Allreduce(algorithm=algorithm, reduce_bandwidth=ADDING)
    flat = Network(ranks_per_node=per_node, intra=LINK, inter=LINK, allreduce=sums)
    return replace(flat, **changes)


def seconds(where: Network, groups: list[list[int]], size: int = MIB) -> list[float]:
    return [s.seconds for s in allreduce(where, groups, [size] * len(groups))]


def published(name: str, p: int, n: float) -> float:
    """The formulas of the papers that the module names."""
    a, b, g = LATENCY, 1 / BANDWIDTH, 1 / ADDING
    part = (p - 1) / p * n
    rounds = math.ceil(math.log2(p))
    if name == "ring":
        return 2 * (p - 1) * a + 2 * part * b + part * g
    if name == "tree":
        return 2 * rounds * (a + n * b) + rounds * n * g
    return 2 * rounds * a + 2 * part * b + part * g


@pytest.mark.parametrize("size", [2, 4, 8, 64, 1024])
@pytest.mark.parametrize("name", ROUNDS)
def test_equal_links_give_the_published_formula(name: str, size: int) -> None:
    (total,) = seconds(network(name), [list(range(size))])
    assert total == pytest.approx(published(name, size, MIB), rel=1e-9)


@pytest.mark.parametrize("size", [3, 5, 6, 7, 100])
@pytest.mark.parametrize("name", ["ring", "tree"])
def test_any_number_of_ranks_can_sum(name: str, size: int) -> None:
    (total,) = seconds(network(name), [list(range(size))])
    assert total == pytest.approx(published(name, size, MIB), rel=1e-9)


def test_halving_lets_extra_ranks_hand_over_first() -> None:
    (total,) = seconds(network("halving-doubling"), [list(range(5))])
    extra = 2 * (LATENCY + MIB / BANDWIDTH) + MIB / ADDING
    wanted = published("halving-doubling", 4, MIB) + extra
    assert total == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("size", [2, 3, 4, 6, 8, 13])
@pytest.mark.parametrize("name", ROUNDS)
def test_the_rounds_really_sum(name: str, size: int) -> None:
    """Play them on sets: who has added up whose part of the buffer."""
    whole = frozenset(range(size))
    known = [frozenset({rank}) for rank in range(size)]
    for step in ROUNDS[name](size):
        for _ in range(step.repeats):
            before = list(known)
            for sender, receiver in step.pairs:
                known[receiver] = known[receiver] | before[sender]
    assert known == [whole] * size


def test_auto_takes_the_fastest_for_the_size() -> None:
    ranks = [list(range(24))]
    small, large = (allreduce(network("auto"), ranks, [n])[0] for n in (64, 32 * MIB))
    assert small.algorithm != "ring"
    assert large.algorithm == "ring"
    for name in ROUNDS:
        assert large.seconds <= seconds(network(name), ranks, 32 * MIB)[0]


def test_buckets_are_summed_one_after_the_other() -> None:
    one, three = (
        seconds(network("ring"), [list(range(8))], count * BUCKET_BYTES)[0]
        for count in (1, 3)
    )
    assert three == pytest.approx(3 * one)
    assert BUCKET_BYTES == reduction.BUCKET_BYTES


def test_groups_that_leave_a_node_together_share_its_interface() -> None:
    fast = LinkSpeed(latency=0.0, bandwidth=1e15)
    where = network("ring", 4, intra=fast, nic_ranks=4)
    groups = [[stage + 4 * copy for copy in range(8)] for stage in range(4)]
    alone = seconds(where, groups[:1], 8 * MIB)[0]
    shared = seconds(where, groups, 8 * MIB)
    moved = 2 * 7 / 8 * 8 * MIB / BANDWIDTH
    assert shared[0] - alone == pytest.approx(3 * moved)
    apart = replace(where, nic_ranks=1)
    assert seconds(apart, groups, 8 * MIB)[0] == pytest.approx(alone)


def test_a_group_inside_a_node_never_touches_the_interface() -> None:
    slow = LinkSpeed(latency=1.0, bandwidth=1.0)
    assert seconds(network("auto", 8, inter=slow), [[8, 9, 10, 11]])[0] < 1.0
    assert seconds(network("auto", 8, inter=slow), [[6, 7, 8, 9]])[0] > 1.0


def test_interfaces_are_numbered_over_all_nodes() -> None:
    where = network("ring", 4, nic_ranks=2)
    assert [where.interface(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    uneven = network("ring", 3, nic_ranks=2)
    assert [uneven.interface(rank) for rank in range(6)] == [0, 0, 1, 2, 2, 3]


def test_a_sum_inside_a_stage_doubles_if_small_and_goes_in_parts_if_large() -> None:
    ranks, where = list(range(8)), network("auto")
    small = 3 * (LATENCY + 64 / BANDWIDTH + 64 / ADDING)
    assert sum_seconds(where, ranks, 64) == pytest.approx(small, rel=1e-9)
    large = published("halving-doubling", 8, 8 * MIB)
    assert sum_seconds(where, ranks, 8 * MIB) == pytest.approx(large, rel=1e-9)
    assert sum_seconds(where, ranks[:1], MIB) == 0.0
