"""One step of many copies: messages by place, sums that hide, updates."""

from __future__ import annotations

from dataclasses import replace

import pytest
from schedule_support import chain_of

from gemsc.costs.collectives import BUCKET_BYTES
from gemsc.costs.hardware import Hardware, LinkSpeed, read_hardware
from gemsc.planner.ending import (
    PACKING,
    UPDATE,
    Held,
    StageSum,
    gradient_sums,
    times_of_sums,
)
from gemsc.schedules import (
    SCHEDULES,
    Edge,
    StageCost,
    Task,
    place,
    run,
    split_last_backwards,
)
from gemsc.simulate.scaling import Simulator

MIB = 2**20
MACHINE = read_hardware("v100")


def machine(
    per_node: int = 4, nic_ranks: int = 4, inter: float = 1e9, intra: float = 1e12
) -> Hardware:
    network = replace(
        MACHINE.network,
        ranks_per_node=per_node,
        nic_ranks=nic_ranks,
        intra=LinkSpeed(latency=0.0, bandwidth=intra),
        inter=LinkSpeed(latency=0.0, bandwidth=inter),
    )
    return replace(MACHINE, network=network)


def simulator(
    where: Hardware,
    num_stages: int = 4,
    micro_batches: int = 8,
    schedule: str = "1f1b",
    gradient_bytes: int = MIB,
    num_bytes: int = 0,
) -> Simulator:
    chosen = SCHEDULES[schedule]
    counts = (micro_batches // chosen.num_replicas,) * chosen.num_replicas
    stages = (StageCost(0.01, 0.02, 0.01),) * num_stages
    edges = tuple(Edge(s, s + 1, num_bytes=num_bytes) for s in range(num_stages - 1))
    rows = place(chosen.placement, num_stages, num_stages, chosen.num_replicas)
    task = Task(stages, edges, rows, counts)
    places = [
        tuple(sorted({row[stage] for row in rows})) for stage in range(num_stages)
    ]
    held = [[(ranks, gradient_bytes)] for ranks in places]
    return Simulator(task, chosen.policy, where, held, samples=micro_batches)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "basic", "zb-h1"])
def test_one_copy_takes_the_time_of_its_schedule_and_the_update(schedule: str) -> None:
    one = simulator(machine(), schedule=schedule)
    point = one.point(1)
    update = UPDATE * MIB / MACHINE.device.memory_bandwidth
    played = split_last_backwards(one.task, run(one.task, one.policy))
    makespan = played.makespan
    assert point.step_seconds == pytest.approx(makespan + update)
    assert point.sum_seconds == 0.0
    assert point.algorithms == ()


def test_a_mirrored_copy_sums_over_its_own_two_replicas() -> None:
    point = simulator(machine(), schedule="mast", micro_batches=2).point(1)
    assert point.sum_seconds > 0
    assert point.algorithms


def test_parts_add_up_and_efficiency_compares_copies() -> None:
    many = simulator(machine(), gradient_bytes=400 * MIB)
    one, eight = many.point(1), many.point(8)
    assert eight.ranks == 32
    assert eight.nodes == 8
    assert eight.samples == 8 * one.samples
    assert one.efficiency(one) == 1.0
    wanted = one.step_seconds / eight.step_seconds
    assert eight.efficiency(one) == pytest.approx(wanted)
    assert 0 < wanted < 1


def test_sums_hide_behind_what_a_rank_still_computes() -> None:
    """The last stage is done first; the first one's sum is what nothing hides."""
    one = simulator(machine(), gradient_bytes=MIB)
    last = one.point(4)
    sums = one._sums(4)
    packing = PACKING * MIB / MACHINE.device.memory_bandwidth
    assert last.sum_seconds == pytest.approx(sums[0].seconds + packing)
    makespan = one.timeline(4).makespan
    update = last.update_seconds
    assert last.step_seconds == pytest.approx(makespan + last.sum_seconds + update)


def test_messages_between_nodes_take_longer_than_inside() -> None:
    near = simulator(machine(per_node=4), num_bytes=4 * MIB).point(1)
    far = simulator(machine(per_node=1), num_bytes=4 * MIB).point(1)
    assert far.step_seconds > near.step_seconds


