"""The schedules: each a few settings of the one engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

from gemsc.schedules.action import Action, Kind, Task
from gemsc.schedules.engine import Policy

_FORWARD_FIRST = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """An entry of `SCHEDULES`: a policy, and the placement that it is made for."""

    policy: Policy
    description: str
    placement: str = "linear"
    num_replicas: int = 1


def place(
    kind: str,
    num_stages: int,
    num_ranks: int,
    num_replicas: int = 1,
    *,
    mirror: Sequence[int] = (),
) -> tuple[tuple[int, ...], ...]:
    """Return `ranks[replica][stage]`.

    `mirror` is the rank opposite to each one, by default N - 1 - rank.

    linear    consecutive stages share a rank
    looped    stage s on rank s mod ranks
    folded    0 1 2 2 1 0: the stages go up the ranks and come back
    mirrored  odd replicas go the other way
    """
    if kind == "looped":
        row = [stage % num_ranks for stage in range(num_stages)]
    elif kind == "folded":
        turn = [*range(num_ranks), *reversed(range(num_ranks))]
        row = [turn[stage % len(turn)] for stage in range(num_stages)]
    else:
        row = [stage * num_ranks // num_stages for stage in range(num_stages)]
    opposite = mirror or range(num_ranks - 1, -1, -1)
    mirrored = [opposite[rank] for rank in row]
    return tuple(
        tuple(mirrored if kind == "mirrored" and replica % 2 else row)
        for replica in range(num_replicas)
    )


def one(task: Task, replica: int, stage: int) -> int:
    """One at a time."""
    return 1


def stages_to_end(task: Task, replica: int, stage: int) -> int:
    """As many as there are stages from here to the end, over those that share a rank.

    That is how many micro-batches enter while one goes to the end and comes back; one
    more where it comes back to a rank on its way, since turns do not always fit.
    """
    share, comes_back = _visits(task.placement[replica])
    return -(-task.stages_to_end[stage] // share) + comes_back


@lru_cache(maxsize=64)
def _visits(ranks: tuple[int, ...]) -> tuple[int, bool]:
    """Return the most stages of one rank, and whether a rank is come back to."""
    share = max(Counter(ranks).values())
    visits = sum(1 for _ in groupby(ranks))
    return share, visits > len(set(ranks))


def all_stages(task: Task, replica: int, stage: int) -> int:
    """As many as the longest path has stages."""
    return max(task.stages_to_end)


def way_and_back(task: Task, replica: int, stage: int) -> int:
    """As many as there are stages to the end, one less on the way there.

    Of 2 N stages in a V, rank i holds 2 N - 1 - i and i + 1 micro-batches: 2 N in all.
    """
    left = task.stages_to_end[stage]
    return left - (2 * left > max(task.stages_to_end))


def half_way_and_back(task: Task, replica: int, stage: int) -> int:
    """Half as many as there are stages to the end, and one more: N + 2 on each rank."""
    return task.stages_to_end[stage] // 2 + 1


def last_stage(task: Task, action: Action) -> tuple[int, ...]:
    """The oldest micro-batch, and of that the stage that is nearest to the end."""
    return action.micro_batch, action.replica, -action.stage


def half_the_ranks(task: Task, replica: int, stage: int) -> int:
    """Half as many as there are ranks: the other half comes from the other end."""
    return max(1, task.num_ranks // 2)


def in_groups(task: Task, action: Action) -> tuple[int, ...]:
    """As many micro-batches as there are ranks go through one chunk, then the next."""
    group = task.num_ranks
    lanes = [s for r, s in task.lanes[task.rank_of(action)] if r == action.replica]
    chunk = lanes.index(action.stage)
    if action.kind is not Kind.FORWARD:
        chunk = -chunk
    return action.micro_batch // group, chunk, action.micro_batch, action.replica


def interleaved_live(task: Task, rank: int) -> int:
    """2 (N - 1 - rank) + (chunks - 1) N + 1: what keeps all N ranks busy."""
    chunks = len(task.lanes[rank])
    return 2 * (task.num_ranks - 1 - rank) + (chunks - 1) * task.num_ranks + 1


_MASTER = Policy(live_runs=1)
_V = Policy(
    kinds=_FORWARD_FIRST, key=last_stage, held=way_and_back, split_backward=True
)

SCHEDULES: dict[str, Schedule] = {
    "basic": Schedule(
        policy=Policy(in_flight=one),
        description="one micro-batch at a time through all stages",
    ),
    "gpipe": Schedule(
        policy=Policy(kinds=_FORWARD_FIRST, flush=True),
        description="all forwards, then all backwards",
    ),
    "1f1b": Schedule(
        policy=Policy(kinds=_FORWARD_FIRST, in_flight=stages_to_end),
        description="backwards as soon as possible: as fast as gpipe, less memory",
    ),
    "interleaved": Schedule(
        policy=Policy(
            kinds=_FORWARD_FIRST,
            key=in_groups,
            rank_live=interleaved_live,
            strict_forward=True,
        ),
        description="several stages on each rank: less idle time, more messages",
        placement="looped",
    ),
    "mast": Schedule(
        policy=_MASTER,
        description="two mirrored replicas take turns, in the memory of one run",
        placement="mirrored",
        num_replicas=2,
    ),
    "master": Schedule(
        policy=_MASTER,
        description="several such pairs of runs, whose gradients accumulate",
        placement="mirrored",
        num_replicas=2,
    ),
    "bidirectional": Schedule(
        policy=Policy(in_flight=one),
        description="one run of each mirrored replica at once: two in the time of one",
        placement="mirrored",
        num_replicas=2,
    ),
    "chimera": Schedule(
        policy=Policy(kinds=_FORWARD_FIRST, in_flight=half_the_ranks),
        description="both directions at once, several micro-batches in flight",
        placement="mirrored",
        num_replicas=2,
    ),
    "zb-h1": Schedule(
        policy=Policy(
            kinds=_FORWARD_FIRST,
            in_flight=stages_to_end,
            held=all_stages,
            split_backward=True,
        ),
        description="1f1b with deferred weight gradients, which fill idle time",
    ),
    "zb-v": Schedule(
        policy=_V,
        description="zb-h1 with two stages on each rank, in a V: hardly any idle time",
        placement="folded",
    ),
    "v-half": Schedule(
        policy=replace(_V, held=half_way_and_back),
        description="zb-v with about half of its activations: about as fast as zb-h1",
        placement="folded",
    ),
}
