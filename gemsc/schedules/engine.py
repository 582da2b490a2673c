"""The one schedule engine: a discrete-event list scheduler over a DAG of stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from operator import itemgetter

from gemsc.errors import GemscError, InternalError
from gemsc.schedules.action import (
    Action,
    Kind,
    Task,
    Timeline,
    split_backwards,
)
from gemsc.schedules.clock import Clock, play, replay
from gemsc.schedules.loops import find_loops, num_lines

Orders = tuple[tuple[Action, ...], ...]
Lane = tuple[int, int]
Key = tuple[int, ...]

# What is lost in time for an order whose text is a few loops; how much longer a faster
# order's text may be; into how many steps a micro-batch's time on a rank is rounded.
_TOLERANCE = 1.02
_LONGER = 2
_ROUNDINGS = (6, 12, 24)


def _oldest(task: Task, action: Action) -> Key:
    return action.micro_batch, action.replica, action.stage


def _unlimited(task: Task, replica: int, stage: int) -> int:
    return task.micro_batches[replica]


def _no_rank_limit(task: Task, rank: int) -> int:
    return sum(task.micro_batches) * len(task.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How the engine chooses; every schedule is a setting of these knobs.

    Attributes:
        kinds: which kind of ready action goes first.
        key: which action goes first among those of one kind, the least key.
        in_flight: forwards of a (replica, stage) whose backward is not done, at most.
        held: the same, but until the weight gradients are done as well.
        rank_live: forwards of any stage of a rank whose backward is not done, at most.
        live_runs: (replica, micro-batch) pairs at work on a rank, at most. They enter
            every rank in the same order, (0, 0), (1, 0), (0, 1), ..., so they cannot
            block each other; 1 lets mirrored replicas take turns.
        flush: a stage does all its forwards before its first backward.
        strict_forward: the forwards of a rank go in the order of `key`, waiting if need
            be; otherwise the first that is ready goes.
        split_backward: all weight gradients are actions of their own.
    """

    kinds: tuple[Kind, ...] = (Kind.BACKWARD, Kind.FORWARD, Kind.WEIGHT)
    key: Callable[[Task, Action], Key] = _oldest
    in_flight: Callable[[Task, int, int], int] = _unlimited
    held: Callable[[Task, int, int], int] = _unlimited
    rank_live: Callable[[Task, int], int] = _no_rank_limit
    live_runs: int | None = None
    flush: bool = False
    strict_forward: bool = False
    split_backward: bool = False


def run(task: Task, policy: Policy) -> Timeline:
    """Return each rank's actions with their predicted times.

    The order that suits equal stages repeats itself, so its text is short, whatever the
    number of micro-batches. It is taken if it is at most 2 % slower than the order that
    suits the predicted times. If not, the fastest order is taken whose text is at most
    twice as long, out of the latter and some that suit coarsely rounded times.

    Raises:
        GemscError: a rank's memory cap is below what one micro-batch needs.
    """
    _require_memory(task, policy)

    def schedule(suited: Task) -> Clock:
        return play(task, find_orders(suited, policy))

    equal = _equalised(task)
    regular = schedule(equal)
    free = regular if task == equal else schedule(task)
    if regular.makespan <= _TOLERANCE * free.makespan:
        return regular.timeline()
    longest = _LONGER * max(map(_lines, regular.orders))
    others = [free, *(schedule(_rounded(task, steps)) for steps in _ROUNDINGS)]
    for clock in sorted(others, key=lambda clock: clock.makespan):
        if clock.makespan < regular.makespan and all(
            _lines(order) <= longest for order in clock.orders
        ):
            return clock.timeline()
    return regular.timeline()


def _equalised(task: Task) -> Task:
    """Return the task with equal stages and links that take no time."""
    stages = tuple(
        replace(stage, forward=1.0, backward=2.0, weight=1.0) for stage in task.stages
    )
    edges = tuple(replace(edge, seconds=0.0) for edge in task.edges)
    return replace(task, stages=stages, edges=edges)


def _rounded(task: Task, steps: int) -> Task:
    """Return the task with times that are multiples of one part of the busiest rank's.

    Then the ranks meet in the same way again after a few micro-batches.
    """
    stages = task.stages
    busy = max(
        sum(stages[stage].forward + stages[stage].backward for _, stage in lanes)
        for lanes in task.lanes
    )

    def whole(seconds: float, least: int = 1) -> float:
        return float(max(least, round(seconds * steps / busy)))

    return replace(
        task,
        stages=tuple(
            replace(
                stage,
                forward=whole(stage.forward),
                backward=whole(stage.backward - stage.weight) + whole(stage.weight),
                weight=whole(stage.weight),
            )
            for stage in stages
        ),
        edges=tuple(replace(e, seconds=whole(e.seconds, 0)) for e in task.edges),
    )


