"""Split last backwards: an idle rank gets its gradients before those of weights exist.

    rank 0  .   .   0B3 --            rank 0  .   0B3 --
    rank 1  1B3 --                    rank 1  1B3 1W3

`zb-h1` does it for all micro-batches (Qi et al. 2023, "Zero Bubble Pipeline
Parallelism"). What weight gradients need stays a little longer: so it is done only
where that does not raise the peak of the rank that holds most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gemsc.schedules.action import Action, Kind, Task, Timeline, split_backwards
from gemsc.schedules.clock import replay


def split_last_backwards(task: Task, timeline: Timeline) -> Timeline:
    """Return the timeline with weight gradients apart where an idle rank waits."""
    limit = max(timeline.peak_bytes)
    split = {
        Action(Kind.BACKWARD, stage, task.micro_batches[replica] - 1, replica)
        for replica, row in enumerate(task.placement)
        for stage in range(len(row))
        if task.has_backward and task.stages[stage].weight
    } - split_backwards(timeline.orders)
    while split:
        orders = [list(_with_weights(o, split)) for o in timeline.orders]
        found = replay(task, orders)
        useful = {
            action
            for action in _awaited(task, found, split)
            if found.peak_bytes[task.rank_of(action)] <= limit
        }
        if useful == split:
            return found
        split = useful
    return timeline


def _with_weights(order: Sequence[Action], split: set[Action]) -> Iterator[Action]:
    for action in order:
        yield action
        if action in split:
            yield replace(action, kind=Kind.WEIGHT)


def _awaited(task: Task, timeline: Timeline, split: set[Action]) -> Iterator[Action]:
    """Yield the backwards that a rank has waited for, and would wait for longer."""
    times = {timed.action: timed for rank in timeline.ranks for timed in rank}
    for action in split:
        end = times[replace(action, kind=Kind.WEIGHT)].end
        if any(
            edge.gradient
            and task.rank_of(needs) != task.rank_of(action)
            and times[needs].start < end + edge.seconds
            for edge in task.inputs[action.stage]
            for needs in [replace(action, stage=edge.source)]
        ):
            yield action
