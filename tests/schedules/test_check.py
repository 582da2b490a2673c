"""The proof: right schedules pass, and each way to break one is found and named."""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from schedule_support import (
    chain_of,
    equal_task,
    in_order,
    random_task,
    ranks_of,
    shared_by,
)

from gemsc.base.parts import Part
from gemsc.errors import InternalError
from gemsc.schedules import SCHEDULES, Action, Edge, Kind, StageCost, Task, run
from gemsc.schedules.check import prove
from gemsc.schedules.rank_step import (
    AllReduce,
    End,
    GridCall,
    MessageEnd,
    RankStep,
    StageRun,
    Step,
    Turn,
)

Orders = Sequence[Sequence[Action]]
Damage = Callable[[list[RankStep]], None]

CHAIN = chain_of((StageCost(1.0, 2.0, saved_bytes=0),) * 2, (2,))
FINE = (("0F0", "0F1", "0B0", "0B1"), ("1F0", "1B0", "1F1", "1B1"))


def proved(
    orders: Sequence[Sequence[str | Action]],
    task: Task = CHAIN,
    damage: Damage = lambda ranks: None,
    **options: Any,
) -> None:
    parsed = [
        [a if isinstance(a, Action) else Action.parse(a) for a in o] for o in orders
    ]
    ranks = ranks_of(task, parsed)
    damage(ranks)
    prove(ranks, task, ordered=False, **options)


def change(rank: int, kind: str, stage: int, **parts: Any) -> Damage:
    """Return what replaces parts of what a rank does in one kind of action."""

    def damage(ranks: list[RankStep]) -> None:
        key = Kind(kind), 0, stage
        runs = {**ranks[rank].runs, key: replace(ranks[rank].runs[key], **parts)}
        ranks[rank] = replace(ranks[rank], runs=runs)

    return damage


def end_with(*ends: Sequence[Step]) -> Damage:
    """Return what replaces all that ranks do after their actions."""

    def damage(ranks: list[RankStep]) -> None:
        for number, steps in enumerate(ends):
            actions = ranks[number].actions
            ranks[number] = replace(ranks[number], steps=(*actions, *steps))

    return damage


# -- actions ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank0", "rank1", "message"),
    [
        ("0F0 0F1 0B0", "1F0 1B0 1F1 1B1", "leaves out an action: 0B1"),
        ("0F0 0F1 0B0 0B1 0B1", "1F0 1B0 1F1 1B1", "an action twice: 0B1"),
        ("0F0 0F1 0B0 0B1 0F2", "1F0 1B0 1F1 1B1", "unknown action: 0F2"),
        ("0F0 0F1 0B0 0B1 1F0", "1B0 1F1 1B1", "an action of rank 1: 1F0"),
        ("0F0 0F1 0B0 0B1", "1B0 1F0 1F1 1B1", "before its 1F0: 1B0"),
        ("0F0 0F1 0B0 0B1", "1F1 1B1 1F0 1B0", "uses in another micro-batch what"),
        ("0F0 0F1 0B1 0B0", "1F0 1B0 1F1 1B1", "uses in another micro-batch what"),
    ],
)
def test_a_broken_order_is_found(rank0: str, rank1: str, message: str) -> None:
    with pytest.raises(InternalError, match=message):
        proved((rank0.split(), rank1.split()))


def test_an_error_names_stage_micro_batch_and_user_lines() -> None:
    orders = (FINE[0], ("1F0", "1B0", "1F1"))
    with pytest.raises(InternalError) as caught:
        proved(orders, damage=change(1, "F", 1, lines="model.py:10"))
    assert str(caught.value) == (
        "wrong program: rank 1 leaves out an action: "
        "1B1, stage 1 (model.py:10), micro-batch 1"
    )


def test_weight_gradients_come_after_their_backward() -> None:
    task = chain_of((StageCost(1.0, 2.0, 1.0),), (1,))
    proved([["0F0", "0B0", "0W0"]], task)
    with pytest.raises(InternalError, match="before its 0B0: 0W0"):
        proved([["0F0", "0W0", "0B0"]], task)


