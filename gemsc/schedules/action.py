"""What a schedule is made of: actions, the task to be scheduled, the timeline."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from gemsc.base.cost import Edge, StageCost
from gemsc.errors import InternalError

_MARK = "'"
_TEXT = re.compile(r"(\d+)([FBW])(\d+)('*)")


class Kind(StrEnum):
    """What an action computes.

    BACKWARD is the whole backward, unless there is a WEIGHT of the same micro-batch:
    then that one computes the weight gradients, and BACKWARD the rest.
    """

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"


@dataclass(frozen=True, slots=True)
class Action:
    """One stage's work on one micro-batch of one replica.

    As text: `2F0` is the forward of stage 2 on micro-batch 0; each ' after it counts
    one replica up: `2F0'` is the same in replica 1.
    """

    kind: Kind
    stage: int
    micro_batch: int
    replica: int = 0

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}{_MARK * self.replica}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action that `str()` wrote as `text`.

        Raises:
            ValueError: the text is no action.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"'{text}' is not an action; an action looks like 2F0")
        stage, kind, micro_batch, marks = match.groups()
        return cls(Kind(kind), int(stage), int(micro_batch), len(marks))


@dataclass(frozen=True)
class Task:
    """What one training step has to do, and where.

    `placement[replica][stage]` is a rank, `micro_batches[replica]` their number.
    `memory_cap` bounds the bytes of each rank: resident ones of all its stages, and
    saved ones of what is in flight. Without backward nothing stays in flight.
    `workspace_bytes` are what libraries take of each rank, all the time. Where weights
    are kept in parts, those of `whole_stages` stages of a rank at most are whole.
    """

    stages: tuple[StageCost, ...]
    edges: tuple[Edge, ...]
    placement: tuple[tuple[int, ...], ...]
    micro_batches: tuple[int, ...]
    has_backward: bool = True
    memory_cap: int | None = None
    workspace_bytes: int = 0
    whole_stages: int = 0

    def __post_init__(self) -> None:
        if len(self.placement) != len(self.micro_batches):
            raise InternalError("the replicas of placement and micro_batches differ")
        if any(len(ranks) != len(self.stages) for ranks in self.placement):
            raise InternalError("the placement has not one rank for each stage")
        for edge in self.edges:
            if not 0 <= edge.source < edge.dest < len(self.stages):
                raise InternalError(f"{edge} does not lead to a later stage")

    @property
    def evaluation(self) -> Task:
        """Forwards alone, all of them in the first replica."""
        total = (sum(self.micro_batches),)
        row = self.placement[:1]
        return replace(
            self,
            placement=row,
            micro_batches=total,
            has_backward=False,
            memory_cap=None,
        )

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of actions that there may be, in the order of one micro-batch."""
        return tuple(Kind) if self.has_backward else (Kind.FORWARD,)

    @cached_property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return 1 + max(rank for replica in self.placement for rank in replica)

    @cached_property
    def lanes(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each rank the (replica, stage) pairs that it runs."""
        lanes: list[list[tuple[int, int]]] = [[] for _ in range(self.num_ranks)]
        for replica, ranks in enumerate(self.placement):
            for stage, rank in enumerate(ranks):
                lanes[rank].append((replica, stage))
        return tuple(map(tuple, lanes))

    @cached_property
    def inputs(self) -> tuple[tuple[Edge, ...], ...]:
        """For each stage the edges that lead to it."""
        return tuple(
            tuple(e for e in self.edges if e.dest == s) for s in range(len(self.stages))
        )

    @cached_property
    def outputs(self) -> tuple[tuple[Edge, ...], ...]:
        """For each stage the edges that begin there."""
        return tuple(
            tuple(e for e in self.edges if e.source == s)
            for s in range(len(self.stages))
        )

    @cached_property
    def stages_to_end(self) -> tuple[int, ...]:
        """For each stage the stages on the longest path from it to an end, with it."""
        length = [1] * len(self.stages)
        for stage in reversed(range(len(self.stages))):
            for edge in self.outputs[stage]:
                length[stage] = max(length[stage], 1 + length[edge.dest])
        return tuple(length)

    def rank_of(self, action: Action) -> int:
        """The rank, or the grid of ranks, that does an action."""
        return self.placement[action.replica][action.stage]

    def is_last(self, action: Action) -> bool:
        """Whether it is the last of its kind for its stage in the step."""
        return action.micro_batch + 1 == self.micro_batches[action.replica]

    def stages_on(self, rank: int) -> list[StageCost]:
        """Return the stages of a rank; replicas of one stage share their weights."""
        return [self.stages[s] for s in sorted({s for _, s in self.lanes[rank]})]

    def resident_bytes(self, rank: int) -> int:
        """Return the bytes that are on a rank all the time."""
        resident = sum(stage.resident_bytes for stage in self.stages_on(rank))
        return resident + self.workspace_bytes

    def fixed_bytes(self, rank: int, *, split: bool) -> int:
        """Return what a rank may need besides what is saved of micro-batches.

        `split` says whether all backwards are.
        """
        stages = self.stages_on(rank)
        whole = sorted(stage.gathered_bytes for stage in stages)[-self.whole_stages :]
        whole.append(max((stage.packed_bytes for stage in stages), default=0))
        return (
            self.resident_bytes(rank)
            + (sum(whole) if self.whole_stages else 0)
            + sum(stage.gradient_bytes for stage in stages)
            + sum(sum(self.posted[r][s]) for r, s in self.lanes[rank])
            + max((_on_top(stage, split=split) for stage in stages), default=0)
        )

    @cached_property
    def posted(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each replica and stage the bytes of the receives that it posts ahead.

        First those of values, then those of gradients.
        """
        return tuple(
            tuple(self._posted(ranks, stage) for stage in range(len(self.stages)))
            for ranks in self.placement
        )

    def _posted(self, ranks: Sequence[int], stage: int) -> tuple[int, int]:
        received = [e for e in self.inputs[stage] if ranks[e.source] != ranks[stage]]
        sent = [e for e in self.outputs[stage] if ranks[e.dest] != ranks[stage]]
        values = sum(edge.value_bytes for edge in received)
        return values, sum(edge.gradient_bytes for edge in sent if edge.gradient)


def _on_top(stage: StageCost, *, split: bool) -> int:
    """Return what a backward, or a part of one, needs on top of what is saved."""
    whole = stage.on_top(split=split, is_first=False)
    whole += stage.working(split=split, is_first=False)
    weights = stage.weight_working_bytes if split else 0
    return max(whole, weights, stage.scatter_bytes)


@dataclass(frozen=True, slots=True)
class Timed:
    """An action with its predicted begin and end in seconds."""

    action: Action
    start: float
    end: float


def split_backwards(orders: Iterable[Iterable[Action]]) -> set[Action]:
    """Return the backwards whose weight gradients are actions of their own."""
    return {
        replace(action, kind=Kind.BACKWARD)
        for order in orders
        for action in order
        if action.kind is Kind.WEIGHT
    }


@dataclass(frozen=True, slots=True)
class Timeline:
    """What each rank does and when, as predicted.

    `peak_bytes` are all bytes of a rank, `peak_activation_bytes` the saved and
    transient ones, `peak_live` counts the forwards of any stage whose backward is not
    yet done: each the largest at any time, for each rank.
    """

    ranks: tuple[tuple[Timed, ...], ...]
    makespan: float
    peak_bytes: tuple[int, ...]
    peak_live: tuple[int, ...]
    peak_activation_bytes: tuple[int, ...] = ()

    @property
    def orders(self) -> tuple[tuple[Action, ...], ...]:
        """The actions of all ranks, in order."""
        return tuple(tuple(timed.action for timed in rank) for rank in self.ranks)

    @property
    def bubble(self) -> float:
        """The share of the ranks' time, 0 to 1, in which they have nothing to do."""
        total = self.makespan * len(self.ranks)
        busy = sum(timed.end - timed.start for rank in self.ranks for timed in rank)
        return 1.0 - busy / total if total else 0.0

    def grid(self, unit: float | None = None) -> str:
        """Return a picture: a row for each rank, a column for each unit of time.

        Without a unit it is the shortest action. `--` goes on with the action before,
        `.` is idle time:

            rank 0  0F0 0F1 .   .   0B0 --
            rank 1  .   1F0 1B0 --  1F1 1B1
        """
        lengths = [t.end - t.start for rank in self.ranks for t in rank]
        unit = unit or min((s for s in lengths if s > 0), default=1.0)
        columns = max(1, round(self.makespan / unit))
        rows = [[""] * columns for _ in self.ranks]
        for row, rank in zip(rows, self.ranks, strict=True):
            for timed in rank:
                first = min(columns - 1, round(timed.start / unit))
                last = min(columns, max(first + 1, round(timed.end / unit)))
                row[first:last] = [str(timed.action), *["--"] * (last - first - 1)]
        width = max(len(cell) for row in rows for cell in row)
        return "\n".join(
            f"rank {rank}  "
            + " ".join((cell or ".").ljust(width) for cell in row).rstrip()
            for rank, row in enumerate(rows)
        )
