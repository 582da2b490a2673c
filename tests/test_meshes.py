"""Tiles and shards of one stage: random networks, and what both cut, are the model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from parity import against_one_process
from random_meshes import random_mesh
from random_networks import is_fixed, seeds
from shard_support import on_mesh
from tile_support import Step, assert_same, eager
from torch import Tensor, nn

from gemsc.base.grid_shape import GridShape
from gemsc.errors import GemscError

PER_TEST = 6
MESH = GridShape((2, 1), shards=2)


def step_of(seed: int) -> tuple[Step, Step] | None:
    """Return a network's step on a mesh and in one process; None if none is cut."""
    model, inputs, loss, target, grid = random_mesh(seed)
    whole: tuple[str, ...] = ()
    fuse = 2 * (seed % 2)
    while True:
        try:
            step = on_mesh(model, inputs, loss, target, grid, whole, fuse)
        except GemscError as error:
            advice = re.search(r"--whole (\S+)", str(error))
            if advice is None:
                assert "nothing in stage 0 can be cut" in str(error)
                return None
            whole += tuple(advice[1].split(","))
        else:
            return step, eager(model, inputs, loss, target)


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("first", seeds(12, 300, PER_TEST))
def test_random_networks_on_tiles_of_shards_are_the_networks(first: int) -> None:
    cut = 0
    for seed in range(first, first + PER_TEST):
        found = step_of(seed)
        if found is None or not found[1].is_finite:
            continue
        cut += len(found[0].programs[0].parts)
        try:
            assert_same(*found)
        except AssertionError as error:
            error.add_note(f"seed {seed}: {random_mesh(seed)[0]}")
            raise
    assert not is_fixed(first) or cut >= PER_TEST