def test_weight_gradients_are_computed_where_a_backward_deferred_them() -> None:
    def deferred(*actions: str) -> Damage:
        def damage(ranks: list[RankStep]) -> None:
            parsed = frozenset(map(Action.parse, actions))
            ranks[0] = replace(ranks[0], deferred=parsed)

        return damage

    split = ((*FINE[0], "0W1"), FINE[1])
    proved(split, damage=deferred("0W1"))
    with pytest.raises(InternalError, match="rank 0 has an unknown action: 0W1"):
        proved(split, damage=deferred())
    with pytest.raises(InternalError, match="rank 0 leaves out an action: 0W0"):
        proved(split, damage=deferred("0W0", "0W1"))


def test_what_is_handed_over_on_a_rank_must_be_made_first_and_not_yet_freed() -> None:
    task = chain_of((StageCost(1.0, 2.0),) * 2, (1,), placement=((0, 0),))
    proved([["0F0", "1F0", "1B0", "0B0"]], task)
    for order, message in [
        ("1F0 0F0 1B0 0B0", "uses a value before 0F0 computes it, x, tag 0: 1F0"),
        ("0F0 1F0 0B0 1B0", "uses a value before 1B0 computes it, x, tag 1: 0B0"),
    ]:
        with pytest.raises(InternalError, match=message):
            proved([order.split()], task)
    mask = replace(task, edges=(Edge(0, 1, gradient=False),))
    with pytest.raises(
        InternalError, match="a value that 0B0 has freed, x, tag 0: 1F0"
    ):
        proved([["0F0", "0B0", "1F0", "1B0"]], mask)


# -- messages --------------------------------------------------------------------------

X = MessageEnd(1, 0, ("x",))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change(0, "F", 0, sends=()), "rank 1 receives what rank 0 does not send"),
        (change(1, "F", 1, receives=()), "rank 0 sends what rank 1 does not receive"),
        (
            change(0, "F", 0, sends=(X, X)),
            "uses in another micro-batch what rank 0 sends",
        ),
        (change(0, "F", 0, sends=(replace(X, tag=9),)), "not send, x, tag 0: 1F0"),
        (change(0, "F", 0, sends=(replace(X, peer=0),)), "not receive, x, tag 0: 0F0"),
        (change(0, "F", 0, sends=(replace(X, values=("y",)),)), "rank 1 receives x"),
        (change(0, "B", 0, receives=()), "what rank 0 does not receive, x, tag 1: 1B0"),
    ],
)
def test_every_send_has_a_receive_that_agrees_with_it(
    damage: Damage, message: str
) -> None:
    with pytest.raises(InternalError, match=message):
        proved(FINE, damage=damage)


def test_tags_tell_messages_apart() -> None:
    twice = chain_of((StageCost(1.0, 2.0),) * 2, (2,), skips=(Edge(0, 1),))
    proved(FINE, twice)
    both = X, replace(X, values=("y",))

    def one_tag(ranks: list[RankStep]) -> None:
        change(0, "F", 0, sends=both)(ranks)
        change(1, "F", 1, receives=tuple(replace(x, peer=0) for x in both))(ranks)

    with pytest.raises(InternalError, match="one tag twice between ranks 0 and 1"):
        proved(FINE, twice, one_tag)
    both = X, X  # of one action
    with pytest.raises(InternalError, match="one tag twice between ranks 0 and 1"):
        proved(FINE, twice, one_tag)
    of_tiles = GridCall("redistribute", (0, 1), (X,))
    with pytest.raises(InternalError, match="one tag twice between ranks 0 and 1"):
        proved(FINE, damage=change(0, "F", 0, calls=(of_tiles,)))


