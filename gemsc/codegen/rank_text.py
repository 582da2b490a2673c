"""What there is to write for one rank: its runs, steps and messages."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from gemsc.base.parts import Part, parts_of, sums_in_order
from gemsc.base.units import show_bytes, show_flops
from gemsc.codegen.writer import in_docstring
from gemsc.compilation import Compilation, TileProgram
from gemsc.errors import InternalError
from gemsc.ir.changes import Change, unjoined_changes
from gemsc.ir.flow import StageFlow, message_tag, reductions, segments_of, value_names
from gemsc.ir.program import GraphInput, Placement, Program, Segment, Transfer
from gemsc.schedules.action import Kind
from gemsc.schedules.loops import Step, expand
from gemsc.schedules.rank_step import Event

TRUNKS = {
    "whole": "what is between is whole",
    "batch": "what is between is split by samples",
    "sequence": "what is between is split by tokens",
}
Orders = Sequence[Sequence[Event]]
Segments = tuple[tuple[Segment, tuple[fx.Node, ...]], ...]


@dataclass(frozen=True, slots=True)
class StageText:
    """What `write_stage` needs to know of one stage.

    `twins` maps each node to its like in the graph for evaluation; where the two graphs
    differ in more than constants it is None and the class gets a second forward, for
    `evaluation`. `segments` are blocks that are recomputed or offloaded, with their
    nodes. `advances` is what makes, without data, the changes of forward that belong to
    the micro-batches of other replicas.
    """

    docstring: str
    program: Program
    flow: StageFlow
    owned: tuple[str, ...]
    names: dict[fx.Node, str]
    twins: dict[fx.Node, fx.Node] | None
    evaluation: StageFlow
    segments: Segments = ()
    advances: tuple[fx.Node, ...] = ()
    advances_eval: tuple[fx.Node, ...] = ()
    tile: int | None = None  # of the stage's grid, if it has one

    @property
    def class_name(self) -> str:
        """The name of its class."""
        return f"Stage{self.flow.index}"

    def note_of(self, *names: str) -> str:
        """Return what the rank has of the first of these that is cut, for a comment."""
        shards = self.program.shards.get(self.flow.index)
        for cut in shards.cut if shards is not None else ():
            if cut.name in names:
                assert self.tile is not None
                return ("of " if cut.parts[0].dim else "") + cut.told(self.tile)
        return ""

    @property
    def noun(self) -> str:
        """What its ranks compute: tiles or shards."""
        return self.program.require_placement().grid(self.flow.index).noun

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
        return f"stage{self.stage.flow.index}{'_mirrored' * self.replica}"


@dataclass(frozen=True, slots=True)
class RankText:
    """What `write_rank` needs to know."""

    rank: int
    docstring: Sequence[str]
    program: Program
    evaluation: Program
    runs: tuple[RunText, ...]
    steps: tuple[Step, ...]
    num_micro_batches: int
    num_replicas: int
    reductions: dict[str, tuple[int, ...]]
    parts: dict[str, Part]
    placed: dict[str, int]
    names: dict[fx.Node, str]
    tile: int | None = None  # of the grid that the rank is in, if any
    torch_compile: bool = False
    order: tuple[Sequence[Event], Sequence[Event]] = ((), ())  # training, evaluation

    def sums_of(self, stage: int) -> list[str]:
        """Return the sums of a stage's gradients that the rank takes part in."""
        return [key for key in sums_in_order([stage]) if key in self.reductions]

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
        sizes = (leaf.spec.shape[0] for leaf in self.program.inputs if leaf.spec.shape)
        return bool(item.spec.shape) and item.spec.shape[0] == next(sizes)

    @property
    def placement(self) -> Placement:
        """Where the stages are."""
        return self.program.require_placement()

    def ranks(self, replica: int, stage: int) -> tuple[int, ...]:
        """Return the ranks of a stage, by tile."""
        return self.placement.ranks[replica][stage]

    @property
    def grid(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The rank's grid: the parts along each axis, and its ranks."""
        run = self.runs[0]
        stage = run.stage.flow.index
        return self.placement.grid(stage).axes, self.ranks(run.replica, stage)

    def tag(self, replica: int, index: int) -> int:
        """Return the tag of a transfer's values; its gradients have the next one."""
        return message_tag(replica, index, self.program, self.evaluation)


def rank_text(
    compilation: Compilation, rank: int, orders: tuple[Orders, Orders]
) -> RankText:
    """Return what there is to write for a rank.

    `orders` are those of all groups' communication, in training and in evaluation.
    """
    plan = compilation.plan
    placement = compilation.program.require_placement()
    group = next(i for i, ranks in enumerate(placement.groups) if rank in ranks)
    ranks = placement.groups[group]
    tile = ranks.index(rank) if len(ranks) > 1 else None
    both = compilation.tiles[tile or 0]
    program = both.program
    names = value_names(_transfers(both), _transfers(compilation.tiles[0]))
    runs = tuple(
        RunText(replica, _stage_text(compilation, both, stage.index, names, rank, tile))
        for replica in range(placement.num_replicas)
        for stage in program.require_stages()
        if rank in placement.ranks[replica][stage.index]
    )
    return RankText(
        rank=rank,
        docstring=_docstring(compilation, rank, runs, tile),
        program=program,
        evaluation=both.evaluation,
        runs=runs,
        steps=compilation.steps[group],
        num_micro_batches=plan.micro_batches // plan.replicas,
        num_replicas=plan.replicas,
        reductions=_reductions(compilation, rank),
        parts={n: p for n, p in compilation.parts(rank).items() if p.share < 1},
        placed=compilation.placed(rank),
        names=names,
        tile=tile,
        torch_compile=plan.torch_compile,
        order=(orders[0][group], orders[1][group]),
    )


def _transfers(both: TileProgram) -> tuple[Transfer, ...]:
    """Return the transfers of training and of evaluation."""
    return *(both.program.transfers or ()), *(both.evaluation.transfers or ())


def _reductions(compilation: Compilation, rank: int) -> dict[str, tuple[int, ...]]:
    """Return what a rank adds up, each with the ranks that hold the same of it."""
    placement, sums = compilation.program.require_placement(), {}
    for key, stages in reductions(compilation.program, compilation.owned).items():
        places = sorted({rank for s in stages for rank in placement.ranks_of(s)})
        if rank not in places:
            continue
        tied = key in compilation.shared
        names = (
            {key} if tied else {*compilation.owned[stages[0]]} - {*compilation.shared}
        )
        held = [
            {n: p for n, p in compilation.parts(place).items() if n in names}
            for place in places
        ]
        ours = held[places.index(rank)]
        alike = [r for r, theirs in zip(places, held, strict=True) if theirs == ours]
        sums[key] = alike if tied else places
        if ours and not tied:
            sums[parts_of(key)] = alike
    data = compilation.plan.data
    return {key: tuple(r) for key, r in sums.items() if len(r) * data > 1}


def _stage_text(
    compilation: Compilation,
    both: TileProgram,
    index: int,
    names: dict[fx.Node, str],
    rank: int,
    tile: int | None,
) -> StageText:
    stage = compilation.program.require_stages()[index]
    blocks = _span([block.name for block in stage.blocks])
    flow, evaluation = both.flow(index), both.evaluation_flow(index)
    for value, node in (*flow.joined.items(), *evaluation.joined.items()):
        names[node] = names[value]
    changed = compilation.missed_changes
    return StageText(
        docstring=in_docstring(f"Stage {index}: {blocks}."),
        program=both.program,
        flow=flow,
        owned=compilation.held(rank, index),
        names=names,
        twins=both.twins,
        evaluation=evaluation,
        segments=segments_of(both.program, flow),
        advances=_advances(changed[0], both.program, flow),
        advances_eval=_advances(changed[1], both.evaluation, evaluation),
        tile=tile,
    )


def _advances(
    changed: Sequence[Change], program: Program, stage: StageFlow
) -> tuple[fx.Node, ...]:
    """Return what makes a stage's changes of other replicas' micro-batches, in order.

    `changed` are those of the whole program, of which the rank runs `program`.

    Raises:
        InternalError: a pass has spread what makes them over several ranks.
    """
    if not changed:
        return ()
    made = unjoined_changes(program, settled=True)
    known = {change.name: change.again for change in made}
    sources = program.graph.find_nodes(op="get_attr")
    here = {str(source.target) for source in sources if source.users}
    changed = [c for c in changed if c.name in here]  # branches are elsewhere
    for change in changed:
        if not known.get(change.name):
            raise InternalError(f"no rank alone can change '{change.name}' again")
    makers = {node for change in changed for node in known[change.name]}
    return tuple(node for node in stage.nodes if node in makers)


def _docstring(
    compilation: Compilation, rank: int, runs: tuple[RunText, ...], tile: int | None
) -> list[str]:
    plan = compilation.plan
    stages = ", ".join(str(run.stage.flow.index) for run in runs)
    word = "stage" if len(runs) == 1 else "stages"
    what = f"{word} {stages}"
    if tile is not None:
        stage = plan.stages[runs[0].stage.flow.index]
        form = " x ".join(map(str, stage.grid.axes))
        what = f"{stage.grid.noun} {tile} of {form}, {what}"
    lines = [
        in_docstring(f"Rank {rank} of {plan.ranks}: {what} of {plan.model}."),
        "Written by gemsc; do not edit, compile again:",
        *textwrap.wrap(
            in_docstring(plan.command),
            width=84,
            initial_indent=" " * 4,
            subsequent_indent=" " * 8,
            break_long_words=False,
            break_on_hyphens=False,
        ),
        "",
    ]
    for run in runs:
        stage = plan.stages[run.stage.flow.index]
        lines.append(
            f"Stage {stage.index}: {show_flops(stage.flops)} forward, "
            f"{show_bytes(stage.parameter_bytes)} of parameters,"
        )
        saved = show_bytes(stage.cost.saved_bytes)
        if tile is None:
            lines.append(f"{saved} kept for each micro-batch.")
            continue
        noun, sent = stage.grid.noun, show_bytes(stage.halo_bytes)
        sums = stage.sums // len(stage.ranks)
        talk = f"{sums} sums and {stage.messages} messages, forward and backward."
        lines += [
            f"{saved} kept for each micro-batch by the {noun} that keeps most;",
            talk
            if stage.grid.beside > 1
            else f"{sent} from {noun} to {noun} in forward.",
        ]
        if (shards := run.stage.program.shards.get(stage.index)) is not None:
            cut = dict.fromkeys(tensor.told(tile) for tensor in shards.cut)
            held = ", ".join([*cut, *shards.branches_of(tile)]) or "no branch"
            here = f"Here: {held}; {TRUNKS[shards.trunk]}."
            lines += textwrap.wrap(here, 84, subsequent_indent="    ")
    return lines


def _span(names: list[str]) -> str:
    if len(names) <= 3:
        return ", ".join(names)
    return f"{names[0]} to {names[-1]}, {len(names)} blocks"