def _lines(order: Sequence[Action]) -> int:
    """Return the lines of a rank's text."""
    return num_lines(find_loops(order))


def find_orders(task: Task, policy: Policy) -> Orders:
    """Schedule; drop wishes that leave no way to go on, as they may under a cap.

    What remains never blocks: the oldest micro-batch may always go on.
    """
    tries = (
        policy,
        replace(policy, strict_forward=False),
        replace(policy, strict_forward=False, rank_live=_no_rank_limit),
    )
    for attempt in tries:
        orders = _Scheduler(task, attempt).run()
        if orders is not None:
            return orders
    raise InternalError("the schedule policy allows no further action")


def _require_memory(task: Task, policy: Policy) -> None:
    """Refuse a cap under which some rank cannot hold one micro-batch."""
    if task.memory_cap is None:
        return
    short = []
    for rank in range(task.num_ranks):
        need = task.fixed_bytes(rank, split=policy.split_backward)
        need += max(_run_bytes(task, rank).values(), default=0)
        if need > task.memory_cap:
            short.append(f"rank {rank} needs {need:,} bytes")
    if short:
        raise GemscError(
            f"{', '.join(short)} for one micro-batch, but the limit is "
            f"{task.memory_cap:,} bytes",
            help="use more ranks, --tiles auto for pictures, --balance memory, smaller "
            "micro-batches or a larger --device-memory",
        )


def _run_bytes(task: Task, rank: int) -> dict[int, int]:
    """Return, for each replica on a rank, what one micro-batch of it saves there."""
    saved: dict[int, int] = {}
    for replica, stage in task.lanes[rank]:
        saved[replica] = saved.get(replica, 0) + task.stages[stage].saved_bytes
    return saved


