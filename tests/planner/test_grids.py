"""Stages on several ranks against one process: groups, transfers, sums, placements."""

from __future__ import annotations

from pathlib import Path

import pytest
from parity_support import FLOAT64, GRID_PLANS, options, worst_error
from whole_tiles import WholeTiles

from gemsc.options import CompileOptions


@pytest.fixture
def _whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemsc.lowering.stages.SplitTiles", WholeTiles)


@pytest.mark.slow
@pytest.mark.by_day(1)
@pytest.mark.usefixtures("_whole")
@pytest.mark.parametrize("plan", GRID_PLANS[::2], ids=CompileOptions.command_line)
def test_grids_that_compute_everything_on_each_tile(
    plan: CompileOptions, tmp_path: Path
) -> None:
    assert worst_error("densecnn", plan, tmp_path / "program", num_steps=2) <= FLOAT64


CASES = [
    *(("unet", GRID_PLANS[index]) for index in (0, 4, 6, 8, 9, 11)),
    *(("resnet10", plan) for plan in GRID_PLANS[::6]),
    *(("densecnn", plan) for plan in GRID_PLANS[2::4]),
    *(
        ("tiled", plan)
        for plan in (*GRID_PLANS[:4], GRID_PLANS[5], GRID_PLANS[7], GRID_PLANS[10])
    ),
    ("tiled", options(ranks=6, tiles="2x2,2x1", micro_batches=2, cuts=("fc",))),
    ("tiled", options(ranks=4, tiles="2x1,1x2", micro_batches=2, cuts=("around",))),
    ("tiled", options(ranks=6, tiles="3x2", micro_batches=2, fuse_halos=3)),
    ("unet", options(ranks=4, tiles="2x2", micro_batches=2, fuse_halos=3)),
    ("resnet10", options(ranks=3, tiles="1x2", micro_batches=2, fuse_halos=2)),
    ("resnet10", options(ranks=2, tiles="2x1", micro_batches=2)),
]


@pytest.mark.slow(1)
@pytest.mark.by_day(4)
@pytest.mark.parametrize(
    ("name", "plan"),
    CASES,
    ids=[f"{name} {plan.command_line()}" for name, plan in CASES],
)
def test_grids_compute_what_one_process_does(
    name: str, plan: CompileOptions, tmp_path: Path
) -> None:
    assert worst_error(name, plan, tmp_path / "program", num_steps=2) <= FLOAT64
