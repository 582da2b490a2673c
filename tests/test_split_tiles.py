"""Tiles against the model as a whole: random networks, and each operation's corners."""

from __future__ import annotations

import pytest
from random_networks import random_case, seeds
from tile_support import assert_same, eager, on_tiles

pytestmark = pytest.mark.usefixtures("in_double")

PER_TEST = 10


def check(seed: int) -> bool:
    """Compare a random network with itself on tiles, unless its loss is not finite."""
    model, inputs, loss, target, grid = random_case(seed)
    expected = eager(model, inputs, loss, target)
    if not expected.is_finite:
        return False
    try:
        assert_same(on_tiles(model, inputs, loss, target, grid), expected)
    except BaseException as error:
        error.add_note(f"seed {seed}, grid {grid}, input {inputs[0].shape}: {model}")
        raise
    return True


@pytest.mark.parametrize("first", seeds(10, 300, PER_TEST))
def test_random_networks_on_tiles_are_the_networks(first: int) -> None:
    assert sum(map(check, range(first, first + PER_TEST))) >= PER_TEST - 1
