"""A training step of many copies of the model on many nodes, simulated.

The schedule engine plays one copy; how long its messages travel depends on which of its
ranks share a node. The sums of gradients over all copies start when a stage's last
backward is done everywhere, run one after the other on each rank, and hide behind what
the rank still computes. Nothing disturbs the ranks: no operating system, no other jobs,
no data loading. Real efficiencies are therefore lower.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gemsc.costs.hardware import Hardware, Interface, Network
from gemsc.planner.ending import (
    Held,
    StageSum,
    ends_of_sums,
    gradient_sums,
    times_of_sums,
    update_seconds,
)
from gemsc.schedules import Edge, Policy, Task, Timeline, run, split_last_backwards


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One step of `copies` copies of the model.

    The seconds are those of the rank that is done last: they add up to the step.
    `sum_seconds` is what of the gradients' sums nothing hides.
    """

    copies: int
    ranks: int
    nodes: int
    samples: int
    busy_seconds: float
    idle_seconds: float
    sum_seconds: float
    update_seconds: float
    algorithms: tuple[str, ...]

    @property
    def step_seconds(self) -> float:
        """The time from the first forward to the last update."""
        ending = self.sum_seconds + self.update_seconds
        return self.busy_seconds + self.idle_seconds + ending

    @property
    def throughput(self) -> float:
        """Samples per second of all copies."""
        return self.samples / self.step_seconds

    def efficiency(self, base: Point) -> float:
        """Return the throughput of a copy, as a share of that in another simulation."""
        return self.throughput / self.copies / (base.throughput / base.copies)


@dataclass
class Simulator:
    """Plays one step for any number of copies.

    `task` is what one copy does, its edges with their bytes; `gradients` who holds
    those of each stage; `samples` how many samples one copy takes in a step. `groups`
    are the ranks that the task takes for one, by default one each. `defers` says
    whether a step's last backwards leave weight gradients for later, as in a program.
    """

    task: Task
    policy: Policy
    hardware: Hardware
    gradients: Sequence[Sequence[Held]]
    samples: int
    shares_update: bool = False  # by the ranks that hold the same weights
    groups: tuple[tuple[int, ...], ...] = ()
    defers: bool = True
    sums_early: bool = True  # inside of last backwards
    _played: dict[tuple[Edge, ...], Timeline] = field(default_factory=dict)

    def point(self, copies: int) -> Point:
        """Return a step of `copies` copies, which fill the nodes in order."""
        size = self.num_ranks
        timelines = [self._play(edges) for edges in self._edges(copies)]
        sums = self._sums(copies)
        device = self.hardware.device
        algorithms = set().union(*(stage_sum.algorithms for stage_sum in sums))
        early = self.sums_early
        times = times_of_sums(self.task, timelines, sums, device, early=early)
        ends = ends_of_sums(self.task, times)
        points = []
        for timeline in timelines:
            for rank, actions in enumerate(timeline.ranks):
                last = max((timed.end for timed in actions), default=0.0)
                busy = sum(timed.end - timed.start for timed in actions)
                point = Point(
                    copies=copies,
                    ranks=copies * size,
                    nodes=-(-copies * size // self.network.ranks_per_node),
                    samples=copies * self.samples,
                    busy_seconds=busy,
                    idle_seconds=last - busy,
                    sum_seconds=max(0.0, ends[rank] - last),
                    update_seconds=update_seconds(self.task, rank, sums, device),
                    algorithms=tuple(sorted(algorithms)),
                )
                points.append(point)
        return max(points, key=lambda point: point.step_seconds)

    @property
    def num_ranks(self) -> int:
        """The ranks of one copy."""
        return sum(map(len, self.groups)) or self.task.num_ranks

    @property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """The rank of each stage in each replica; of a group the first one."""
        first = [ranks[0] for ranks in self.groups] or range(self.task.num_ranks)
        return tuple(tuple(first[g] for g in row) for row in self.task.placement)

    @property
    def network(self) -> Network:
        """What connects the ranks."""
        return self.hardware.network

    def timeline(self, copies: int = 1) -> Timeline:
        """Return the slowest copy's step, without sums and update."""
        timelines = [self._play(edges) for edges in self._edges(copies)]
        return max(timelines, key=lambda timeline: timeline.makespan)

    def _play(self, edges: tuple[Edge, ...]) -> Timeline:
        if edges not in self._played:
            task = replace(self.task, edges=edges)
            cap = task.memory_cap
            timeline = run(replace(task, memory_cap=None), self.policy)
            if cap is not None and max(timeline.peak_bytes) > cap:  # as planned
                timeline = run(task, self.policy)
            if self.defers:
                timeline = split_last_backwards(task, timeline)
            self._played[edges] = timeline
        return self._played[edges]

    def _edges(self, copies: int) -> list[tuple[Edge, ...]]:
        """Return the edges of each kind of copy: they lie differently on the nodes."""
        size, per_node = self.num_ranks, self.network.ranks_per_node
        crowds = [self._crowd(row, copies) for row in self.rows]
        slowest: dict[int, list[float]] = {}
        for first in range(0, copies * size, size):
            seconds = [self._message(edge, first, crowds) for edge in self.task.edges]
            known = slowest.setdefault(first % per_node, seconds)
            slowest[first % per_node] = list(map(max, known, seconds))
        return [
            tuple(
                replace(edge, seconds=seconds)
                for edge, seconds in zip(self.task.edges, of_kind, strict=True)
            )
            for of_kind in slowest.values()
        ]

    def _crowd(self, row: tuple[int, ...], copies: int) -> Counter[Interface]:
        """Count what passes each network interface if all stages send at once."""
        crowd: Counter[Interface] = Counter()
        for copy in range(copies):
            first = copy * self.num_ranks
            for edge in self.task.edges:
                ends = first + row[edge.source], first + row[edge.dest]
                crowd.update(self.network.interfaces(*ends))
        return crowd

    def _message(
        self, edge: Edge, first: int, crowds: Sequence[Counter[Interface]]
    ) -> float:
        """Return the seconds of a message, in the replica where it is slowest.

        A stage's messages all travel at once, so they share its network interface.
        """
        slowest = 0.0
        for row, crowd in zip(self.rows, crowds, strict=True):
            source, dest = first + row[edge.source], first + row[edge.dest]
            link = self.network.link(source, dest)
            interfaces = self.network.interfaces(source, dest)
            sharing = max((crowd[interface] for interface in interfaces), default=1)
            seconds = link.latency + sharing * edge.num_bytes / link.bandwidth
            slowest = max(slowest, seconds)
        return slowest

    def _sums(self, copies: int) -> list[StageSum]:
        """Return what the ranks of each stage add up."""
        held = self.gradients
        if not self.task.has_backward:
            held = [[((), 0)]] * len(held)
        return gradient_sums(
            self.network,
            held,
            self.num_ranks,
            copies,
            shares_update=self.shares_update,
        )
