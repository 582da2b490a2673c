"""What there is to write for one rank: its runs, steps and messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from gemsc.ir.flow import StageFlow, message_tag
from gemsc.ir.program import GraphInput, Program, Segment, Transfer
from gemsc.schedules.action import Kind
from gemsc.schedules.loops import Step, expand

__all__ = ["RankText", "RunText", "Segments", "StageText"]


Segments = tuple[tuple[Segment, tuple[fx.Node, ...]], ...]


@dataclass(frozen=True, slots=True)
class StageText:
    """What `write_stage` needs to know of one stage.

    `twins` maps each node to its like in the graph for evaluation; where the two graphs
    differ in more than constants it is None and the class gets a second forward, for
    `evaluation`. `structure` turns the texts of the outputs into what the model
    returns. `segments` are blocks that are recomputed or offloaded, with their nodes.
    """

    class_name: str
    docstring: str
    program: Program
    flow: StageFlow
    owned: tuple[str, ...]
    names: dict[fx.Node, str]
    twins: dict[fx.Node, fx.Node] | None
    evaluation: StageFlow
    structure: Callable[[list[str]], str]
    segments: Segments = ()
    tile: int | None = None  # of the stage's grid, if it has one

    @property
    def apart(self) -> bool:
        """Whether evaluation has a forward of its own."""
        return self.twins is None


@dataclass(frozen=True, slots=True)
class RunText:
    """One stage of one replica on this rank."""

    replica: int
    stage: StageText

    @property
    def key(self) -> str:
        """How functions of the file are named after it: `stage2`, `stage2_mirrored`."""
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
    runs: tuple[RunText, ...]
    steps: tuple[Step, ...]
    num_micro_batches: int
    num_replicas: int
    reductions: dict[str, tuple[int, ...]]
    names: dict[fx.Node, str]
    tile: int | None = None  # of the grid that the rank is in, if any

    def deferred(self, run: RunText) -> tuple[int, ...]:
        """Return the micro-batches whose weight gradients are actions of their own."""
        place = Kind.WEIGHT, run.replica, run.stage.flow.index
        actions = expand(self.steps)
        return tuple(
            a.micro_batch for a in actions if (a.kind, a.replica, a.stage) == place
        )

    def transfers(self, run: RunText) -> tuple[Transfer, ...]:
        """Return the transfers of a run, each once, in training and evaluation."""
        flows = run.stage.flow, run.stage.evaluation
        both = [t for flow in flows for t in (*flow.incoming, *flow.outgoing)]
        return tuple({transfer.index: transfer for transfer in both}.values())

    def is_batched(self, item: GraphInput) -> bool:
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
