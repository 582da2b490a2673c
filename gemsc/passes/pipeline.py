"""The pipeline: which passes run, in which order, with which options."""

from __future__ import annotations

from dataclasses import replace

from gemsc.errors import InternalError
from gemsc.ir.flow import owned_tensors
from gemsc.ir.program import Program
from gemsc.options import CompileOptions
from gemsc.passes.annotate import Annotate
from gemsc.passes.balance_stages import BalanceStages
from gemsc.passes.base import Pass
from gemsc.passes.canonicalize import Canonicalize
from gemsc.passes.check_statistics import CheckStatistics
from gemsc.passes.check_tiles import CheckTiles
from gemsc.passes.detect_skips import DetectSkips
from gemsc.passes.follow_stages import FollowStages
from gemsc.passes.group_blocks import GroupBlocks
from gemsc.passes.insert_comms import InsertComms
from gemsc.passes.local_batchnorm import LocalBatchnorm
from gemsc.passes.manager import Observer, run_passes
from gemsc.passes.place_stages import PlaceStages
from gemsc.passes.split_tiles import SplitTiles
from gemsc.planner.layout import Layout

__all__ = ["GRAPH_PASSES", "evaluation_passes", "stage_passes", "tile_programs"]

GRAPH_PASSES: tuple[Pass, ...] = (
    Canonicalize(),
    Annotate(),
    DetectSkips(),
    GroupBlocks(),
)


def stage_passes(options: CompileOptions, chosen: Layout) -> tuple[Pass, ...]:
    """Return the passes that turn blocks into stages that talk to each other."""
    return (
        BalanceStages(
            num_stages=chosen.num_stages,
            kind=options.balance,
            blocks=options.blocks,
            cuts=options.cuts,
            live=chosen.live,
            num_tiles=chosen.num_tiles,
        ),
        PlaceStages(
            chosen.placement,
            num_replicas=chosen.num_replicas,
            rows=chosen.rows,
            groups=chosen.groups,
        ),
        CheckTiles(),
        CheckStatistics(chosen.num_replicas * options.data),
        InsertComms(),
    )


def evaluation_passes(training: Program, *, twins: bool) -> tuple[Pass, ...]:
    """Return the passes that cut evaluation where training is cut.

    Twins share everything but the outputs, which travel in evaluation only.
    """
    known = training.transfers or ()
    if twins:
        return (InsertComms(outputs=True, known=known),)
    return (
        Annotate(training=False),
        FollowStages(training, owned_tensors(training)),
        InsertComms(outputs=True, first_index=len(known)),
    )


def tile_programs(
    program: Program,
    options: CompileOptions,
    *,
    training: Program | None = None,
    after_each: Observer | None = None,
) -> tuple[Program, ...]:
    """Return what the ranks of each tile run; without grids the program itself.

    With `training`, what the first tile runs in training, `program` is for evaluation:
    its outputs travel as well, and its transfers are numbered after those of training.
    """
    placement = program.placement
    assert placement is not None
    if placement.num_tiles == 1:
        return (program,)
    comms = InsertComms()
    if training is not None:
        comms = InsertComms(outputs=True, first_index=len(training.transfers or ()))
    local = (LocalBatchnorm(training is None),) if options.local_batchnorm else ()
    tiles = []
    for tile in range(placement.num_tiles):
        passes: tuple[Pass, ...] = (
            SplitTiles(placement.grids, tile, training=training is None),
            *local,
            comms,
        )
        watch = after_each if tile == 0 else None  # the others differ in sizes only
        tiles.append(run_passes(program, passes, after_each=watch))
    return tuple(_packed_alike(tiles[0], tile) for tile in tiles)


def _packed_alike(first: Program, tile: Program) -> Program:
    """Return a tile's program with the transfers of the first tile's.

    Tiles have the same nodes and talk in step; but sizes decide what travels packed,
    and those differ.
    """
    theirs, ours = list(first.graph.nodes), list(tile.graph.nodes)
    if [node.name for node in theirs] != [node.name for node in ours]:
        raise InternalError("the tiles of a grid do not run the same nodes")
    same = dict(zip(theirs, ours, strict=True))
    transfers = tuple(
        replace(transfer, values=tuple(same[value] for value in transfer.values))
        for transfer in first.transfers or ()
    )
    return replace(tile, transfers=transfers)
