"""Run a model as shards on threads: lowered, but without any text written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from program_support import run_passes
from tile_support import Step, on_ranks, one_stage
from torch import Tensor, nn

from gemsc.base.grid_shape import GridShape
from gemsc.costs.hardware import LinkSpeed
from gemsc.frontend.record import record
from gemsc.ir.program import Program
from gemsc.passes.annotate import Annotate
from gemsc.passes.canonicalize import Canonicalize
from gemsc.passes.choose_shards import ChooseShards
from gemsc.passes.find_halos import FindHalos
from gemsc.passes.overlap_halos import OverlapHalos
from gemsc.passes.separate_towers import SeparateTowers
from gemsc.passes.split_tiles import SplitTiles

__all__ = ["FREE", "on_branches", "on_mesh", "on_shards", "sharded"]

LINK = LinkSpeed(latency=1e-6, bandwidth=3e9)
FREE = LinkSpeed(latency=0.0, bandwidth=1e18)  # over which every fork gains


def sharded(
    model: nn.Module,
    inputs: tuple[Any, ...],
    loss: Callable[..., Tensor],
    target: Any,
    shards: int,
    trunk: str,
    keep_whole: tuple[str, ...] = (),
) -> tuple[Program, list[Program]]:
    """Return the program of one stage, and that of each of its ranks."""
    traced = record(model, inputs, loss=loss, target=target)
    return _lowered(traced, GridShape(shards=shards), LINK, trunk, keep_whole)


def _lowered(
    traced: Program,
    grid: GridShape,
    link: LinkSpeed,
    trunk: str,
    keep_whole: tuple[str, ...] = (),
    fuse: int = 0,
) -> tuple[Program, list[Program]]:
    grids = (grid,)
    traced = run_passes(traced, (Canonicalize(), Annotate(), SeparateTowers()))
    whole = one_stage(traced)
    choose = ChooseShards(grids, link, trunk, keep_whole)
    whole = run_passes(whole, (Annotate(), choose, FindHalos(grids, fuse)))
    ranks = range(grid.size)
    return whole, [run_passes(whole, (SplitTiles(grids, rank),)) for rank in ranks]


def on_shards(
    model: nn.Module,
    inputs: tuple[Any, ...],
    loss: Callable[..., Tensor],
    target: Any,
    shards: int,
    trunk: str,
    keep_whole: tuple[str, ...] = (),
) -> Step:
    """Run one step on shards, each a thread; put the parts together."""
    whole, ranks = sharded(model, inputs, loss, target, shards, trunk, keep_whole)
    return on_ranks(whole, ranks, inputs, target)


def on_mesh(
    model: nn.Module,
    inputs: tuple[Any, ...],
    loss: Callable[..., Tensor],
    target: Any,
    grid: GridShape,
    keep_whole: tuple[str, ...] = (),
    fuse: int = 0,
) -> Step:
    """Run one step on ranks that share pictures and channels; halos may be fused."""
    traced = record(model, inputs, loss=loss, target=target)
    whole, ranks = _lowered(traced, grid, FREE, "auto", keep_whole, fuse)
    if fuse:
        ranks = [OverlapHalos().apply(rank) for rank in ranks]
    return on_ranks(whole, ranks, inputs, target)


def on_branches(
    model: nn.Module,
    inputs: tuple[Any, ...],
    loss: Callable[..., Tensor],
    target: Any,
    grid: GridShape,
    trunk: str,
    keep_whole: tuple[str, ...] = (),
) -> tuple[Step, int]:
    """Run one step on ranks that share branches; return how many forks, too."""
    traced = record(model, inputs, loss=loss, target=target)
    whole, ranks = _lowered(traced, grid, FREE, trunk, keep_whole)
    forks = sum(not fork.reason for fork in whole.shards[0].forks)
    return on_ranks(whole, ranks, inputs, target), forks
