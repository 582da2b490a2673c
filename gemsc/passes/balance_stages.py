"""Balance stages: consecutive blocks become stages of about equal weight.

Example, five blocks of 1, 1, 2, 2 and 4 ms on three stages:
    [1 1 2] [2] [4]   # the least possible time of the slowest stage is 4 ms
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, combinations, pairwise

from gemsc.base.grid_shape import ALONE, GridShape
from gemsc.costs.hardware import LinkSpeed
from gemsc.errors import GemscError
from gemsc.ir import meta
from gemsc.ir.program import Block, Program, Stage
from gemsc.ir.segments import lies_in, module_paths
from gemsc.passes.base import Pass
from gemsc.passes.branches.choice import choose_forks
from gemsc.passes.group_blocks import (
    crossing_bytes,
    not_found,
    tower_bounds,
)
from gemsc.planner.partition import partition

FEW_BOUNDS = 6
GAIN = 1.02  # in a step, for cuts of which a stage is slower


@dataclass(frozen=True)
class BalanceStages(Pass):
    """Choose the cuts.

    kind: "compute", "memory" or "explicit", as in `CompileOptions`.
    live: how many micro-batches each stage holds at most under the schedule, which
        weighs the saved activations for "memory".
    parameter_copies: weights, gradients and optimizer state, in copies of the weights.
    grids: how ranks share each stage; it works as many times as fast as there are
        ranks, and each holds that part of the activations. The parameters are shared by
        shards only: each tile has all of them. Of ranks that share branches, those of
        each block say what part of its seconds, and so of its bytes, a rank has.
    link: what connects the ranks that share branches.
    rows: which ranks run each stage, `rows[replica][stage]`.
    micro_batches: how many each replica runs in a step.

    Stages can work at the same time on different micro-batches, and on the same one if
    they hold different towers. So the cuts with the least slowest stage and those at
    bounds of towers are compared by the longest path through the stages plus the time
    of the busiest rank for all micro-batches but one.
    """

    requires = ("facts", "towers", "blocks")
    provides = ("stages",)

    num_stages: int = 1
    kind: str = "compute"
    blocks: tuple[int, ...] = ()
    cuts: tuple[str, ...] = ()
    live: tuple[int, ...] = ()
    parameter_copies: int = 3
    grids: tuple[GridShape, ...] = ()
    link: LinkSpeed | None = None
    rows: tuple[tuple[int, ...], ...] = ()
    micro_batches: tuple[int, ...] = ()

    def apply(self, program: Program) -> Program:
        """Return the program with its stages.

        Raises:
            GemscError: an explicit split does not add up, or names a module that is
                not there.
        """
        blocks = program.blocks or ()
        if self.kind == "explicit":
            starts = self._explicit(blocks)
        else:
            starts = self._balanced(program, blocks)
        edges = [0, *starts, len(blocks)]
        stages = tuple(
            Stage(index, blocks[a:b]) for index, (a, b) in enumerate(pairwise(edges))
        )
        return replace(program, stages=stages)

    def _balanced(self, program: Program, blocks: Sequence[Block]) -> list[int]:
        nodes = [node for block in blocks for node in block.nodes]
        gaps = list(accumulate(len(block.nodes) for block in blocks[:-1]))
        carried = crossing_bytes(nodes)
        crossing = [carried[gap] for gap in gaps]
        grids = self.grids or (ALONE,) * self.num_stages
        known = {grid: self.shares(program, blocks, grid) for grid in set(grids)}
        shares = [known[grid] for grid in grids]
        if self.kind == "compute":
            seconds = [block.busy_seconds for block in blocks]
            rows = [
                [busy * share for busy, share in zip(seconds, row, strict=True)]
                for row in shares
            ]
            needs = _needs(blocks)
            towers = tower_bounds(program, {node: i for i, node in enumerate(nodes)})
            bounds = [index for index, gap in enumerate(gaps, 1) if gap in towers]
            splits = [
                partition(rows, cut_costs=crossing, begins=begins)
                for begins in _choices(bounds, self.num_stages - 1)
            ]
            steps = [self._step(starts, rows, needs) for starts in splits]
            shortest = min(steps)
            return splits[0 if GAIN * shortest > steps[0] else steps.index(shortest)]
        live = self.live or (1,) * self.num_stages
        rows = [
            [
                self.parameter_copies
                * block.total("parameter_bytes")
                * (share if grid.branches > grid.shards else 1 / grid.shards)
                + held * block.total("saved_bytes") * share
                for block, share in zip(blocks, row, strict=True)
            ]
            for held, grid, row in zip(live, grids, shares, strict=True)
        ]
        return partition(rows, cut_costs=crossing)

    def shares(
        self, program: Program, blocks: Sequence[Block], grid: GridShape
    ) -> list[float]:
        """Return the part of each block's seconds that the ranks of a grid take."""
        if grid.branches == 1 or grid.shards > 1 or self.link is None:
            return [1 / grid.size] * len(blocks)
        saved: dict[str, float] = {}  # the part of each node's seconds
        stage = Stage(0, tuple(blocks))
        for fork in choose_forks(program, stage, grid.branches, self.link):
            if not fork.reason:
                names = (name for branch in fork.branches for name in branch.nodes)
                saved |= dict.fromkeys(names, fork.saved / fork.seconds)
        shares = []
        for block in blocks:
            less = [meta.facts(n).seconds * saved.get(n.name, 0.0) for n in block.nodes]
            shares.append(1 - sum(less) / (block.busy_seconds or 1.0))
        return shares

    def _step(
        self,
        starts: Sequence[int],
        rows: Sequence[Sequence[float]],
        needs: Sequence[Collection[int]],
    ) -> float:
        """Return about how long a step takes; `needs` are the blocks of each block."""
        edges = [0, *starts, len(needs)]
        parts = list(pairwise(edges))
        seconds = [sum(row[a:b]) for row, (a, b) in zip(rows, parts, strict=True)]
        ends: list[float] = []
        for duration, (a, b) in zip(seconds, parts, strict=True):
            sources = {bisect(starts, need) for block in needs[a:b] for need in block}
            begin = max((ends[s] for s in sources if s < len(ends)), default=0.0)
            ends.append(begin + duration)
        placed = self.rows or (tuple(range(self.num_stages)),)
        counts = self.micro_batches or (1,) * len(placed)
        busy = dict.fromkeys(chain.from_iterable(placed), 0.0)
        for count, row in zip(counts, placed, strict=True):
            for rank, duration in zip(row, seconds, strict=True):
                busy[rank] += count * duration
        return max(ends) + max(busy.values()) * (1 - 1 / sum(counts))

    def _explicit(self, blocks: Sequence[Block]) -> list[int]:
        if self.cuts:
            return self._from_cuts(blocks)
        if len(self.blocks) != self.num_stages or min(self.blocks) < 1:
            raise GemscError(
                f"--blocks {_join(self.blocks)} is for {len(self.blocks)} stages, not "
                f"{self.num_stages}, each with at least one block",
                help="give one number of blocks for each stage",
            )
        if sum(self.blocks) != len(blocks):
            raise GemscError(
                f"--blocks {_join(self.blocks)} adds up to {sum(self.blocks)} blocks, "
                f"the model has {len(blocks)}: "
                + ", ".join(block.name for block in blocks),
                help=f"make the numbers add up to {len(blocks)}",
            )
        return [sum(self.blocks[: i + 1]) for i in range(self.num_stages - 1)]

    def _from_cuts(self, blocks: Sequence[Block]) -> list[int]:
        if len(self.cuts) != self.num_stages - 1:
            raise GemscError(
                f"--cuts {_join(self.cuts)} makes {len(self.cuts) + 1} stages, but "
                f"{self.num_stages} are needed",
                help=f"name {self.num_stages - 1} modules",
            )
        starts = [_block_that_begins(blocks, cut) for cut in self.cuts]
        if starts != sorted(set(starts)) or 0 in starts:
            raise GemscError(
                f"--cuts {_join(self.cuts)} are not in the order of the model",
                help="order: " + ", ".join(block.name for block in blocks[1:]),
            )
        return starts


def _join(values: Sequence[object]) -> str:
    return ",".join(map(str, values))


def _needs(blocks: Sequence[Block]) -> list[set[int]]:
    """Return, for each block, those whose values it uses."""
    block_of = {node: block.index for block in blocks for node in block.nodes}
    return [
        {block_of[s] for n in block.nodes for s in n.all_input_nodes if s in block_of}
        for block in blocks
    ]


def _choices(bounds: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """Return which bounds may be cut together; of many none or all of them."""
    few = len(bounds) <= FEW_BOUNDS
    counts = range(len(bounds) + 1) if few else (0, len(bounds))
    return [cuts for n in counts if n <= most for cuts in combinations(bounds, n)]


def _block_that_begins(blocks: Sequence[Block], path: str) -> int:
    """Return the first block that lies in module `path`."""
    for block in blocks:
        inside = [lies_in(module_path, path) for module_path in module_paths(block)]
        if not any(inside):
            continue
        if not inside[0] and block.name != path:
            raise GemscError(
                f"--cuts {path}: module '{path}' begins inside block '{block.name}', "
                "which must stay together",
                help=f"cut at '{block.name}' or after it",
            )
        return block.index
    raise not_found("cuts", path, blocks)
