"""Run a model as shards on threads: lowered, but without any text written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
from gemsc.passes.manager import run_passes
from gemsc.passes.split_tiles import SplitTiles

__all__ = ["on_shards", "sharded"]

LINK = LinkSpeed(latency=1e-6, bandwidth=3e9)


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
    grids = (GridShape(shards=shards),)
    traced = record(model, inputs, loss=loss, target=target)
    whole = one_stage(run_passes(traced, (Canonicalize(),)))
    choose = ChooseShards(grids, LINK, trunk, keep_whole)
    whole = run_passes(whole, (Annotate(), choose, FindHalos(grids)))
    ranks = [run_passes(whole, (SplitTiles(grids, rank),)) for rank in range(shards)]
    return whole, ranks


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
