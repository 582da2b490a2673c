"""Choose shards: what the ranks of a stage share of its heads, features and words.

Example, an encoder's layer on two ranks:
    attention.qkv.weight   384 x 128: heads 0 to 2 of 4 on the first rank
    mlp.0.weight           512 x 128: features 0 to 256 of 512
    norm1.weight           whole: it normalizes over all features
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import fx

from gemsc.base.elementwise import check_elementwise
from gemsc.base.grid_shape import BESIDE, GridShape
from gemsc.costs.hardware import LinkSpeed
from gemsc.errors import GemscError
from gemsc.ir.flow import owned_tensors
from gemsc.ir.opaque import opaques
from gemsc.ir.program import Program, Stage
from gemsc.ir.shards import Placed, StageShards
from gemsc.passes.base import Pass
from gemsc.passes.branches.choice import choose_forks, placed_tensors
from gemsc.passes.follow_stages import FollowStages, find_twins
from gemsc.passes.shards.analysis import Analysis, analysis_of
from gemsc.passes.shards.choice import choose_cuts, not_cut_alike, saved_by_cuts
from gemsc.passes.shards.trunk import choose_trunk, least_split

Shards = dict[int, StageShards]  # by stage


@dataclass(frozen=True)
class ChooseShards(Pass):
    """Choose what is cut in each stage whose ranks share channels.

    `grids` are as for `SplitTiles`; `link` connects the ranks of a stage. `trunk` says
    how values outside of the regions are held, `keep_whole` what is not cut. A tied
    parameter is cut where all stages that hold it cut it alike. `row` has the group of
    ranks of each stage, by default one each. `placed` are the branches of each rank, by
    the joins of their forks, where they are not to be chosen. `others` are graphs that
    are cut alike, by what they are called: what one cannot cut so stays whole. `first`
    is the graph as it was traced, before its stages. There are `copies` of the model,
    all of whose ranks advice counts.
    """

    requires = ("stages", "facts")

    grids: tuple[GridShape, ...]
    link: LinkSpeed = field(hash=False)
    trunk: str = "auto"
    keep_whole: tuple[str, ...] = ()
    row: tuple[int, ...] = ()
    placed: Placed | None = field(default=None, hash=False)
    others: Mapping[str, Program] = field(
        default_factory=dict, compare=False, repr=False
    )
    first: Program | None = field(default=None, compare=False, repr=False)
    copies: int = field(default=1, compare=False, repr=False)

    def apply(self, program: Program) -> Program:
        """Return the program with its shards.

        Raises:
            GemscError: nothing in a stage can be cut, or not in this way, or the
                optimizer does not update what is cut element by element.
        """
        whole = dict.fromkeys(self.keep_whole, "--whole")
        owned = owned_tensors(program)
        twins = {
            name: {node.name: twin for node, twin in matched.items()}
            for name, other in self.others.items()
            if (matched := find_twins(self.first or program, other)) is not None
        }
        others = {
            name: FollowStages(program, owned, name, twins.get(name)).apply(other)
            for name, other in self.others.items()
        }
        while True:
            shards = {
                stage.index: self._choose(program, stage, whole)
                for stage in program.require_stages()
                if self.grids[stage.index].beside > 1
            }
            unlike = dict.fromkeys(
                _unlike(program, shards), "another stage cuts it otherwise"
            )
            for name, other in others.items():
                names = _whole_in(other, shards)
                unlike |= dict.fromkeys(names, f"{name} uses it as a whole")
            if not unlike:
                break
            whole |= unlike
        for name, other in others.items():
            named = {node.name: node for node in other.graph.nodes}
            like = {a: named[b.name] for a, b in twins.get(name, {}).items()}
            shards |= self._whole_trunks(program, shards, name, other, like)
        cut = [[tensor.name for tensor in stage.cut] for stage in shards.values()]
        if any(cut):
            check_elementwise(program.updated_whole(), *cut)
        return replace(program, shards=shards)

    def _choose(
        self, program: Program, stage: Stage, keep_whole: Mapping[str, str]
    ) -> StageShards:
        grid = self.grids[stage.index]
        analysis = analysis_of(program, stage)
        shards = self._shared(program, stage, keep_whole)
        if not shards.cut and not shards.rank_of:
            nothing = self._nothing(program, stage, shards, keep_whole)
            raise _with_opaques(nothing, program, stage)
        others = _elsewhere(program, stage)
        placed = placed_tensors(program, stage, shards.rank_of, others)
        shards = replace(shards, placed=placed)
        if not grid.tiles:
            trunk, split = choose_trunk(analysis, shards, self.trunk)
            return replace(shards, trunk=trunk, split=split)
        if self.trunk in ("batch", "sequence"):
            raise GemscError(
                f"--trunk {self.trunk}: tiles split the values of stage {stage.index}",
                help="leave out --trunk, or the tiles",
            )
        return shards

    def _shared(
        self, program: Program, stage: Stage, keep_whole: Mapping[str, str]
    ) -> StageShards:
        """Return what the ranks of a stage have to share, before its trunk."""
        grid = self.grids[stage.index]
        analysis = analysis_of(program, stage)
        shards = StageShards(grid.beside, "whole", ())
        if grid.branches > 1:
            shards = self._branches(program, stage, keep_whole)
        if grid.shards > 1 and shards.rank_of and self.placed is None:
            shards = self._either(analysis, shards, keep_whole)
        if grid.shards > 1:
            cut = analysis, grid.beside, self.link, keep_whole, shards.forks
            shards = choose_cuts(*cut)
        return shards

    def _whole_trunks(
        self,
        program: Program,
        shards: Shards,
        name: str,
        other: Program,
        twins: Mapping[str, fx.Node],
    ) -> Shards:
        """Return the stages that hold values whole as another shape has too few.

        Raises:
            GemscError: they are to be split.
        """
        whole = {}
        for index, stage_shards in shards.items():
            stages = (p.require_stages()[index] for p in (program, other))
            one, two = map(analysis_of, (program, other), stages)
            size = least_split(one, two, stage_shards, twins)
            if size < stage_shards.count and self.trunk != "auto":
                what = f"{stage_shards.trunk} splits a dimension of {size}"
                raise GemscError(
                    f"--trunk {what} over {stage_shards.count} ranks in {name}",
                    help="return more samples from example_inputs(), or use --trunk "
                    "whole",
                )
            if size < stage_shards.count:
                whole[index] = replace(stage_shards, trunk="whole", split=())
        return whole

    def _branches(
        self, program: Program, stage: Stage, keep_whole: Mapping[str, str]
    ) -> StageShards:
        count = self.grids[stage.index].branches
        forks = choose_forks(
            program,
            stage,
            count,
            self.link,
            keep_whole=keep_whole,
            placed=self.placed,
            tiles=prod(self.grids[stage.index].tiles),
        )
        return StageShards(count, "whole", (), forks=forks)

    def _either(
        self, analysis: Analysis, shards: StageShards, keep_whole: Mapping[str, str]
    ) -> StageShards:
        """Leave forks whole in which cuts of channels and heads save more."""
        cuts = choose_cuts(analysis, shards.count, self.link, keep_whole)
        saved = saved_by_cuts(analysis, cuts, self.link)
        forks = []
        for fork in shards.forks:
            by_cuts = sum(saved.get(name, 0.0) for name in fork.nodes)
            if not fork.reason and by_cuts > fork.saved:
                forks.append(replace(fork, reason="cuts of its layers save more"))
            else:
                forks.append(fork)
        return replace(shards, forks=tuple(forks))

    def _nothing(
        self,
        program: Program,
        stage: Stage,
        shards: StageShards,
        keep_whole: Mapping[str, str],
    ) -> GemscError:
        """Return the error where the ranks of a stage have nothing to share."""
        index = stage.index
        grid, why = self.grids[index], []
        given = [f"--{n} {grid.beside}" for n in BESIDE if getattr(grid, n) > 1]
        what, suffix, alone = "this stage", "", {index: GridShape(grid.tiles)}
        for other in program.require_stages()[index + 1 :]:
            if self.grids[other.index].beside > 1:
                shared = self._shared(program, other, keep_whole)
                if not shared.cut and not shared.rank_of:
                    what, suffix = f"{what} and stage {other.index}", " each"
                    alone[other.index] = GridShape(self.grids[other.index].tiles)
        what = f"each tile of {what}" if grid.tiles else what
        advice = [f"give {what} one rank{suffix}: {self._with(alone)}"]
        if grid.shards > 1:
            reasons = [f"{w.name}: {w.reason}" for w in shards.whole[:3]]
            why += [f"nothing in stage {index} can be cut", *reasons]
            if any(isinstance(n.target, torch._ops.OpOverload) for n in stage.nodes):
                advice.insert(0, "trace it with --frontend record, which keeps layers")
        if grid.branches > 1:
            best = max(shards.forks, key=lambda fork: fork.seconds, default=None)
            why.append(
                f"stage {index} has no branches: parts that meet in one tensor, such "
                "as x + y or torch.cat, not in several values nor in slots of one"
            )
            if best is not None:
                why[-1] = f"stage {index} gains nothing: {best.reason}"
            elif len({*program.outputs} & {*stage.nodes}) > 1:
                why.append("what meets only in the outputs of forward is none")
                advice.append("let forward return what joins its branches")
        layers = self._by_cuts(program, alone, keep_whole) if grid.shards == 1 else ""
        if layers:
            advice.append(f"split {'their' if suffix else 'its'} layers: {layers}")
        return GemscError(
            f"{' '.join(given)}: {'; '.join(why)}", help=", or ".join(advice)
        )

    def _by_cuts(
        self,
        program: Program,
        alone: Mapping[int, GridShape],
        keep_whole: Mapping[str, str],
    ) -> str:
        """Return the flags that cut the layers of stages; "" if one has none to cut."""
        stages = program.require_stages()
        cut = {i: replace(g, shards=self.grids[i].beside) for i, g in alone.items()}
        grids = tuple(cut.get(i, grid) for i, grid in enumerate(self.grids))
        trial = replace(self, grids=grids)
        can = all(trial._shared(program, stages[i], keep_whole).cut for i in cut)
        return self._with(cut) if can else ""

    def _with(self, shapes: Mapping[int, GridShape]) -> str:
        """Return the flags that give stages, and others of their ranks, such shapes."""
        row = self.row or tuple(range(len(self.grids)))
        groups = dict(zip(row, self.grids, strict=True))
        groups |= {row[stage]: shape for stage, shape in shapes.items()}
        grids = [groups[group] for group in sorted(groups)]
        flags = [
            f"--{name} {','.join(str(getattr(grid, name)) for grid in grids)}"
            for name in BESIDE
            if any(getattr(grid, name) > 1 for grid in grids)
        ]
        ranks = f"--ranks {self.copies * sum(grid.size for grid in grids)}"
        if flags:
            return " ".join((*flags, ranks))
        given = [n for n in BESIDE if any(getattr(g, n) > 1 for g in self.grids)]
        given += ["trunk"] * (self.trunk != "auto") + ["whole"] * bool(self.keep_whole)
        return f"{ranks} without {' and '.join(f'--{name}' for name in given)}"


def _with_opaques(error: GemscError, program: Program, stage: Stage) -> GemscError:
    """Let an error say which modules depend on data: nothing in them is cut."""
    targets = {node.target for node in stage.nodes}
    for path, known in opaques(program.module).items():
        if path in targets:
            error.add_note(f"'{path}' stays whole, for {known.at}: {known.why}")
            error.help = (
                f"{error.help}, or keep all sizes in '{path}' fixed, as experts that "
                "have a fixed number of places do"
            )
    return error


def _elsewhere(program: Program, stage: Stage) -> set[str]:
    """Return the parameters and buffers that other stages use."""
    names = enumerate(owned_tensors(program))
    return {n for index, used in names for n in used if index != stage.index}


def _whole_in(other: Program, shards: Shards) -> list[str]:
    """Return parameters that another graph does not cut as the first one does."""
    stages = other.require_stages()
    return [
        name
        for index, stage_shards in shards.items()
        for name in not_cut_alike(analysis_of(other, stages[index]), stage_shards)
    ]


def _unlike(program: Program, shards: Shards) -> set[str]:
    """Return tied parameters that the stages which hold them do not cut alike."""
    cuts = {
        index: {tensor.name: tensor.parts for tensor in stage.cut}
        for index, stage in shards.items()
    }
    unlike = set()
    for index, names in enumerate(owned_tensors(program)):
        for name in names:
            for parts in cuts.values():
                holders = name in parts
                if holders and parts[name] != cuts.get(index, {}).get(name):
                    unlike.add(name)
    return unlike
