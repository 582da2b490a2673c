"""Tiles that shards share: random networks on a mesh of ranks are the networks."""

from __future__ import annotations

import re

import pytest
from random_meshes import random_mesh
from random_networks import is_fixed, seeds
from shard_support import on_mesh
from tile_support import Step, assert_same, eager

from gemsc.errors import GemscError

pytestmark = pytest.mark.usefixtures("in_double")
PER_TEST = 6


def step_of(seed: int, whole: tuple[str, ...] = ()) -> Step | None:
    """Return a network's step on a mesh, every second with fused halos.

    None if nothing can be cut.
    """
    model, inputs, loss, target, grid = random_mesh(seed)
    try:
        return on_mesh(model, inputs, loss, target, grid, whole, fuse=2 * (seed % 2))
    except GemscError as error:
        advice = re.search(r"--whole (\S+)", str(error))
        if advice is None and "nothing in stage 0 can be cut" in str(error):
            return None
        if advice is None or advice[1] in whole:
            raise
        return step_of(seed, (*whole, *advice[1].split(",")))


@pytest.mark.parametrize("first", seeds(12, 300, PER_TEST))
def test_random_networks_on_tiles_of_shards_are_the_networks(first: int) -> None:
    cut = 0
    for seed in range(first, first + PER_TEST):
        model, inputs, loss, target, grid = random_mesh(seed)
        expected, step = eager(model, inputs, loss, target), step_of(seed)
        if step is None or not expected.is_finite:
            continue
        cut += len(step.programs[0].parts)
        try:
            assert_same(step, expected)
        except AssertionError as error:
            error.add_note(f"seed {seed}, {grid}: {model}")
            raise
    assert not is_fixed(first) or cut >= PER_TEST
