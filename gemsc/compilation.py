"""What a compilation knows: traced, split, and all decided before text is written."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from torch import fx

from gemsc.base.parts import Part, by_path
from gemsc.ir.changes import Change, unjoined_changes
from gemsc.ir.constants import changing_tensors
from gemsc.ir.flow import (
    StageFlow,
    flow,
    owned_tensors,
    shared_parameters,
    used_tensors,
)
from gemsc.ir.program import Program
from gemsc.plan import Plan, rank_file
from gemsc.schedules.loops import Step
from gemsc.weights.elsewhere import Elsewhere


@dataclass(frozen=True)
class Traced:
    """A model as a graph cut into blocks, for any number of ranks.

    `evaluation` is the graph in evaluation mode; `twins` maps nodes of the one to nodes
    of the other if they differ in constants only. `facts` are those of tiles that it
    was split into: see `Annotate`. `elsewhere` are tensors that other graphs of the
    model change; `beside` are these graphs, in both modes where those differ, by name.
    One that `is_phase` trains some of the weights.
    """

    program: Program
    evaluation: Program
    twins: dict[fx.Node, fx.Node] | None
    facts: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)
    elsewhere: frozenset[str] = frozenset()
    beside: dict[str, Program] = field(default_factory=dict, repr=False, compare=False)
    is_phase: bool = False

    @cached_property
    def changing(self) -> frozenset[str]:
        """The buffers and parameters that forward changes in any graph."""
        return self.elsewhere.union(
            changing_tensors(self.program), changing_tensors(self.evaluation)
        )

    @property
    def graphs(self) -> tuple[Program, ...]:
        """The graph, and that of evaluation if it computes something else."""
        is_other = self.twins is None and self.evaluation is not self.program
        return (self.program, self.evaluation) if is_other else (self.program,)


@dataclass(frozen=True)
class TileProgram:
    """What the ranks of one tile run: their part of training and evaluation.

    `twins` maps each node to its like in the graph traced in evaluation mode; None if
    the two graphs differ in more than constants.
    """

    program: Program
    evaluation: Program
    twins: dict[fx.Node, fx.Node] | None

    def flow(self, stage: int) -> StageFlow:
        """Return a stage as a function, for training (and evaluation if twins)."""
        return flow(self.program, stage, with_outputs=self.twins is not None)

    def evaluation_flow(self, stage: int) -> StageFlow:
        """Return a stage as a function for evaluation."""
        return flow(self.evaluation, stage, with_outputs=True)


@dataclass(frozen=True)
class Followed:
    """A graph that another one follows; see `FollowStages`.

    `twins` are the other one's nodes by the names of the first one's, if they differ in
    constants only.
    """

    compilation: Compilation
    twins: dict[str, fx.Node] | None


@dataclass(frozen=True)
class Compilation:
    """A program with its evaluation, its schedule and its plan.

    `tiles` are what the tiles of the largest grid run, `whole` alone if no stage is
    split. `steps` are the actions of each group of ranks in one training step, with
    their loops found. `files` are the rank files, once they are proved. `variants` are
    further graphs of the model by their names, with the same stages: the phases of a
    step, other shapes. One of them has its `name`, and of a stage's tensors those that
    it uses. The plan is that of the `largest`.
    """

    whole: TileProgram
    tiles: tuple[TileProgram, ...]
    steps: tuple[tuple[Step, ...], ...]
    plan: Plan
    files: dict[str, str] = field(default_factory=dict)
    name: str = ""
    variants: Mapping[str, Compilation] = field(default_factory=dict)
    largest: str = ""
    elsewhere: Elsewhere | None = None

    @property
    def program(self) -> Program:
        """The program for training, no stage split."""
        return self.whole.program

    @property
    def shown(self) -> Program:
        """The program whose plan this is."""
        return self.variants.get(self.largest, self).program

    @property
    def evaluation(self) -> Program:
        """The program for evaluation, no stage split."""
        return self.whole.evaluation

    @cached_property
    def owned(self) -> tuple[tuple[str, ...], ...]:
        """The parameters and buffers of each stage."""
        others = () if self.whole.twins is not None else (self.evaluation,)
        return owned_tensors(self.program, *others)

    @cached_property
    def missed_changes(self) -> tuple[tuple[Change, ...], tuple[Change, ...]]:
        """What each replica changes for others, in training and in evaluation."""
        if self.plan.replicas * self.plan.data == 1:
            return (), ()
        both = self.program, self.evaluation
        find = partial(unjoined_changes, settled=self.plan.replicas > 1)
        training, evaluation = (tuple(find(program)) for program in both)
        return training, evaluation

    def parts(self, rank: int) -> dict[str, Part]:
        """Return what not all ranks of a rank's grid hold as it does, by all names.

        That is what it has a part of, and all of what it alone holds.
        """
        stages, tile = self._place(rank)
        parts = self.tiles[tile].program.parts
        held = {n: parts[n] for i in stages for n in self.owned[i] if n in parts}
        held = {name: part for name, part in held.items() if part.share}
        pairs = self.program.aliases.items()
        return held | {alias: held[name] for alias, name in pairs if name in held}

    def placed(self, rank: int) -> dict[str, int]:
        """Return which tile of a rank's grid alone holds what, by paths: `by_path`.

        On tiles, that is each time one of those that share the rank's part of pictures.
        """
        stages, _ = self._place(rank)
        placed = self._placed(rank, *stages)
        aliases = self.program.aliases
        names = {a: a for owned in self.owned for a in owned} | aliases
        by_name = {n: placed[first] for n, first in names.items() if first in placed}
        return by_path(by_name, names)

    def held(self, rank: int, stage: int) -> tuple[str, ...]:
        """Return the parameters and buffers that a rank has of one of its stages."""
        (_, tile), placed = self._place(rank), self._placed(rank, stage)
        names = tuple(n for n in self.owned[stage] if placed.get(n, tile) == tile)
        if not self.name:
            return names
        programs = self.program, self.evaluation
        used = {
            name
            for program in programs
            for name in used_tensors(program, program.require_stages()[stage].nodes)
        }
        return tuple(n for n in names if n in used or n in self.shared)

    def with_owned(self, owned: tuple[tuple[str, ...], ...]) -> Compilation:
        """Return the same where each stage holds these parameters and buffers."""
        program = replace(self.program, owned=owned)
        whole = replace(self.whole, program=program)
        is_whole = len(self.tiles) == 1 and self.tiles[0].program is self.program
        return replace(self, whole=whole, tiles=(whole,) if is_whole else self.tiles)

    def all_files(self) -> dict[str, str]:
        """Return the text of each file, those of the variants included."""
        files = dict(self.files)
        for name, variant in self.variants.items():
            texts = enumerate(variant.files.values())
            files |= {rank_file(rank, name): text for rank, text in texts}
        return files

    def _place(self, rank: int) -> tuple[list[int], int]:
        """Return the stages that a rank runs, and which tile of their grid it is."""
        placement = self.program.require_placement()
        grid = next(ranks for ranks in placement.groups if rank in ranks)
        stages = {i for row in placement.ranks for i, r in enumerate(row) if rank in r}
        return sorted(stages), grid.index(rank)

    def _placed(self, rank: int, *stages: int) -> dict[str, int]:
        """Return which tile of a rank's grid alone holds each tensor of branches.

        It is one of those that share the rank's part of pictures.
        """
        _, tile = self._place(rank)
        shards = [s for i, s in self.program.shards.items() if i in stages]
        return {
            name: tile - tile % shard.count + member
            for shard in shards
            for name, member in shard.placed
        }

    @cached_property
    def shared(self) -> dict[str, tuple[int, ...]]:
        """Trained parameters that several stages hold, and those stages."""
        return shared_parameters(self.program, self.owned)
