"""Prove a program before it is written: all is done, all messages match, none blocks.

The proof takes what every rank's file says it does, no times and no policies. It models
what a rank does with it:

    for each action:
        for each message that it needs: post its receive, if that is not posted yet;
            wait for it; post the receive of the next micro-batch
        compute; on a tile, in step with the other tiles of its grid
        send what others need, without waiting
        a backward waits until what its own forward sent has left
    all-reduce gradients as soon as they are complete, one after the other: in a
        stage's last action already, which never waits for that
    wait for these, and until what the backwards sent has left

and it supposes the worst of the network: no message moves before its receive is posted.
A rank does not really wait for what it sent; but only then is there as much memory as
was predicted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from gemsc.schedules.action import Kind, Task, Timed
from gemsc.schedules.check_messages import (
    each_send_has_one_receive,
    handed_over_values_are_there,
    tags_tell_messages_apart,
    tiles_go_in_step,
)
from gemsc.schedules.check_order import nothing_blocks, one_after_the_other
from gemsc.schedules.check_sums import (
    branches_are_on_one_tile,
    each_gradient_is_reduced_once,
    parts_make_whole_weights,
    steps_end_when_all_is_there,
    sums_are_in_order,
)
from gemsc.schedules.held import held_bytes
from gemsc.schedules.proof import Proof
from gemsc.schedules.rank_step import RankStep

KINDS = tuple(Kind)  # in the order in which a micro-batch has them


def prove(
    ranks: Sequence[RankStep],
    task: Task,
    *,
    groups: Sequence[Sequence[int]] | None = None,
    shared: Mapping[str, Sequence[int]] | None = None,
    weights: Sequence[Collection[str]] = (),
    copies: int = 1,
    ordered: bool = True,
    sums: bool = True,
) -> None:
    """Prove that what the ranks do, together, is one correct step.

    Args:
        ranks: what each rank does, by rank.
        task: what is to be done; its ranks are numbers of `groups`.
        groups: the ranks of each grid of tiles; by default each rank is one alone.
        shared: the stages that hold each group of parameters, `stage2` or a tied one.
        weights: the parameters and buffers of each stage, if ranks hold parts of them.
        copies: data-parallel copies of these ranks.
        ordered: whether they say in which order their communication begins.
        sums: whether it is known what they have to add up; if not, that is not proved.

    Raises:
        InternalError: the program is wrong; names stage, micro-batch and user's line.
    """
    proof = Proof(
        ranks=tuple(ranks),
        task=task,
        groups=tuple(map(tuple, groups or [(r,) for r in range(len(ranks))])),
        shared=shared or {},
        weights=weights,
        copies=copies,
    )
    each_action_once_on_its_rank(proof)
    each_backward_after_its_forward(proof)
    each_send_has_one_receive(proof)
    tags_tell_messages_apart(proof)
    tiles_go_in_step(proof)
    handed_over_values_are_there(proof)
    branches_are_on_one_tile(proof)
    parts_make_whole_weights(proof)
    if sums:
        each_gradient_is_reduced_once(proof)
    steps_end_when_all_is_there(proof)
    nothing_blocks(proof)
    sums_are_in_order(proof)
    if ordered:
        one_after_the_other(proof)
    memory_is_within_the_cap(proof)


def each_action_once_on_its_rank(proof: Proof) -> None:
    """Every action of every (replica, stage, micro-batch) is on its ranks, once."""
    seen = set()
    for rank in proof.ranks:
        number = rank.rank
        for action in rank.actions:
            if action not in proof.wanted:
                raise proof.wrong(action, f"rank {number} has an unknown action")
            if number not in proof.wanted[action]:
                others = " and ".join(map(str, proof.wanted[action]))
                raise proof.wrong(
                    action, f"rank {number} does an action of rank {others}"
                )
            if (action, number) in seen:
                raise proof.wrong(action, f"rank {number} does an action twice")
            if action.kind is Kind.WEIGHT and action not in rank.deferred:
                text = f"rank {number} computes weight gradients twice"
                raise proof.wrong(action, text)
            seen.add((action, number))
    for action, places in proof.wanted.items():
        for number in places:
            if (action, number) not in seen:
                raise proof.wrong(action, f"rank {number} leaves out an action")


def each_backward_after_its_forward(proof: Proof) -> None:
    """On each rank the kinds of one micro-batch are in order: F, B, W."""
    for rank, position in zip(proof.ranks, proof.position, strict=True):
        for action in rank.actions:
            for earlier in KINDS[: KINDS.index(action.kind)]:
                before = replace(action, kind=earlier)
                if position[before] > position[action]:
                    text = f"rank {rank.rank} does an action before its {before}"
                    raise proof.wrong(action, text)


def memory_is_within_the_cap(proof: Proof) -> None:
    """No rank holds more than the task allows."""
    cap = proof.task.memory_cap
    if cap is None:
        return
    for rank in proof.ranks:
        group = proof.groups.index(rank.tiles)
        resident = proof.task.resident_bytes(group)
        actions = [Timed(action, 0.0, 0.0) for action in rank.actions]
        for held in held_bytes(proof.task, group, actions):
            if resident + held.total > cap:
                text = f"rank {rank.rank} holds {resident + held.total:,} of "
                raise proof.wrong(held.action, f"{text}{cap:,} bytes")
