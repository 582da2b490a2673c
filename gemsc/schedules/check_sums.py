"""The proof of gradients: who holds what, and which ranks add it up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product

from gemsc.base.parts import Part, make_whole, parts_of, sums_in_order
from gemsc.schedules.action import Action
from gemsc.schedules.proof import Proof
from gemsc.schedules.rank_step import AllReduce, End, RankStep, Step


def branches_are_on_one_tile(proof: Proof) -> None:
    """All ranks of a grid say alike which one of them alone holds what.

    On tiles, one of the ranks that share a tile does.
    """
    for group in proof.groups:
        first = proof.ranks[group[0]]
        said = [proof.ranks[number].placed for number in group]
        for place, number in enumerate(group):
            rank, is_right, wanted = proof.ranks[number], True, {}
            for path, holder in first.placed.items():
                count = len(group) // len({placed.get(path) for placed in said})
                is_right &= 0 <= holder < count > 1
                wanted[path] = place - place % count + holder
            if rank.placed != wanted or not is_right:
                text = f"rank {number} holds branches as {rank.placed}, rank "
                text += f"{first.rank} of its grid as {first.placed}"
                raise proof.wrong(rank.actions[0], text)


def parts_make_whole_weights(proof: Proof) -> None:
    """Each grid holds all of each weight, and all grids cut it alike."""
    cut = {name for rank in proof.ranks for name in rank.parts}
    held: dict[str, set[Part | None]] = {}
    for stage, names in enumerate(proof.weights):
        for replica, name in product(range(len(proof.task.placement)), names):
            if name not in cut:
                continue
            ranks = proof.ranks_of(replica, stage)
            here = {proof.ranks[number].parts.get(name) for number in ranks}
            parts = [part for part in here if part is not None]
            if held.setdefault(name, here) != here or not make_whole(parts):
                text = f"ranks {ranks} hold other parts of '{name}' than all of it"
                raise proof.wrong_sum(f"stage{stage}", text)


def _holders(proof: Proof, group: str) -> dict[str, dict[int, tuple[int, ...]]]:
    """Return what each rank adds up of a group, and over which ranks.

    Over all that hold the same: of what all hold as a whole over all of them, of
    parts, and of what is on one tile of each grid, over those with the same.
    """
    stages = proof.shared[group]
    rows = proof.task.placement if proof.task.has_backward else ()
    ranks = {n for row in rows for s in stages for n in proof.groups[row[s]]}
    names, is_stage = {group}, len(stages) == 1
    if is_stage:
        names = {*(proof.weights[stages[0]] if proof.weights else ())}
        names -= proof.shared.keys()
    alike: dict[frozenset[tuple[str, Part | None]], list[int]] = defaultdict(list)
    for number in sorted(ranks):
        alike[proof.ranks[number].apart(names)].append(number)
    if sum(map(len, alike)) != len({part for parts in alike for part in parts}):
        text = "ranks hold some parts of it alike, and others not"
        raise proof.wrong_sum(group, f"'{group}': {text}")
    of_parts = {n: tuple(same) for cut, same in alike.items() if cut for n in same}
    whole = dict.fromkeys(ranks, tuple(sorted(ranks)))
    if is_stage:
        return {group: whole, parts_of(group): of_parts}
    return {group: of_parts or whole}


def each_gradient_is_reduced_once(proof: Proof) -> None:
    """Each rank reduces each of its groups once, after the last backward."""
    wanted: list[dict[str, tuple[int, ...]]] = [{} for _ in proof.ranks]
    for group in proof.shared:
        for key, holders in _holders(proof, group).items():
            for number, ranks in holders.items():
                if len(ranks) * proof.copies > 1:
                    wanted[number][key] = ranks
    for rank, groups in zip(proof.ranks, wanted, strict=True):
        for place, step in enumerate(rank.steps):
            if isinstance(step, AllReduce):
                _reduces(proof, rank, step, rank.steps[place:], groups)
        begun = [s.group for s in rank.steps if isinstance(s, AllReduce)]
        for group in groups:
            if begun.count(group) != 1:
                times = f"{begun.count(group)} times"
                text = f"rank {rank.rank} all-reduces '{group}' {times}"
                raise proof.wrong_sum(group, text)


def _reduces(
    proof: Proof,
    rank: RankStep,
    step: AllReduce,
    later: Sequence[Step],
    wanted: Mapping[str, tuple[int, ...]],
) -> None:
    if step.group not in wanted:
        text = f"rank {rank.rank} all-reduces an unknown '{step.group}'"
        raise proof.wrong_sum(step.group, text)
    if step.ranks != wanted[step.group]:
        text = f"'{step.group}' is on ranks {wanted[step.group]}, and rank "
        text += f"{rank.rank} all-reduces it over {step.ranks}"
        raise proof.wrong_sum(step.group, text)
    for action in later:
        if isinstance(action, Action) and action.stage in proof.stages[step.group]:
            text = f"rank {rank.rank} starts {step} before an action"
            raise proof.wrong(action, text)


def steps_end_when_all_is_there(proof: Proof) -> None:
    """Each rank waits for its sums, if it has any, and then updates."""
    for rank in proof.ranks:
        begun = [s.group for s in rank.steps if isinstance(s, AllReduce)]
        wanted = [End.UPDATED] if proof.task.has_backward else []
        ends = [step for step in rank.steps if isinstance(step, End)]
        if begun or End.REDUCED in ends:
            wanted = [End.REDUCED, *wanted]
        if ends != wanted or [*rank.steps[len(rank.steps) - len(ends) :]] != ends:
            group = begun[0] if begun else next(iter(proof.shared), "")
            text = f"rank {rank.rank} does not end its step with {' and '.join(wanted)}"
            raise proof.wrong_sum(group, text)


def sums_are_in_order(proof: Proof) -> None:
    """Each rank starts its sums in the order in which they start within actions."""
    order = sums_in_order(range(len(proof.task.stages)))
    for rank in proof.ranks:
        begun = [step.group for step in rank.steps if isinstance(step, AllReduce)]
        actual = [group for group in begun if group in order]
        for group, first in zip(actual, sorted(actual, key=order.index), strict=True):
            if group != first:
                text = f"rank {rank.rank} all-reduces '{group}' before '{first}'"
                raise proof.wrong_sum(first, text)