def test_tags_tell_the_messages_of_two_stages_apart() -> None:
    edges = Edge(0, 1), Edge(2, 3)
    task = Task((StageCost(1.0, 2.0),) * 4, edges, ((0, 1, 0, 1),), (1,))
    orders = ["0F0", "2F0", "0B0", "2B0"], ["1F0", "3F0", "1B0", "3B0"]

    def one_tag(ranks: list[RankStep]) -> None:
        change(0, "F", 2, sends=ranks[0].run(Action.parse("0F0")).sends)(ranks)
        change(1, "F", 3, receives=ranks[1].run(Action.parse("1F0")).receives)(ranks)

    proved(orders, task)
    with pytest.raises(InternalError, match=r"one tag twice between .*: 2F0"):
        proved(orders, task, one_tag)


@pytest.mark.parametrize("tag", [-1, 32767])
def test_tags_are_those_that_mpi_guarantees(tag: int) -> None:
    def damage(ranks: list[RankStep]) -> None:
        change(0, "F", 0, sends=(replace(X, tag=tag),))(ranks)
        change(1, "F", 1, receives=(replace(X, tag=tag, peer=0),))(ranks)

    with pytest.raises(InternalError, match="not a legal tag"):
        proved(FINE, damage=damage)


def test_ranks_that_wait_for_each_other_are_found() -> None:
    # Rank 1 wants stage 1 of both micro-batches before it gives back the first one's
    # gradients; rank 0 wants those before it goes on.
    with pytest.raises(InternalError, match=r"wait for each other .*0B0.*1B0"):
        proved((("0F0", "0B0", "0F1", "0B1"), ("1F0", "1F1", "1B0", "1B1")))


def test_two_replicas_that_block_each_other_are_found() -> None:
    task = chain_of((StageCost(1.0, 2.0),) * 2, (1, 1), placement=((0, 1), (1, 0)))
    shared = shared_by(task)
    other = ("1F0", "1B0", "0F0'", "0B0'")
    proved((("0F0", "0B0", "1F0'", "1B0'"), other), task, shared=shared)
    with pytest.raises(InternalError, match="wait for each other"):
        proved((("1F0'", "1B0'", "0F0", "0B0"), other), task, shared=shared)


def test_a_backward_that_waits_for_what_was_sent_can_block() -> None:
    # Stage 0 sends a mask to stage 1. 0B1 waits until the second one has left, so until
    # its receive is posted, which 1F0 does; that stands behind 3F0, and so waits for
    # 2F0, which stands behind 0B1.
    edges = (Edge(0, 1, gradient=False), Edge(2, 3))
    task = Task((StageCost(1.0, 2.0),) * 4, edges, ((0, 1, 0, 1),), (1,))
    proved((["0F0", "2F0", "0B0", "2B0"], ["3F0", "1F0", "3B0", "1B0"]), task)
    task = replace(task, micro_batches=(2,))
    with pytest.raises(InternalError, match="wait for each other"):
        proved(
            (
                ["0F0", "0F1", "0B0", "0B1", "2F0", "2F1", "2B0", "2B1"],
                ["3F0", "1F0", "3F1", "1F1", "3B0", "1B0", "3B1", "1B1"],
            ),
            task,
        )


def test_a_receive_is_posted_before_its_action_begins() -> None:
    """2F1 comes after 3F0, which waits for 0B1: that waits until 0F1's value left."""
    edges = Edge(0, 2, gradient=False), Edge(1, 3, gradient=False)
    task = Task((StageCost(1.0, 2.0),) * 4, edges, ((0, 0, 1, 1),), (2,))
    first = ["0F0", "0F1", "0B0", "0B1", "1F0", "1F1", "1B0", "1B1"]
    others = ["2F1", "3F1", "2B0", "2B1", "3B0", "3B1"]
    proved((first, ["2F0", "3F0", *others]), task)
    with pytest.raises(InternalError, match="wait for each other"):
        proved((first, ["3F0", "2F0", *others]), task)


# -- tiles -----------------------------------------------------------------------------

ALL = GridCall("batch_norm", (0, 1), line="model.py:7")
UP = GridCall("redistribute", (0, 1), (MessageEnd(1, 9, ("[0:1]",)),))
DOWN = replace(UP, sends=(), receives=(MessageEnd(1, 9, ("[0:1]",)),))


