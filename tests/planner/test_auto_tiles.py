"""`--tiles auto`: grids that are tried beside layer splits, and the one that wins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parity_support import options, traced
from plan_support import assess, search
from threads import run_on_threads
from torch import nn

from gemsc.codegen.package import write_directory
from gemsc.compiler import Traced, lower, trace
from gemsc.errors import GemscError
from gemsc.options import AUTO
from gemsc.search.candidates import alternatives, grids


def test_grids_for_ranks_and_pictures() -> None:
    assert grids(4, (64, 64)) == [(1, 2), (2, 1), (2, 2), (1, 4), (4, 1)]
    assert grids(3, (64, 64)) == [(1, 2), (2, 1), (1, 3), (3, 1)]
    assert grids(4, (64, 8))[0] == (2, 1)  # the shorter edge comes first
    assert grids(8, (16, 16, 16))[-3:][0] == (2, 2, 2)
    assert grids(4, (2, 2)) == [(1, 2), (2, 1), (2, 2)]
    assert grids(8, ()) == []
    assert grids(1, (64, 64)) == []


def test_every_grid_has_its_ranks() -> None:
    plan = options(ranks=4, tiles="auto", data=AUTO, micro_batches=8, schedule="auto")
    choices = alternatives(plan, (64, 64))
    assert {o.tiles for o in choices if o.copy_ranks == 4} == {
        (),
        *((grid,) for grid in ("1x2", "2x1", "2x2", "1x4", "4x1")),
    }
    assert {o.tiles for o in choices if o.copy_ranks == 1} == {()}
    alone = [o for o in choices if o.tiles == ("2x2",)]
    assert len(alone) == 1  # one stage: schedules are all the same


def test_grids_that_copies_have_no_ranks_for_are_left_out() -> None:
    plan = options(ranks=4, tiles="4x1", data=AUTO, micro_batches=4)
    assert [(o.ranks, o.data) for o in alternatives(plan)] == [(4, 1)]


@pytest.fixture(scope="module")
def pictures() -> Traced:
    """Return two convolutions whose activations are nearly all that they need."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1)
    )
    return trace(
        model,
        (torch.randn(1, 1, 128, 128),),
        loss=nn.functional.mse_loss,
        example_target=torch.randn(1, 1, 128, 128),
        check=False,
    )


def test_a_picture_that_fits_on_no_layer_split_is_split_itself(
    pictures: Traced, tmp_path: Path
) -> None:
    plan = options(ranks=2, micro_batches=1, schedule="auto", placement="auto")
    layers = search(pictures, plan)
    cap = int(0.8 * min(c.peak_bytes for c in layers if not c.problem))
    alone = options(ranks=2, micro_batches=1, schedule="auto", device_memory=cap)
    with pytest.raises(GemscError, match="no schedule fits"):
        search(pictures, alone)
    capped = replace(alone, tiles=("auto",))
    program = lower(pictures, capped)
    assert program.candidates[0].name.startswith("tiles ")
    assert program.plan.stages[0].tiles in ([2, 1], [1, 2])
    assert max(program.plan.peak_bytes) <= cap
    write_directory(program.compilation, tmp_path)
    batches = [((torch.randn(1, 1, 128, 128),), torch.randn(1, 1, 128, 128))] * 2
    record = run_on_threads(tmp_path, 2, batches, dtype=torch.float32)
    assert max(record.peak_bytes) <= cap


@pytest.mark.nightly
def test_two_tiles_of_a_grid_tell_what_all_of_them_do() -> None:
    chosen = options(ranks=4, tiles="4x1", micro_batches=2)
    unet = traced("unet")
    two, exact = (assess(unet, chosen, every_tile=every) for every in (False, True))
    assert two.peak_bytes == pytest.approx(exact.peak_bytes, rel=0.03)
    assert two.seconds == pytest.approx(exact.seconds, rel=0.03)
    plan = lower(traced("unet"), chosen).plan
    assert exact.peak_bytes == max(plan.peak_bytes)
