"""What ranks exchange: messages between stages, and sums of gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gemsc.schedules.action import Kind

__all__ = ["Channel", "Reduction"]


@dataclass(frozen=True, slots=True)
class Channel:
    """Messages of one kind, one for each micro-batch, all with the same tag.

    Stage `source` sends and stage `dest` receives: values go to a later stage after
    each forward, gradients (`gradient`) to an earlier one after each backward.
    `signature` is what both ends must agree on, such as shapes and dtypes. A message
    has `num_bytes`.
    """

    tag: int
    source: int
    dest: int
    gradient: bool = False
    replica: int = 0
    signature: tuple[Any, ...] = ()
    num_bytes: int = 0

    @property
    def kind(self) -> Kind:
        """The kind of the actions that send and that need the messages."""
        return Kind.BACKWARD if self.gradient else Kind.FORWARD

    def __str__(self) -> str:
        what = "gradients" if self.gradient else "values"
        replica = f" of replica {self.replica}" if self.replica else ""
        return (
            f"{what} from stage {self.source} to {self.dest}{replica}, tag {self.tag}"
        )


@dataclass(frozen=True, slots=True)
class Reduction:
    """A group of parameters whose gradients are summed over ranks, once per step.

    `stages` are the (replica, stage) pairs that hold the parameters.
    """

    group: str
    ranks: frozenset[int]
    stages: tuple[tuple[int, int], ...]