def tiles(*calls: Sequence[GridCall], placed: Sequence[Mapping[str, int]] = ()) -> None:
    """Prove one stage whose tiles, each on a rank, make these calls."""
    task = chain_of((StageCost(1.0, 2.0),), (1,))
    (rank,) = ranks_of(
        task, [[Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)]]
    )
    ranks, everyone = [], tuple(range(len(calls)))
    for number, made in enumerate(calls):
        runs = {**rank.runs, (Kind.FORWARD, 0, 0): StageRun(calls=tuple(made))}
        sums = AllReduce("stage0", everyone), *ENDS
        steps = (*rank.actions, *sums)
        places = placed[number] if placed else {}
        ranks.append(RankStep(number, runs, steps, everyone, placed=places))
    prove(ranks, task, groups=[everyone], shared=shared_by(task), ordered=False)


def test_tiles_make_the_same_calls_in_the_same_order() -> None:
    down = replace(DOWN, receives=(MessageEnd(0, 9, ("[0:1]",)),))
    tiles([ALL, UP], [ALL, down])
    alone = replace(ALL, ranks=(1,))
    for second, message in [
        ([ALL], "rank 1 does nothing where the tile on rank 0 does redistribute: 0F0"),
        ([down, ALL], r"rank 1 does redistribute where .* batch_norm \(model.py:7\)"),
        ([alone, down], r"rank 1 does redistribute where .* batch_norm \(model.py:7\)"),
        (
            [replace(ALL, ranks=(1, 0)), down],
            r"ranks \(0, 1\), rank 1 with others: 0F0",
        ),
        ([ALL, replace(down, receives=())], "the tile on rank 1 receives nothing"),
        ([ALL, UP], r"rank 1 sends \[0:1\] with tag 9|rank 1 receives nothing"),
        (
            [ALL, replace(down, receives=(MessageEnd(0, 9, ("[0:2]",)),))],
            r"sends \[0:1\] with tag 9, and the tile on rank 1 receives \[0:2\]",
        ),
    ]:
        with pytest.raises(InternalError, match=message):
            tiles([ALL, UP], second)


def test_tiles_do_the_same_actions_in_the_same_order() -> None:
    task = chain_of((StageCost(1.0, 2.0, 1.0),), (2,))

    def of_tiles(second: str, **parts: Any) -> None:
        orders = "0F0 0F1 0B0 0B1 0W0 0W1", second
        ranks = [
            replace(step, rank=number, tiles=(0, 1))
            for number, order in enumerate(orders)
            for step in ranks_of(task, [list(map(Action.parse, order.split()))])
        ]
        ranks[1] = replace(ranks[1], **parts)
        prove(ranks, task, groups=[(0, 1)], sums=False, ordered=False)

    of_tiles("0F0 0F1 0B0 0B1 0W0 0W1")
    message = "rank 1 does 0F1 where the tile on rank 0 does an action: 0F0"
    with pytest.raises(InternalError, match=message):
        of_tiles("0F1 0F0 0B0 0B1 0W0 0W1")
    with pytest.raises(InternalError, match="rank 1 computes weight gradients twice"):
        of_tiles("0F0 0F1 0B0 0B1 0W0 0W1", deferred=frozenset([Action.parse("0W0")]))
    with pytest.raises(InternalError, match=r"is a tile of ranks \(0, 1\), not of"):
        of_tiles("0F0 0F1 0B0 0B1 0W0 0W1", tiles=(1,))


def test_calls_of_some_tiles_wait_for_these_alone() -> None:
    first, second, third = (replace(ALL, ranks=r) for r in ((0, 1), (1, 2), (0, 2)))
    tiles([first, third], [first, second], [second, third])
    with pytest.raises(InternalError, match="rank 1 with others: 0F0"):
        tiles([first, third], [second, first], [third, second])  # round in a circle
    with pytest.raises(InternalError, match="rank 2 does nothing where the tile"):
        tiles([first, third], [first, second], [third])


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ((), "rank 0 does batch_norm .* with others"),
        ((1,), "rank 1 does nothing where the tile on rank 0 does batch_norm"),
    ],
)
def test_a_call_of_others_alone_is_found(ranks: tuple[int, ...], message: str) -> None:
    with pytest.raises(InternalError, match=message):
        tiles([replace(ALL, ranks=ranks)], [])


