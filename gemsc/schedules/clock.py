"""When actions can begin: what each needs, when that ends, how long it travels."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from gemsc.base.cost import Edge, StageCost
from gemsc.errors import InternalError
from gemsc.schedules.action import (
    Action,
    Kind,
    Task,
    Timed,
    Timeline,
    split_backwards,
)
from gemsc.schedules.held import held_bytes

Lane = tuple[int, int]
_Need = tuple[list[float], float]


def replay(task: Task, orders: Sequence[Sequence[Action]]) -> Timeline:
    """Return the timeline of given orders: see `play`."""
    return play(task, orders).timeline()


def play(task: Task, orders: Sequence[Sequence[Action]]) -> Clock:
    """Return the clock after given orders: each action begins as soon as it can.

    Raises:
        InternalError: the orders are not complete, or block each other.
    """
    clock = Clock(task)
    split = split_backwards(orders)
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
            free[rank] = clock.do(action, max(free[rank], ready), split=action in split)
            position[rank] += 1
            waiting.extend([dest for dest, _ in clock.wakes(action)])
    if any(p < len(order) for p, order in zip(position, orders, strict=True)):
        stuck = [str(o[p]) for p, o in zip(position, orders, strict=True) if p < len(o)]
        raise InternalError(f"the orders block each other at {', '.join(stuck)}")
    return clock


class Clock:
    """When actions ended, and therefore when others may begin."""

    def __init__(self, task: Task) -> None:
        self.task = task
        lanes = [lane for rank in task.lanes for lane in rank]
        self.ends: dict[tuple[Kind, int, int], list[float]] = {
            (kind, *lane): [] for kind in task.kinds for lane in lanes
        }
        self._needs = {key: self._needs_of(*key) for key in self.ends}
        self._wakes = {key: self._wakes_of(*key) for key in self.ends}
        self.ranks: list[list[Timed]] = [[] for _ in range(task.num_ranks)]
        self.makespan = 0.0

    @property
    def orders(self) -> tuple[tuple[Action, ...], ...]:
        """What each rank has begun, in order."""
        return tuple(tuple(timed.action for timed in rank) for rank in self.ranks)

    def count(self, kind: Kind, lane: Lane) -> int:
        """Return how many actions of a kind a lane has begun."""
        return len(self.ends[kind, *lane])

    def ready(self, action: Action) -> float | None:
        """Return when all is there that an action needs; None if that is not known."""
        latest, number = 0.0, action.micro_batch
        needs = self._needs[action.kind, action.replica, action.stage]
        for ends, seconds in needs:
            if len(ends) <= number:
                return None
            arrival = ends[number] + seconds
            if arrival > latest:
                latest = arrival
        return latest

    def wakes(self, action: Action) -> list[tuple[int, float]]:
        """Return the ranks that may go on after an action, and how much later."""
        return self._wakes[action.kind, action.replica, action.stage]

    def _needs_of(self, kind: Kind, replica: int, stage: int) -> list[_Need]:
        """Return when what an action needs ended, and how long that travels."""
        if kind is Kind.WEIGHT:
            return [(self.ends[Kind.BACKWARD, replica, stage], 0.0)]
        if kind is Kind.FORWARD:
            needs, before = [], [(e, e.source) for e in self.task.inputs[stage]]
        else:
            needs = [(self.ends[Kind.FORWARD, replica, stage], 0.0)]
            before = [(e, e.dest) for e in self.task.outputs[stage]]
        for e, other in before:
            seconds = self._travel(kind, replica, e)
            needs.append((self.ends[kind, replica, other], seconds))
        return needs

    def _wakes_of(
        self, kind: Kind, replica: int, stage: int
    ) -> list[tuple[int, float]]:
        if kind is Kind.FORWARD:
            after = [(e, e.dest) for e in self.task.outputs[stage]]
        elif kind is Kind.BACKWARD:
            after = [(e, e.source) for e in self.task.inputs[stage]]
        else:
            after = []
        ranks = self.task.placement[replica]
        return [(ranks[other], self._travel(kind, replica, e)) for e, other in after]

    def _travel(self, kind: Kind, replica: int, edge: Edge) -> float:
        """Return how long the value of an edge travels, or its gradient if any."""
        ranks = self.task.placement[replica]
        if ranks[edge.source] == ranks[edge.dest]:
            return 0.0
        return edge.seconds if kind is Kind.FORWARD or edge.gradient else 0.0

    def do(self, action: Action, start: float, *, split: bool) -> float:
        """Note that an action begins; return when it ends.

        A backward that is `split` leaves its weight gradients to an action after it.
        """
        ends = self.ends[action.kind, action.replica, action.stage]
        if len(ends) != action.micro_batch and action.kind is not Kind.WEIGHT:
            raise InternalError(f"{action} is out of order, {len(ends)} is next")
        cost = self.task.stages[action.stage]
        end = start + _seconds(cost, action.kind, split=split)
        ends.append(end)
        if end > self.makespan:
            self.makespan = end
        self.ranks[self.task.rank_of(action)].append(Timed(action, start, end))
        return end

    def timeline(self) -> Timeline:
        """Return all that was done, with the peaks."""
        held = [
            tuple(held_bytes(self.task, rank, timed))
            for rank, timed in enumerate(self.ranks)
        ]
        resident = [self.task.resident_bytes(rank) for rank in range(len(held))]
        return Timeline(
            ranks=tuple(map(tuple, self.ranks)),
            makespan=self.makespan,
            peak_bytes=tuple(
                base + max((moment.total for moment in row), default=0)
                for base, row in zip(resident, held, strict=True)
            ),
            peak_live=tuple(
                max((moment.live for moment in row), default=0) for row in held
            ),
            peak_activation_bytes=tuple(
                max((moment.activations for moment in row), default=0) for row in held
            ),
        )


def _seconds(cost: StageCost, kind: Kind, *, split: bool) -> float:
    """Return how long an action takes; `split` if its weight gradients wait."""
    if kind is Kind.FORWARD:
        return cost.forward
    if kind is Kind.WEIGHT:
        return cost.weight
    return cost.backward - cost.weight if split else cost.backward
