"""The pipeline: which passes run, in which order, with which options."""

from __future__ import annotations

from gemsc.ir.flow import owned_tensors
from gemsc.ir.program import Program
from gemsc.options import CompileOptions
from gemsc.passes.annotate import Annotate
from gemsc.passes.balance_stages import BalanceStages
from gemsc.passes.base import Pass
from gemsc.passes.canonicalize import Canonicalize
from gemsc.passes.check_statistics import CheckStatistics
from gemsc.passes.detect_skips import DetectSkips
from gemsc.passes.follow_stages import FollowStages
from gemsc.passes.group_blocks import GroupBlocks
from gemsc.passes.insert_comms import InsertComms
from gemsc.passes.mark_segments import MarkSegments
from gemsc.passes.place_stages import PlaceStages
from gemsc.planner.hardware import Device
from gemsc.planner.layout import Layout

__all__ = ["evaluation_passes", "graph_passes", "stage_passes"]


def graph_passes(device: Device | None = None) -> tuple[Pass, ...]:
    """Return the passes that find out what the graph is made of."""
    return (
        Canonicalize(),
        Annotate(device=device),
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
        ),
        PlaceStages(
            chosen.placement, options.ranks, chosen.num_replicas, chosen.explicit
        ),
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