@pytest.mark.parametrize(
    ("holders", "is_right"),
    [
        ((1, 1, 1, 1), True),  # one rank of four
        ((0, 0, 2, 2), True),  # one rank of each of two tiles
        ((1, 1, 3, 3), True),
        ((0, 0, 0, 1), False),
        ((0, 1, 2, 3), False),  # it would be alone on no rank
        ((0, 0, 2, 3), False),
        ((0, 2, 2, 2), False),
        ((4, 4, 4, 4), False),
    ],
)
def test_one_rank_of_each_tile_holds_a_branch(
    holders: tuple[int, ...], is_right: bool
) -> None:
    placed = [{"one.b": holder} for holder in holders]
    if is_right:
        tiles([], [], [], [], placed=placed)
        return
    with pytest.raises(InternalError, match="holds branches as"):
        tiles([], [], [], [], placed=placed)


# -- memory and all-reduces ------------------------------------------------------------


def test_a_rank_over_its_memory_is_found() -> None:
    stages = tuple(StageCost(1.0, 2.0, saved_bytes=size) for size in (10, 7))
    task = replace(CHAIN, stages=stages, memory_cap=20)
    proved(FINE, task)
    with pytest.raises(InternalError, match="rank 0 holds 20 of 19 bytes: 0F1"):
        proved(FINE, replace(task, memory_cap=19))


SUM = AllReduce("embedding", (0, 1))
OTHER = AllReduce("head", (0, 1))
ENDS = (End.REDUCED, End.UPDATED)
GOOD = (SUM, *ENDS)


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ((GOOD, ENDS), "rank 1 all-reduces 'embedding' 0 times"),
        (((SUM, *GOOD), GOOD), "rank 0 all-reduces 'embedding' 2 times"),
        (((Action.parse("0B0"), *GOOD), GOOD), "does an action twice"),
        ((GOOD, (OTHER, *GOOD)), "unknown 'head'"),
        ((GOOD, (replace(SUM, ranks=(1,)), *ENDS)), r"1 all-reduces it over \(1,\)"),
        ((GOOD, (*ENDS, SUM)), "rank 1 does not end its step"),
        ((GOOD, (SUM, End.UPDATED)), "does not end its step with the wait for all"),
        ((GOOD, (SUM, End.REDUCED)), "the wait for all-reduces and the update"),
    ],
)
def test_each_gradient_is_reduced_once_after_the_last_backward(
    ends: tuple[Sequence[Step], ...], message: str
) -> None:
    shared = {"embedding": (0, 1)}
    proved(FINE, damage=end_with(GOOD, GOOD), shared=shared)
    with pytest.raises(InternalError, match=message):
        proved(FINE, damage=end_with(*ends), shared=shared)


def test_a_gradient_is_not_reduced_before_it_is_complete() -> None:
    def early(ranks: list[RankStep]) -> None:
        end_with(GOOD, GOOD)(ranks)
        *actions, last = ranks[1].actions
        ranks[1] = replace(ranks[1], steps=(*actions, SUM, last, *ENDS))

    shared = {"embedding": (0, 1)}
    with pytest.raises(InternalError, match=r"starts the all-reduce of .*: 1B1, "):
        proved(FINE, damage=early, shared=shared)


def test_ranks_reduce_their_groups_in_one_order() -> None:
    ends = (SUM, OTHER, *ENDS), (OTHER, SUM, *ENDS)
    shared = {"embedding": (0, 1), "head": (0, 1)}
    proved(FINE, damage=end_with(ends[0], ends[0]), shared=shared)
    with pytest.raises(InternalError, match="wait for each other"):
        proved(FINE, damage=end_with(*ends), shared=shared)