class _Scheduler:
    """One list scheduling: a rank that is free begins the first action it may."""

    def __init__(self, task: Task, policy: Policy) -> None:
        self.task = task
        self.policy = policy
        self.clock = Clock(task)
        kinds = task.kinds if policy.split_backward else task.kinds[:2]
        self.kinds = tuple(kind for kind in policy.kinds if kind in kinds)
        self.last_kind = kinds[-1]
        lanes = [lane for rank in task.lanes for lane in rank]
        self.in_flight = {lane: max(1, policy.in_flight(task, *lane)) for lane in lanes}
        self.held = {lane: max(1, policy.held(task, *lane)) for lane in lanes}
        ranks = range(task.num_ranks)
        self.rank_live = [max(1, policy.rank_live(task, rank)) for rank in ranks]
        self.unlimited = _no_rank_limit(task, 0)
        split = policy.split_backward
        self.fixed = [task.fixed_bytes(rank, split=split) for rank in ranks]
        self.needs = [_run_bytes(task, rank) for rank in ranks]
        self.group = self._group()
        self.next: list[dict[Kind, dict[Lane, tuple[Key, Action]]]] = [
            {kind: {} for kind in self.kinds} for _ in ranks
        ]
        for rank in ranks:
            for kind in self.kinds:
                for lane in task.lanes[rank]:
                    self._note_next(rank, kind, lane)

    def run(self) -> Orders | None:
        """Return each rank's order; None if the policy's limits block it."""
        free = [0.0] * self.task.num_ranks
        events = [(0.0, rank) for rank in range(self.task.num_ranks)]
        heapify(events)
        while events:
            now, rank = heappop(events)
            if free[rank] > now:
                continue
            action = self._choose(rank, now)
            if action is None:
                continue
            free[rank] = end = self.clock.do(
                action, now, split=self.policy.split_backward
            )
            self._note_next(rank, action.kind, (action.replica, action.stage))
            heappush(events, (end, rank))
            for dest, seconds in self.clock.wakes(action):
                heappush(events, (end + seconds, dest))
        is_done = all(
            self.clock.count(kind, lane) == self.task.micro_batches[lane[0]]
            for kind in self.kinds
            for lane in self.in_flight
        )
        return self.clock.orders if is_done else None

    def _choose(self, rank: int, now: float) -> Action | None:
        """Return what a rank does next: the first kind, then the least key."""
        for kind in self.kinds:
            candidates: Iterable[tuple[Key, Action]] = self.next[rank][kind].values()
            if len(self.task.lanes[rank]) > 1:
                candidates = sorted(candidates, key=itemgetter(0))
            for _, action in candidates:
                if kind is Kind.FORWARD and not self._has_room(action, rank):
                    continue
                ready = self.clock.ready(action)
                if ready is not None and ready <= now and self._allowed(action, rank):
                    return action
                if kind is Kind.FORWARD and self.policy.strict_forward:
                    break
        return None

    def _note_next(self, rank: int, kind: Kind, lane: Lane) -> None:
        """Note a lane's next action of a kind with its key, if there is one more."""
        (replica, stage), following = lane, self.next[rank][kind]
        number = self.clock.count(kind, lane)
        if number < self.task.micro_batches[replica]:
            action = Action(kind, stage, number, replica)
            following[lane] = self.policy.key(self.task, action), action
        else:
            following.pop(lane, None)

    def _allowed(self, action: Action, rank: int) -> bool:
        """Whether the limits of the policy let a ready action begin."""
        if action.kind is Kind.FORWARD:
            return self._forward_allowed(action, rank)
        if action.kind is Kind.BACKWARD and self.policy.flush:
            return self._flushed(action, rank)
        return True

    def _forward_allowed(self, action: Action, rank: int) -> bool:
        if not self.task.has_backward:
            return True
        lane = (action.replica, action.stage)
        if self._live(lane, Kind.BACKWARD) >= self.in_flight[lane]:
            return False
        if self._live(lane, self.last_kind) >= self.held[lane]:
            return False
        if self.rank_live[rank] >= self.unlimited:
            return True
        live = sum(self._live(lane, Kind.BACKWARD) for lane in self.task.lanes[rank])
        return live < self.rank_live[rank]

    def _live(self, lane: Lane, until: Kind) -> int:
        return self.clock.count(Kind.FORWARD, lane) - self.clock.count(until, lane)

    def _has_room(self, action: Action, rank: int) -> bool:
        """Whether the micro-batch of a forward may enter a rank, or has done so.

        Room is kept for all earlier ones that the rank has not finished, whether they
        have come yet or not, and for all their stages there: so the oldest can always
        go on, and a cap never leads into a dead end.
        """
        limit, cap = self.policy.live_runs, self.task.memory_cap
        if limit is None and cap is None:
            return True
        runs, held = 0, self.fixed[rank]
        for replica, need in self.needs[rank].items():
            last = action.micro_batch + (replica <= action.replica)
            last = min(last, self.task.micro_batches[replica])
            inside = max(0, last - self._finished(replica, rank))
            runs, held = runs + inside, held + inside * need
        return (limit is None or runs <= limit) and (cap is None or held <= cap)

    def _finished(self, replica: int, rank: int) -> int:
        """Return how many micro-batches of a replica a rank is done with."""
        lanes = (lane for lane in self.task.lanes[rank] if lane[0] == replica)
        return min(self.clock.count(self.last_kind, lane) for lane in lanes)

    def _flushed(self, action: Action, rank: int) -> bool:
        """Whether all forwards of a backward's group are done.

        The group is all micro-batches, or as many as fit into every rank's memory.
        """
        group = self.group
        total = self.task.micro_batches[action.replica]
        wanted = min(total, (action.micro_batch // group + 1) * group)
        return all(
            self.clock.count(Kind.FORWARD, lane) >= wanted
            for lane in self.task.lanes[rank]
            if lane[0] == action.replica
        )

    def _group(self) -> int:
        """Return how many micro-batches of every replica fit into all ranks at once."""
        group, cap = max(1, *self.task.micro_batches), self.task.memory_cap
        for fixed, needs in zip(self.fixed, self.needs, strict=True):
            need = sum(needs.values())
            if cap is not None and need:
                group = min(group, (cap - fixed) // need)
        return max(1, group)


def split_last_backwards(task: Task, timeline: Timeline) -> Timeline:
    """Return the timeline with weight gradients apart where an idle rank waits.

    It gets its gradients before those of weights exist:

        rank 0  .   .   0B3 --            rank 0  .   0B3 --
        rank 1  1B3 --                    rank 1  1B3 1W3

    `zb-h1` does it for all micro-batches (Qi et al. 2023, "Zero Bubble Pipeline
    Parallelism"). What weight gradients need stays a little longer: so it is done only
    where that does not raise the peak of the rank that holds most.
    """
    limit = max(timeline.peak_bytes)
    split = {
        Action(Kind.BACKWARD, stage, task.micro_batches[replica] - 1, replica)
        for replica, row in enumerate(task.placement)
        for stage in range(len(row))
        if task.has_backward and task.stages[stage].weight
    } - split_backwards(timeline.orders)
    while split:
        attempt = replay(task, [[*_with_weights(o, split)] for o in timeline.orders])
        useful = {
            action
            for action in _awaited(task, attempt, split)
            if attempt.peak_bytes[task.rank_of(action)] <= limit
        }
        if useful == split:
            return attempt
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