def test_copies_that_lie_across_nodes_are_simulated_as_such() -> None:
    """Three ranks on nodes of four: the second copy crosses, the first does not."""
    where = simulator(machine(), num_stages=3, num_bytes=20 * MIB)
    inside, crossing = where._edges(2)
    assert inside[0].seconds == pytest.approx(20 * MIB / 1e12)
    assert crossing[0].seconds == pytest.approx(20 * MIB / 1e9)
    assert where.point(2).step_seconds > where.point(1).step_seconds


def test_messages_of_ranks_that_share_an_interface_share_its_bandwidth() -> None:
    def first_edge(nic_ranks: int) -> float:
        task = Task(
            (StageCost(1.0, 2.0),) * 4,
            (Edge(0, 2, num_bytes=MIB), Edge(1, 3, num_bytes=MIB)),
            ((0, 1, 2, 3),),
            (1,),
        )
        policy = SCHEDULES["gpipe"].policy
        where = machine(per_node=2, nic_ranks=nic_ranks)
        ((edge, _),) = Simulator(task, policy, where, [[((0,), 0)]] * 4, 1)._edges(1)
        return edge.seconds

    assert first_edge(2) == pytest.approx(2 * first_edge(1))


def test_a_rank_sums_what_all_hold_and_then_its_part_at_full_speed() -> None:
    network = machine(per_node=2, nic_ranks=2).network
    whole, none = ((0, 1), 8 * MIB), ((), 0)
    parts = [((rank,), 8 * MIB) for rank in (0, 1)]

    def seconds(*held: Held) -> float:
        (sums,) = gradient_sums(network, [held], num_ranks=2, copies=4)
        return sums.seconds

    alone = seconds(whole) + seconds(none, *parts)
    assert seconds(whole, *parts) == pytest.approx(alone)
    assert seconds(none, *parts) > 1.9 * seconds(none, parts[0])  # on one interface


@pytest.mark.parametrize("seconds", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("count", [1, 4])
def test_sums_hide_behind_their_backward_but_for_a_bucket(
    seconds: float, count: int
) -> None:
    stage = StageCost(1.0, 2.0)
    task = chain_of((stage,), (1,))
    timeline = run(task, SCHEDULES["1f1b"].policy)
    fast = replace(MACHINE.device, memory_bandwidth=1e30)
    sums = [StageSum(seconds, count * BUCKET_BYTES, 0.0, 0.0, frozenset())]
    ((begin, end),) = times_of_sums(task, [timeline], sums, fast).values()
    assert begin == pytest.approx(1.0 + 2.0 / count)
    exposed = max(seconds / count, seconds - 2.0 + 2.0 / count)
    assert end - timeline.makespan == pytest.approx(exposed)
    late = times_of_sums(task, [timeline], sums, fast, early=False)
    assert late == {0: pytest.approx((3.0, 3.0 + seconds))}


@pytest.mark.parametrize("share", [1.0, 0.8])
def test_a_memory_cap_changes_only_what_does_not_fit(share: float) -> None:
    """As in a program, which is scheduled without the cap first."""
    stages = (StageCost(0.01, 0.02, 0.01, saved_bytes=10, gradient_bytes=7),) * 4
    task = chain_of(stages, (8,))
    policy = SCHEDULES["gpipe"].policy
    free = run(task, policy)
    cap = int(max(free.peak_bytes) * share)
    held = [[((rank,), MIB)] for rank in range(4)]
    capped = replace(task, memory_cap=cap)
    timeline = Simulator(capped, policy, machine(), held, 8, defers=False).timeline()
    assert max(timeline.peak_bytes) <= cap
    assert (timeline.orders == free.orders) == (share == 1.0)


def test_two_thousand_ranks_can_be_simulated() -> None:
    wide = simulator(machine(), num_stages=4).point(512)
    deep = simulator(machine(), num_stages=256, micro_batches=16).point(8)
    assert wide.ranks == deep.ranks == 2048
    assert wide.busy_seconds > wide.idle_seconds
    assert deep.idle_seconds > deep.busy_seconds


def test_a_group_of_ranks_counts_all_of_them() -> None:
    one = simulator(machine(per_node=4), num_stages=2)
    pairs = replace(one, groups=((0, 1), (2, 3)))
    assert [simulation.point(2).ranks for simulation in (one, pairs)] == [4, 8]
    assert [simulation.point(2).nodes for simulation in (one, pairs)] == [1, 2]


def test_a_model_without_a_loss_adds_up_nothing() -> None:
    one = simulator(machine(), num_stages=2)
    task = replace(one.task, has_backward=False)
    assert replace(one, task=task).point(2).sum_seconds == 0.0