# Two stages, each on two ranks that hold parts of `w`, and a mirrored replica of them.
GRIDS = [(0, 1), (2, 3)]
MIRRORED = chain_of(CHAIN.stages, (1, 1), placement=((0, 1), (1, 0)))
HALVES = [Part((6, 4), dim=0, outer=1, units=3, rows=rows) for rows in ((0, 1), (1, 3))]
TIED = {"stage0": (0,), "stage1": (1,), "tied": (0, 1)}
WEIGHTS = (
    ("w0", "v0", "b0", "tied", "branch0.a.w", "branch0.a.b", "branch0.b.w"),
    ("w1", "b1", "tied", "branch1.w"),
)


def shards(*damages: Damage) -> None:
    """Prove stages whose ranks hold parts of all weights, and biases whole.

    Weights of branches are on one rank of each grid.
    """
    orders = ["0F0", "1F0'", "1B0'", "0B0"], ["1F0", "0F0'", "0B0'", "1B0"]
    of_grids = ranks_of(
        MIRRORED, [[Action.parse(text) for text in order] for order in orders]
    )
    ranks = []
    for grid in of_grids:
        for tile, number in enumerate(GRIDS[grid.rank]):
            runs = {}
            for key, made in grid.runs.items():
                ends = [
                    tuple(replace(e, peer=GRIDS[e.peer][tile]) for e in side)
                    for side in (made.receives, made.sends)
                ]
                runs[key] = StageRun(*ends)
            everyone, alike = (0, 1, 2, 3), (tile, 2 + tile)
            sums = [
                AllReduce(f"stage{stage}{kind}", over)
                for stage in (1, 0)
                for kind, over in ((" parts", alike), ("", everyone))
            ]
            steps = (*grid.actions, *sums, AllReduce("tied", alike), *ENDS)
            here = number, runs, steps, GRIDS[grid.rank]
            parts = {name: HALVES[tile] for name in ("w0", "v0", "w1", "tied")}
            placed = {"branch0.a": 0, "branch0.b": 1, "branch1": 1}
            ranks.append(RankStep(*here, parts=parts, placed=placed))
    for damage in damages:
        damage(ranks)
    prove(ranks, MIRRORED, groups=GRIDS, shared=TIED, weights=WEIGHTS, ordered=False)


def sums_of(number: int, change: Callable[[AllReduce], AllReduce | None]) -> Damage:
    """Return what changes the sums of a rank, or leaves them out."""

    def damage(ranks: list[RankStep]) -> None:
        steps = [
            change(step) if isinstance(step, AllReduce) else step
            for step in ranks[number].steps
        ]
        steps = [step for step in steps if step is not None]
        ranks[number] = replace(ranks[number], steps=tuple(steps))

    return damage


def holds(number: int, **parts: Part) -> Damage:
    def damage(ranks: list[RankStep]) -> None:
        held = {**ranks[number].parts, **parts}
        ranks[number] = replace(ranks[number], parts=held)

    return damage


def test_parts_are_added_up_over_those_who_hold_the_same() -> None:
    shards()
    wide = "'stage1 parts' is on ranks (0, 2), and rank 0 all-reduces it over (0, 1,"
    for damage, message in [
        (lambda s: replace(s, ranks=(0, 1, 2, 3)), wide),
        (lambda s: None if s.group == "stage0" else s, "'stage0' 0 times"),
        (lambda s: None if s.group == "stage0 parts" else s, "parts' 0 times"),
        (lambda s: replace(s, ranks=(0, 2)), "'stage1' is on ranks (0, 1, 2, 3)"),
        (
            lambda s: replace(s, ranks=(0, 3)) if s.group == "tied" else s,
            "'tied' is on ranks (0, 2), and rank 0 all-reduces it over (0, 3)",
        ),
    ]:
        with pytest.raises(InternalError, match=re.escape(message)):
            shards(sums_of(0, damage))


