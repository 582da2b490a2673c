"""The pipeline: which passes run, in which order, with which options."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from gemsc.costs.hardware import Device, read_hardware
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
from gemsc.passes.mark_segments import MarkSegments
from gemsc.passes.overlap_halos import OverlapHalos
from gemsc.passes.place_stages import PlaceStages
from gemsc.passes.spatial.halos import Halos
from gemsc.passes.split_tiles import SplitTiles, find_halos
from gemsc.planner.layout import StageLayout

__all__ = [
    "choose_halos",
    "evaluation_passes",
    "graph_passes",
    "stage_passes",
    "tile_programs",
]


def graph_passes(device: Device | None = None) -> tuple[Pass, ...]:
    """Return the passes that find out what the graph is made of."""
    return (
        Canonicalize(),
        Annotate(device=device),
        DetectSkips(),
        GroupBlocks(),
    )


def stage_passes(options: CompileOptions, chosen: StageLayout) -> tuple[Pass, ...]:
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
        MarkSegments(options.recompute, options.offload),
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


def choose_halos(program: Program, options: CompileOptions) -> Halos:
    """Return which values tiles have with a halo: inputs, and by `--fuse-halos`.

    With `--local-batchnorm` none are fused: rows that are computed twice would count
    twice.
    """
    placement = program.placement
    assert placement is not None
    if placement.num_tiles == 1:
        return Halos()
    layers = 0 if options.local_batchnorm else options.fuse_halos
    return find_halos(program, placement.grids, layers)


def tile_programs(
    program: Program,
    options: CompileOptions,
    halos: Halos,
    *,
    training: Program | None = None,
    tiles: Sequence[int] | None = None,
    first: Program | None = None,
    after_each: Observer | None = None,
) -> tuple[Program, ...]:
    """Return what the ranks of each tile run; without grids the program itself.

    `tiles` are those that are wanted, None for all; `first` is what the first tile
    runs, if that is known.

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
    device = read_hardware(options.hardware).device
    annotate = Annotate(device, training=training is None)
    local = (LocalBatchnorm(),) if options.local_batchnorm else ()
    overlaps = (OverlapHalos(),) if options.overlap_halos else ()
    found: list[Program] = []
    for tile in range(placement.num_tiles) if tiles is None else tiles:
        passes: tuple[Pass, ...] = (
            SplitTiles(placement.grids, tile, halos, training is None),
            *local,
            *overlaps,
            annotate,
            comms,
        )
        watch = after_each if tile == 0 else None  # the others differ in sizes only
        found.append(run_passes(program, passes, after_each=watch))
        first = first or found[0]
    return tuple(_packed_alike(first or found[0], each) for each in found)


def _packed_alike(first: Program, tile: Program) -> Program:
    """Return a tile's program with the transfers of the first tile's.

    Tiles send the same values; but sizes decide what travels packed, and those differ.
    """
    ours, theirs = _sent(tile), _sent(first)
    if {ends: len(values) for ends, values in ours.items()} != {
        ends: len(values) for ends, values in theirs.items()
    }:
        raise InternalError("the tiles of a grid do not send the same values")
    same = {
        value: mine
        for ends, values in theirs.items()
        for value, mine in zip(values, ours[ends], strict=True)
    }
    transfers = tuple(
        replace(transfer, values=tuple(same[value] for value in transfer.values))
        for transfer in first.transfers or ()
    )
    return replace(tile, transfers=transfers)


def _sent(program: Program) -> dict[tuple[int, int], list[fx.Node]]:
    """Return what goes from stage to stage, in the order in which it is computed."""
    order = {node: place for place, node in enumerate(program.graph.nodes)}
    values: dict[tuple[int, int], list[fx.Node]] = defaultdict(list)
    for transfer in program.transfers or ():
        values[transfer.source, transfer.dest] += transfer.values
    return {ends: sorted(sent, key=order.__getitem__) for ends, sent in values.items()}
