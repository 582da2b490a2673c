"""The proof: right schedules pass, and each way to break one is found and named."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from schedule_support import channels_of, equal_task, random_task, reductions_of

from gemsc.errors import InternalError
from gemsc.schedules import SCHEDULES, Action, Edge, Kind, StageCost, Task, run
from gemsc.schedules.check import Channel, Reduction, Report, check

Orders = Sequence[Sequence[Action]]

CHAIN = Task.chain((StageCost(1.0, 2.0),) * 2, (2,))
FINE = (("0F0", "0F1", "0B0", "0B1"), ("1F0", "1B0", "1F1", "1B1"))


def prove(
    orders: Sequence[Sequence[str | Action]],
    task: Task = CHAIN,
    channels: Sequence[Channel] | None = None,
    **options: Any,
) -> Report:
    return check(
        [[a if isinstance(a, Action) else Action.parse(a) for a in o] for o in orders],
        channels_of(task) if channels is None else channels,
        task.placement,
        task.micro_batches,
        **options,
    )


def test_the_report_holds_the_figures() -> None:
    report = prove(FINE, saved_bytes=[10, 7], resident_bytes=[1, 2])
    assert report == Report(
        peak_bytes=(21, 9),
        peak_live=(2, 1),
        num_actions=8,
        num_messages=4,
        num_reductions=0,
    )


# -- actions ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank0", "rank1", "message"),
    [
        ("0F0 0F1 0B0", "1F0 1B0 1F1 1B1", "leaves out an action: 0B1"),
        ("0F0 0F1 0B0 0B1 0B1", "1F0 1B0 1F1 1B1", "an action twice: 0B1"),
        ("0F0 0F1 0B0 0B1 0F2", "1F0 1B0 1F1 1B1", "unknown action: 0F2"),
        ("0F0 0F1 0B0 0B1 0W0", "1F0 1B0 1F1 1B1", "unknown action: 0W0"),
        ("0F0 0F1 0B0 0B1 1F0", "1B0 1F1 1B1", "an action of rank 1: 1F0"),
        ("0F0 0F1 0B0 0B1", "1B0 1F0 1F1 1B1", "stands before its 1F0: 1B0"),
        ("0F0 0F1 0B0 0B1", "1F1 1B1 1F0 1B0", "is of micro-batch 0, but"),
        ("0F0 0F1 0B1 0B0", "1F0 1B0 1F1 1B1", "is of micro-batch 0, but"),
    ],
)
def test_a_broken_order_is_found(rank0: str, rank1: str, message: str) -> None:
    with pytest.raises(InternalError, match=message):
        prove((rank0.split(), rank1.split()))


def test_an_error_names_stage_micro_batch_and_user_lines() -> None:
    orders = (FINE[0], ("1F0", "1B0", "1F1"))
    with pytest.raises(InternalError) as caught:
        prove(orders, user_lines=lambda stage: f"model.py:{10 * stage}")
    assert str(caught.value) == (
        "wrong schedule: rank 1 leaves out an action: "
        "1B1, stage 1 (model.py:10), micro-batch 1"
    )


def test_weight_gradients_come_after_their_backward() -> None:
    task = Task.chain((StageCost(1.0, 2.0, 1.0),), (1,))
    prove([["0F0", "0B0", "0W0"]], task, split_backward=True)
    with pytest.raises(InternalError, match="before its 0B0: 0W0"):
        prove([["0F0", "0W0", "0B0"]], task, split_backward=True)


def test_what_is_handed_over_on_a_rank_must_be_made_first_and_not_yet_freed() -> None:
    together = Task.chain((StageCost(1.0, 2.0),) * 2, (1,), placement=((0, 0),))
    prove([["0F0", "1F0", "1B0", "0B0"]], together)
    for order, message in [
        ("1F0 0F0 1B0 0B0", "before its 0F0: 1F0"),
        ("0F0 1F0 0B0 1B0", "before its 1B0: 0B0"),
    ]:
        with pytest.raises(InternalError, match=message):
            prove([order.split()], together)
    mask = replace(together, edges=(Edge(0, 1, gradient=False),))
    with pytest.raises(InternalError, match="freed by 0B0: 1F0"):
        prove([["0F0", "0B0", "1F0", "1B0"]], mask)


# -- messages --------------------------------------------------------------------------


def test_every_send_has_a_receive_that_agrees_with_it() -> None:
    sent = channels_of(CHAIN)
    for received, message in [
        (sent[1:], "sent and not received: values from stage 0 to 1"),
        ([*sent, replace(sent[0], tag=9)], "received and not sent"),
        ([replace(sent[0], tag=9), sent[1]], "not received"),
        ([replace(sent[0], signature=("y",)), sent[1]], "not received"),
        ([sent[0], sent[0], sent[1]], "received and not sent"),
    ]:
        with pytest.raises(InternalError, match=message):
            prove(FINE, channels=sent, receiving=received)


def test_tags_tell_messages_apart() -> None:
    twice = Task.chain((StageCost(1.0, 2.0),) * 2, (2,), skips=(Edge(0, 1),))
    channels = channels_of(twice)
    prove(FINE, twice)
    with pytest.raises(InternalError, match="one tag twice between ranks 0 and 1"):
        prove(FINE, twice, [replace(channel, tag=5) for channel in channels])
    # One tag for both directions is fine.
    prove(FINE, channels=[replace(channel, tag=5) for channel in channels_of(CHAIN)])


@pytest.mark.parametrize("tag", [-1, 32767])
def test_tags_are_those_that_mpi_guarantees(tag: int) -> None:
    with pytest.raises(InternalError, match="not a legal tag"):
        prove(FINE, channels=[replace(channels_of(CHAIN)[0], tag=tag)])


def test_ranks_that_wait_for_each_other_are_found() -> None:
    # Rank 1 wants stage 1 of both micro-batches before it gives back the first one's
    # gradients; rank 0 wants those before it goes on.
    with pytest.raises(InternalError, match=r"wait for each other .*0B0.*1B0"):
        prove((("0F0", "0B0", "0F1", "0B1"), ("1F0", "1F1", "1B0", "1B1")))


def test_two_replicas_that_block_each_other_are_found() -> None:
    task = Task.chain((StageCost(1.0, 2.0),) * 2, (1, 1), placement=((0, 1), (1, 0)))
    prove((("0F0", "0B0", "1F0'", "1B0'"), ("1F0", "1B0", "0F0'", "0B0'")), task)
    with pytest.raises(InternalError, match="wait for each other"):
        prove((("1F0'", "1B0'", "0F0", "0B0"), ("1F0", "1B0", "0F0'", "0B0'")), task)


def test_a_backward_that_waits_for_what_was_sent_can_block() -> None:
    # Stage 0 sends a mask to stage 1. 0B1 waits until the second one has left, so until
    # its receive is posted, which 1F0 does; that stands behind 3F0, and so waits for
    # 2F0, which stands behind 0B1.
    edges = (Edge(0, 1, gradient=False), Edge(2, 3))
    task = Task((StageCost(1.0, 2.0),) * 4, edges, ((0, 1, 0, 1),), (1,))
    prove((["0F0", "2F0", "0B0", "2B0"], ["3F0", "1F0", "3B0", "1B0"]), task)
    task = replace(task, micro_batches=(2,))
    with pytest.raises(InternalError, match="wait for each other"):
        prove(
            (
                ["0F0", "0F1", "0B0", "0B1", "2F0", "2F1", "2B0", "2B1"],
                ["3F0", "1F0", "3F1", "1F1", "3B0", "1B0", "3B1", "1B1"],
            ),
            task,
        )


# -- memory and reductions -------------------------------------------------------------


def test_a_rank_over_its_memory_is_found() -> None:
    prove(FINE, saved_bytes=[10, 7], memory_cap=20)
    with pytest.raises(InternalError, match="rank 0 holds 20 of 19 bytes: 0F1"):
        prove(FINE, saved_bytes=[10, 7], memory_cap=19)


TIED = Reduction("embedding", frozenset({0, 1}), ((0, 0), (0, 1)))


@pytest.mark.parametrize(
    ("issued", "message"),
    [
        ([[("embedding", 4)], []], "rank 1 reduces 'embedding' 0 times"),
        ([[("embedding", 4)] * 2, [("embedding", 4)]], "rank 0 reduces .* 2 times"),
        ([[("embedding", 4)], [("embedding", 3)]], "reduced before an action: 1B1"),
        ([[("embedding", 4)], [("head", 4)]], "unknown 'head'"),
    ],
)
def test_each_gradient_is_reduced_once_after_the_last_backward(
    issued: list[list[tuple[str, int]]], message: str
) -> None:
    assert prove(FINE, reductions=[TIED]).num_reductions == 1
    with pytest.raises(InternalError, match=message):
        prove(FINE, reductions=[TIED], issued=issued)


def test_a_group_is_reduced_on_the_ranks_that_hold_it() -> None:
    with pytest.raises(InternalError, match=r"on ranks \[0, 1\] and reduced on \[0\]"):
        prove(FINE, reductions=[replace(TIED, ranks=frozenset({0}))])
    with pytest.raises(InternalError, match="two reductions"):
        prove(FINE, reductions=[TIED, TIED])


def test_ranks_reduce_their_groups_in_one_order() -> None:
    head = replace(TIED, group="head")
    with pytest.raises(InternalError, match="wait for each other"):
        prove(
            FINE,
            reductions=[TIED, head],
            issued=[
                [("embedding", 4), ("head", 4)],
                [("head", 4), ("embedding", 4)],
            ],
        )


# -- mutations -------------------------------------------------------------------------


def mutate(orders: Orders, rng: random.Random) -> tuple[str, list[list[Action]]]:
    """Break a schedule in one way that must be wrong; return how."""
    broken = [list(order) for order in orders]
    order = rng.choice(broken)
    # Weight gradients of different micro-batches may trade places.
    at = rng.choice([i for i, a in enumerate(order) if a.kind is not Kind.WEIGHT])
    how = rng.choice(["drop", "duplicate", "late forward", "early micro-batch", "move"])
    if how == "drop":
        del order[at]
    elif how == "duplicate":
        order.insert(rng.randrange(len(order)), order[at])
    elif how == "late forward":
        forward = next(a for a in order if a.kind is Kind.FORWARD)
        backward = replace(forward, kind=Kind.BACKWARD)
        order.remove(forward)
        order.insert(order.index(backward) + 1, forward)
    elif how == "early micro-batch":
        key = order[at]
        same = [
            i
            for i, a in enumerate(order)
            if (a.kind, a.stage, a.replica) == (key.kind, key.stage, key.replica)
        ]
        first, second = rng.sample(same, 2)
        order[first], order[second] = order[second], order[first]
    else:
        other = rng.choice([o for o in broken if o is not order])
        other.insert(rng.randrange(len(other) + 1), order.pop(at))
    return how, broken


@pytest.mark.parametrize("name", list(SCHEDULES))
@given(seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_a_schedule_broken_anywhere_is_found(name: str, seed: int) -> None:
    entry = SCHEDULES[name]
    task = equal_task(entry, 3, 6)
    orders = run(task, entry.policy).orders
    options: dict[str, Any] = {"split_backward": entry.policy.split_backward}
    prove(orders, task, reductions=reductions_of(task), **options)
    how, broken = mutate(orders, random.Random(seed))
    note(how)
    with pytest.raises(InternalError, match="wrong schedule"):
        prove(broken, task, **options)


@pytest.mark.parametrize("name", list(SCHEDULES))
@given(seed=st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_any_order_that_passes_can_run(name: str, seed: int) -> None:
    """Swap neighbours at random: what the proof lets pass must run to its end."""
    entry = SCHEDULES[name]
    rng = random.Random(seed)
    task = random_task(entry, seed)
    orders = [list(order) for order in run(task, entry.policy).orders]
    for order in orders:
        for _ in range(rng.randint(0, 2)):
            at = rng.randrange(max(1, len(order) - 1))
            order[at : at + 2] = reversed(order[at : at + 2])
    try:
        prove(orders, task, split_backward=entry.policy.split_backward)
    except InternalError:
        return
    assert runs_to_its_end(task, orders)


def runs_to_its_end(task: Task, orders: Orders) -> bool:
    """Play the orders with blocking messages in mailboxes; independent of the proof."""
    done: set[Action] = set()
    position = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while (
                position[rank] < len(order)
                and needs(task, order[position[rank]]) <= done
            ):
                done.add(order[position[rank]])
                position[rank] += 1
                moved = True
    return all(p == len(order) for p, order in zip(position, orders, strict=True))


def needs(task: Task, action: Action) -> set[Action]:
    if action.kind is Kind.FORWARD:
        return {replace(action, stage=e.source) for e in task.inputs[action.stage]}
    if action.kind is Kind.WEIGHT:
        return {replace(action, kind=Kind.BACKWARD)}
    wanted = {replace(action, kind=Kind.FORWARD)}
    gradients = (e.dest for e in task.outputs[action.stage] if e.gradient)
    return wanted | {replace(action, stage=stage) for stage in gradients}