def test_sums_of_stages_begin_with_those_of_the_last() -> None:
    def turned(ranks: list[RankStep]) -> None:
        for number, rank in enumerate(ranks):
            sums = [step for step in rank.steps if isinstance(step, AllReduce)]
            steps = (*rank.actions, *sums[1::-1], *sums[3:1:-1], *sums[4:], *ENDS)
            ranks[number] = replace(rank, steps=steps)

    message = "rank 0 all-reduces 'stage1' before 'stage1 parts'"
    with pytest.raises(InternalError, match=message):
        shards(turned)


def test_parts_make_whole_weights_and_grids_cut_them_alike() -> None:
    thirds = replace(HALVES[0], rows=(0, 2))
    for damage, message in [
        ([holds(0, w0=HALVES[1])], r"(0, 1) hold other parts of 'w0' than all of it"),
        ([holds(0, w0=thirds)], r"(0, 1) hold other parts of 'w0' than all of it"),
        ([holds(0, b0=HALVES[0])], r"(0, 1) hold other parts of 'b0' than all of it"),
        (
            [holds(2, w1=thirds), holds(3, w1=replace(HALVES[1], rows=(2, 3)))],
            r"hold other parts of 'w1' than all of it",
        ),
        (
            [holds(2, w0=HALVES[1]), holds(3, w0=HALVES[0])],
            "'stage0': ranks hold some parts of it alike, and others not",
        ),
    ]:
        with pytest.raises(InternalError, match=message.replace("(0, 1)", r"\(0, 1\)")):
            shards(*damage)


def test_all_tiles_of_a_grid_say_alike_who_holds_a_branch() -> None:
    def places(number: int, **placed: int) -> Damage:
        def damage(ranks: list[RankStep]) -> None:
            changed = {**ranks[number].placed, **placed}
            ranks[number] = replace(ranks[number], placed=changed)

        return damage

    everywhere = "holds branches as"
    for damages, message in [
        ([places(1, branch1=0)], everywhere),
        ([places(number, branch1=2) for number in range(4)], everywhere),
        ([places(0, b0=0)], everywhere),
        ([places(2, branch1=0), places(3, branch1=0)], "'stage1': ranks hold some"),
    ]:
        with pytest.raises(InternalError, match=message):
            shards(*damages)


def test_weights_of_branches_are_added_up_over_those_who_hold_them() -> None:
    """Without any parts: the same sum over the mirrored ranks, and no other."""

    def no_parts(ranks: list[RankStep]) -> None:
        for number, rank in enumerate(ranks):
            steps = tuple(
                replace(step, ranks=(0, 1, 2, 3))
                if isinstance(step, AllReduce) and step.group == "tied"
                else step
                for step in rank.steps
            )
            ranks[number] = replace(rank, steps=steps, parts={})
        for number in (0, 2):  # these have nothing of stage 1 alone
            without(ranks, number)

    def without(ranks: list[RankStep], number: int) -> None:
        drop = sums_of(number, lambda s: None if s.group == "stage1 parts" else s)
        drop(ranks)

    shards(no_parts)
    of_stage = {"stage0 parts": (0, 1, 2, 3), "stage1 parts": (1, 0)}
    for number, group in [(0, "stage0 parts"), (1, "stage1 parts")]:
        for wrong in (of_stage[group], None):

            def change(s: AllReduce, group: str = group, wrong: Any = wrong) -> Any:
                if s.group != group:
                    return s
                return replace(s, ranks=wrong) if wrong else None

            with pytest.raises(InternalError, match=re.escape(f"'{group}'")):
                shards(no_parts, sums_of(number, change))


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


