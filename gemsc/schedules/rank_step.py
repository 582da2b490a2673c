"""What one rank does in one step, as plain data: what is proved of its file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gemsc.base.parts import Part, holder_of
from gemsc.schedules.action import Action, Kind


@dataclass(frozen=True, slots=True)
class MessageEnd:
    """One rank's end of messages: what it sends to a peer, or receives from it.

    The peer is the rank itself where a value goes from one of its stages to another.
    `values` say what travels, such as "x float32[16, 64]"; both ends must agree on it.
    `line` is the user's that computes it, "" where that is not known.
    """

    peer: int
    tag: int
    values: tuple[str, ...] = ()
    line: str = field(default="", compare=False)

    def __str__(self) -> str:
        at = f" of {self.line}" if self.line else ""
        return f"{', '.join(self.values)}{at}, tag {self.tag}"


@dataclass(frozen=True, slots=True)
class GridCall:
    """One call in which the tiles of a stage work together; it returns on all or none.

    `ranks` take part. Messages travel in both directions at once.
    """

    method: str
    ranks: tuple[int, ...]
    sends: tuple[MessageEnd, ...] = ()
    receives: tuple[MessageEnd, ...] = ()
    line: str = field(default="", compare=False)

    def __str__(self) -> str:
        at = f" ({self.line})" if self.line else ""
        return f"{self.method}{at}"


@dataclass(frozen=True, slots=True)
class StageRun:
    """One stage's work on a micro-batch, whichever: receive, compute, send.

    `calls` are those of its grid, in order. `lines` are the user's.
    """

    receives: tuple[MessageEnd, ...] = ()
    sends: tuple[MessageEnd, ...] = ()
    calls: tuple[GridCall, ...] = ()
    lines: str = ""


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Start to add up gradients over ranks: a stage's, its parts', a tied one's."""

    group: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"the all-reduce of '{self.group}'"


class End(StrEnum):
    """What ends a training step: wait for all-reduces, then let the optimizer step."""

    REDUCED = "the wait for all-reduces"
    UPDATED = "the update"


Step = Action | AllReduce | End


@dataclass(frozen=True)
class RankStep:
    """All that one rank does in a step, in order.

    `runs` has for each kind of action, by (kind, replica, stage), what it does. `tiles`
    are the ranks of its grid, the rank alone if its stages are not split. `deferred`
    are the weight gradients that its backwards leave for actions of their own. `parts`
    are the parameters and buffers of which it holds a part only; `placed` says by path
    which tile of the grid alone holds the others that not all hold.
    """

    rank: int
    runs: Mapping[tuple[Kind, int, int], StageRun]
    steps: tuple[Step, ...]
    tiles: tuple[int, ...]
    deferred: frozenset[Action] = frozenset()
    parts: Mapping[str, Part] = field(default_factory=dict)
    placed: Mapping[str, int] = field(default_factory=dict)

    @property
    def actions(self) -> list[Action]:
        """What it computes, in order."""
        return [step for step in self.steps if isinstance(step, Action)]

    def apart(self, names: Collection[str]) -> frozenset[tuple[str, Part | None]]:
        """Return which of some tensors it holds in part, or alone, then with None."""
        tile = self.tiles.index(self.rank)
        alone = {n for n in names if holder_of(n, self.placed) == tile}
        parts = {name: part for name, part in self.parts.items() if name in names}
        return frozenset([*parts.items(), *dict.fromkeys(alone).items()])

    def run(self, action: Action) -> StageRun:
        """Return what an action does."""
        return self.runs[action.kind, action.replica, action.stage]
