"""Tiles whose blocks are recomputed or offloaded: the same numbers, less memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parity_support import lowered, options, trained
from plan_support import metered_peaks
from random_networks import random_case
from threads import run_on_threads

import gemsc
from gemsc.options import CompileOptions
from gemsc.plan import Plan
from gemsc.verify.compare import compare

PLANS = (
    options(ranks=2, tiles="2x1", micro_batches=3),
    options(ranks=4, tiles="2x2", micro_batches=2, overlap_halos=False),
    options(ranks=4, tiles="2x1", micro_batches=4, fuse_halos=3),
    options(ranks=4, tiles="2x1,1x2", micro_batches=2),
    options(ranks=4, tiles="2x1", schedule="master", times=2),
    options(ranks=6, tiles="1x2", data=2, micro_batches=2),
)
CASES = [
    *(("tiled", plan) for plan in PLANS if plan.schedule != "master"),
    *(("unet", plan) for plan in PLANS[2::2]),
    *(("resnet10", plan) for plan in PLANS[3:4]),
]


def fullest(plan: Plan, measured: Sequence[int]) -> list[int]:
    """Return what the fullest tile of each grid holds, of all copies."""
    copies = range(0, len(measured), plan.copy_ranks)
    return [
        max(measured[copy + rank] for copy in copies for rank in members)
        for members in plan.members
    ]


@pytest.mark.slow(1)
@pytest.mark.by_day(2)
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(
            name,
            plan,
            id=f"{name} {plan.command_line()}",
            marks=() if name == "tiled" else pytest.mark.nightly,
        )
        for name, plan in CASES
    ],
)
def test_they_change_no_bit_and_free_what_was_predicted(
    name: str, plan: CompileOptions, tmp_path: Path
) -> None:
    float32 = torch.float32
    expected, kept = trained(name, plan, tmp_path / "kept", float32)
    for way in ("recompute", "offload"):
        choice = replace(plan, **{way: ("all",)})
        record, program = trained(name, choice, tmp_path / way, float32)
        diff = compare(record, expected)
        assert diff.equal == diff.total  # gradients, parameters, running statistics
        assert record.losses == expected.losses
        leaner = program.plan
        assert fullest(leaner, record.activation_bytes) == leaner.activation_bytes
        peaks: object = metered_peaks(leaner)
        if leaner.replicas > 1:
            peaks = pytest.approx(metered_peaks(leaner), rel=0.005)
        assert fullest(leaner, record.peak_bytes) == peaks
        assert sum(leaner.activation_bytes) < sum(kept.plan.activation_bytes)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["unet"])
def test_auto_fits_tiles_into_a_cap(name: str, tmp_path: Path) -> None:
    plan = options(ranks=4, tiles="2x2", micro_batches=2)
    kept, least = (
        max(lowered(name, replace(plan, recompute=names)).plan.peak_bytes)
        for names in ((), ("all",))
    )
    cap = (kept + least) // 2
    choice = replace(plan, recompute=("auto",), device_memory=cap)
    record, program = trained(name, choice, tmp_path / "leaner", torch.float32)
    assert any(stage.recompute for stage in program.plan.stages)
    assert max(record.peak_bytes) <= max(program.plan.peak_bytes) <= cap


@pytest.mark.by_day(1)
@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("seed", [4, 17, 31, 39, 45])
def test_random_networks_hold_what_was_predicted(seed: int, tmp_path: Path) -> None:
    """Some resize by weights that stay; the tile that saves most is not the fullest."""
    model, (x,), loss, target, grid = random_case(seed)
    program = gemsc.compile(
        model,
        (x,),
        loss=loss,
        example_target=target,
        ranks=math.prod(grid),
        tiles=("x".join(map(str, grid)),),
        micro_batches=2,
        recompute=("all",),
    )
    program.write(tmp_path)
    batch = (torch.cat([x, x]),), torch.cat([target, target])
    record = run_on_threads(tmp_path, program.plan.ranks, [batch])
    assert fullest(program.plan, record.activation_bytes) == (
        program.plan.activation_bytes
    )