@pytest.mark.slow(5)
@pytest.mark.parametrize("name", list(SCHEDULES))
@given(seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_a_schedule_broken_anywhere_is_found(name: str, seed: int) -> None:
    entry = SCHEDULES[name]
    task = equal_task(entry, 3, 6)
    orders = run(task, entry.policy).orders
    proved(orders, task, shared=shared_by(task))
    how, broken = mutate(orders, random.Random(seed))
    note(how)
    with pytest.raises(InternalError, match="wrong program"):
        proved(broken, task, shared=shared_by(task))


@pytest.mark.by_day(5)
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
        proved(orders, task, shared=shared_by(task))
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


def with_orders(change: Callable[[list[list[Turn]]], object]) -> str:
    """Return what the proof says of two ranks whose orders are changed, "" if nothing.

    Rank 0 sends both values and receives both gradients.
    """
    parsed = [[Action.parse(a) for a in order] for order in FINE]
    ranks = in_order(ranks_of(CHAIN, parsed), CHAIN)
    orders = [list(rank.order) for rank in ranks]
    change(orders)
    pairs = zip(ranks, orders, strict=True)
    try:
        prove([replace(r, order=tuple(o)) for r, o in pairs], CHAIN)
    except InternalError as error:
        return str(error)
    return ""


def give_before_taking(orders: list[list[Turn]]) -> None:
    """Let rank 1 give the first gradient before it receives the second value."""
    assert [bool(turn.sends) for turn in orders[1]] == [False, False, True, True]
    for order in orders:
        order[1], order[2] = order[2], order[1]


NOT_YET = "needs a message of rank {}, tag {}, when it is the turn of {}: {}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda orders: None, ""),
        (give_before_taking, ""),
        (lambda orders: orders[0].pop(), NOT_YET.format(1, 1, "nothing", "0B1")),
        (lambda orders: orders[1].clear(), NOT_YET.format(0, 0, "nothing", "1F0")),
        (
            lambda orders: orders[1].insert(0, orders[1].pop()),
            NOT_YET.format(0, 0, (1, 0, 1), "1F0"),
        ),
        (
            lambda orders: orders[1].append(orders[1][0]),
            "needs the end of its step, when it is the turn of (0, 1, 0): 1B1",
        ),
        (
            lambda orders: orders[1].insert(1, orders[1].pop()),
            "without tags ranks wait for each other (tag 0 of micro-batch 1 from rank "
            "0 to 1 <- tag 1 of micro-batch 0 from rank 1 to 0): 0F1, stage 0",
        ),
    ],
)
def test_orders_of_communication(
    change: Callable[[list[list[Turn]]], object], message: str
) -> None:
    problem = with_orders(change)
    assert message in problem if message else not problem


def test_what_is_sent_first_is_received_first() -> None:
    """Two values to another rank, the second of which it wants first."""
    task = Task(
        (StageCost(1.0, 2.0),) * 3,
        (Edge(0, 1, gradient=False), Edge(0, 2, gradient=False)),
        ((0, 1, 1),),
        (1,),
        has_backward=False,
    )
    ranks = in_order(
        ranks_of(task, [[Action.parse("0F0")], [*map(Action.parse, ("1F0", "2F0"))]]),
        task,
    )
    prove(ranks, task)
    wrong = replace(ranks[0], order=ranks[0].order[::-1])
    with pytest.raises(InternalError, match=r"rank 0 sends tag 2 .* receives tag 0"):
        prove([wrong, ranks[1]], task)


def test_what_tiles_exchange_begins_in_its_turn() -> None:
    task = Task((StageCost(1.0, 2.0),) * 2, (), ((0, 0),), (1,), has_backward=False)
    (rank,) = ranks_of(task, [[Action.parse("0F0"), Action.parse("1F0")]])

    def of_tiles(*stages: int) -> None:
        order = tuple(Turn(collective=(0, stage)) for stage in stages)
        tiles = (replace(rank, rank=n, tiles=(0, 1), order=order) for n in (0, 1))
        prove([*tiles], task, groups=[(0, 1)])

    of_tiles(0, 1)
    exchange = "needs what its tiles exchange, when it is the turn of"
    with pytest.raises(InternalError, match=rf"{exchange} \(0, 1\): 0F0"):
        of_tiles(1, 0)
    with pytest.raises(InternalError, match=f"{exchange} nothing: 1F0"):
        of_tiles(0)
