"""When actions can begin: what each needs, when that ends, how long it travels."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from gemsc.errors import InternalError
from gemsc.schedules.action import Action, Kind, Task, Timed, Timeline
from gemsc.schedules.held import held_bytes

__all__ = ["Clock", "replay"]

Lane = tuple[int, int]


def replay(task: Task, orders: Sequence[Sequence[Action]], *, split: bool) -> Timeline:
    """Return the timeline of given orders: each action begins as soon as it can.

    Raises:
        InternalError: the orders are not complete, or block each other.
    """
    clock = Clock(task, split=split)
    free = [0.0] * task.num_ranks
    position = [0] * task.num_ranks
    waiting = deque(range(task.num_ranks))
    while waiting:
        rank = waiting.popleft()
        while position[rank] < len(orders[rank]):
            action = orders[rank][position[rank]]
            ready = clock.ready(action)
            if ready is None:
                break
            free[rank] = clock.do(action, max(free[rank], ready))
            position[rank] += 1
            waiting.extend(dest for dest, _ in clock.wakes(action))
    if any(p < len(order) for p, order in zip(position, orders, strict=True)):
        stuck = [str(o[p]) for p, o in zip(position, orders, strict=True) if p < len(o)]
        raise InternalError(f"the orders block each other at {', '.join(stuck)}")
    return clock.timeline()


class Clock:
    """When actions ended, and therefore when others may begin."""

    def __init__(self, task: Task, *, split: bool) -> None:
        self.task = task
        self.split = split
        kinds = [Kind.FORWARD]
        if task.has_backward:
            kinds.append(Kind.BACKWARD)
        if split:
            kinds.append(Kind.WEIGHT)
        self.kinds = tuple(kinds)
        self.last_kind = kinds[-1]
        lanes = [lane for rank in task.lanes for lane in rank]
        self.ends: dict[tuple[Kind, int, int], list[float]] = {
            (kind, *lane): [] for kind in kinds for lane in lanes
        }
        self.ranks: list[list[Timed]] = [[] for _ in range(task.num_ranks)]

    def count(self, kind: Kind, lane: Lane) -> int:
        """Return how many actions of a kind a lane has begun."""
        return len(self.ends[kind, *lane])

    def ready(self, action: Action) -> float | None:
        """Return when all is there that an action needs; None if that is not known."""
        latest = 0.0
        for kind, stage, seconds in self._needs(action):
            ends = self.ends[kind, action.replica, stage]
            if len(ends) <= action.micro_batch:
                return None
            latest = max(latest, ends[action.micro_batch] + seconds)
        return latest

    def _needs(self, action: Action) -> list[tuple[Kind, int, float]]:
        stage, replica = action.stage, action.replica
        if action.kind is Kind.FORWARD:
            return [
                (
                    Kind.FORWARD,
                    e.source,
                    self._travel(replica, e.source, stage, e.seconds),
                )
                for e in self.task.inputs[stage]
            ]
        if action.kind is Kind.WEIGHT:
            return [(Kind.BACKWARD, stage, 0.0)]
        needs = [(Kind.FORWARD, stage, 0.0)]
        for e in self.task.outputs[stage]:
            seconds = e.seconds if e.gradient else 0.0
            travel = self._travel(replica, e.dest, stage, seconds)
            needs.append((Kind.BACKWARD, e.dest, travel))
        return needs

    def _travel(self, replica: int, source: int, dest: int, seconds: float) -> float:
        ranks = self.task.placement[replica]
        return seconds if ranks[source] != ranks[dest] else 0.0

    def wakes(self, action: Action) -> list[tuple[int, float]]:
        """Return the ranks that may go on after an action, and how much later."""
        stage, ranks = action.stage, self.task.placement[action.replica]
        if action.kind is Kind.FORWARD:
            return [
                (ranks[e.dest], self._travel(action.replica, stage, e.dest, e.seconds))
                for e in self.task.outputs[stage]
            ]
        if action.kind is Kind.WEIGHT:
            return []
        return [
            (
                ranks[e.source],
                self._travel(
                    action.replica, stage, e.source, e.seconds if e.gradient else 0.0
                ),
            )
            for e in self.task.inputs[stage]
        ]

    def do(self, action: Action, start: float) -> float:
        """Note that an action begins; return when it ends."""
        ends = self.ends[action.kind, action.replica, action.stage]
        if len(ends) != action.micro_batch:
            raise InternalError(f"{action} is out of order, {len(ends)} is next")
        cost = self.task.stages[action.stage]
        end = start + cost.seconds(action.kind, split=self.split)
        ends.append(end)
        rank = self.task.placement[action.replica][action.stage]
        self.ranks[rank].append(Timed(action, start, end))
        return end

    def timeline(self) -> Timeline:
        """Return all that was done, with the peaks."""
        held = [
            tuple(held_bytes(self.task, rank, timed))
            for rank, timed in enumerate(self.ranks)
        ]
        resident = [self.task.resident_bytes(rank) for rank in range(len(held))]
        ends = [timed.end for rank in self.ranks for timed in rank]
        return Timeline(
            ranks=tuple(map(tuple, self.ranks)),
            makespan=max(ends, default=0.0),
            peak_bytes=tuple(
                base + max((each.total for each in row), default=0)
                for base, row in zip(resident, held, strict=True)
            ),
            peak_live=tuple(
                max((each.live for each in row), default=0) for row in held
            ),
            peak_activation_bytes=tuple(
                max((each.activations for each in row), default=0) for row in held
            ),
        )
