"""Stages on several ranks against one process: groups, transfers, sums, placements."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_parity import (
    FLOAT64,
    _default_dtype,  # noqa: F401
    worst_error,
)
from whole_tiles import WholeTiles

from gemsc.options import CompileOptions


def options(**choices: object) -> CompileOptions:
    return CompileOptions(**choices)  # type: ignore[arg-type]


PLANS = (
    options(ranks=4, tiles="2x2", micro_batches=2),
    options(ranks=2, tiles="2x1", micro_batches=3),
    options(ranks=4, tiles="2x1", micro_batches=4, schedule="1f1b"),
    options(ranks=6, tiles="3x1,2x1", micro_batches=3, schedule="gpipe"),
    options(ranks=4, tiles="2x1,2x1", micro_batches=3),
    options(ranks=4, tiles="2x1", schedule="mast"),
    options(ranks=4, tiles="2x1", schedule="master", times=2),
    options(ranks=4, tiles="2x1,2x1", schedule="chimera", micro_batches=4),
    options(ranks=3, tiles="1x2", micro_batches=3, placement="folded"),
    options(ranks=3, tiles="2x1", schedule="interleaved", micro_batches=4),
    options(ranks=3, tiles="2x1", data=2, micro_batches=2),
    options(ranks=3, tiles="2x1", data=2, schedule="master", times=2),
)


@pytest.fixture
def _whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemsc.passes.pipeline.SplitTiles", WholeTiles)


@pytest.mark.usefixtures("_whole")
@pytest.mark.parametrize("plan", PLANS[::2], ids=CompileOptions.command_line)
def test_grids_that_compute_everything_on_each_tile(
    plan: CompileOptions, tmp_path: Path
) -> None:
    assert worst_error("densecnn", plan, tmp_path / "program", num_steps=2) <= FLOAT64


CASES = [
    *(("unet", PLANS[index]) for index in (0, 4, 6, 8, 9, 11)),
    *(("resnet18", plan) for plan in PLANS[::6]),
    *(("densecnn", plan) for plan in PLANS[2::4]),
    *(("tiled", plan) for plan in (*PLANS[:4], PLANS[5], PLANS[7], PLANS[10])),
    ("tiled", options(ranks=6, tiles="2x2,2x1", micro_batches=2, cuts=("fc",))),
    ("tiled", options(ranks=4, tiles="2x1,1x2", micro_batches=2, cuts=("around",))),
    ("tiled", options(ranks=6, tiles="3x2", micro_batches=2, fuse_halos="3")),
    ("unet", options(ranks=4, tiles="2x2", micro_batches=2, fuse_halos="3")),
    ("resnet18", options(ranks=3, tiles="1x2", micro_batches=2, fuse_halos="2")),
    ("resnet18", options(ranks=2, tiles="2x1", micro_batches=2, fuse_halos="off")),
]


@pytest.mark.parametrize(
    ("name", "plan"),
    CASES,
    ids=[f"{name} {plan.command_line()}" for name, plan in CASES],
)
def test_grids_compute_what_one_process_does(
    name: str, plan: CompileOptions, tmp_path: Path
) -> None:
    assert worst_error(name, plan, tmp_path / "program", num_steps=2) <= FLOAT64
