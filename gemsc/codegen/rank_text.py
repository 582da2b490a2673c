"""What there is to write for one rank: its runs, steps and messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from gemsc.codegen.stage_text import StageText
from gemsc.ir.flow import message_tag
from gemsc.ir.program import Input, Program, Transfer
from gemsc.schedules.action import Kind
from gemsc.schedules.loops import Loop, Step

__all__ = ["RankText", "Run"]


@dataclass(frozen=True, slots=True)
class Run:
    """One stage of one replica on this rank."""

    replica: int
    stage: StageText

    @property
    def key(self) -> str:
        """The name that functions and weights have: `stage2`, `stage2_mirrored`."""
        suffix = {0: "", 1: "_mirrored"}.get(self.replica, f"_replica{self.replica}")
        return f"stage{self.stage.flow.index}{suffix}"


@dataclass(frozen=True, slots=True)
class RankText:
    """What `write_rank` needs to know."""

    rank: int
    num_ranks: int
    docstring: Sequence[str]
    program: Program
    evaluation: Program
    twin: bool
    runs: tuple[Run, ...]
    steps: tuple[Step, ...]
    num_micro_batches: int
    num_replicas: int
    reductions: dict[str, tuple[int, ...]]
    names: dict[fx.Node, str]
    tile: int | None = None  # of the grid that the rank is in, if any
    # by the keys of runs, of how many layers weight gradients wait in the last backward
    head_starts: Mapping[str, int] = field(default_factory=dict)

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are actions of their own."""
        bodies = (s.body if isinstance(s, Loop) else [(s, 0)] for s in self.steps)
        return any(a.kind is Kind.WEIGHT for body in bodies for a, _ in body)

    def transfers(self, run: Run) -> tuple[Transfer, ...]:
        """Return the transfers of a run, each once, in training and evaluation."""
        flows = run.stage.flow, run.stage.evaluation
        both = [t for flow in flows for t in (*flow.incoming, *flow.outgoing)]
        return tuple({transfer.index: transfer for transfer in both}.values())

    def is_batched(self, item: Input) -> bool:
        """Whether an input has samples in dimension 0, as the first input has."""
        sizes = (each.spec.shape[0] for each in self.program.inputs if each.spec.shape)
        return bool(item.spec.shape) and item.spec.shape[0] == next(sizes)

    def ranks(self, replica: int, stage: int) -> tuple[int, ...]:
        """Return the ranks of a stage, by tile."""
        placement = self.program.placement
        assert placement is not None
        return placement.ranks[replica][stage]

    @property
    def grid(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The rank's grid: tiles along each axis, and its ranks; () if it has none."""
        placement = self.program.placement
        assert placement is not None
        run = self.runs[0]
        stage = run.stage.flow.index
        return placement.grid(stage), self.ranks(run.replica, stage)

    def tag(self, replica: int, index: int) -> int:
        """Return the tag of a transfer's values; its gradients have the next one."""
        return message_tag(replica, index, self.program, self.evaluation)
