"""Tiles against the model as a whole: random networks, and each operation's corners."""

from __future__ import annotations

import pytest
from random_networks import random_case
from tile_support import assert_same, eager, on_tiles

pytestmark = pytest.mark.usefixtures("in_double")

NUM_GRAPHS = 300
PER_TEST = 25


def check(seed: int) -> None:
    model, inputs, loss, target, grid = random_case(seed)
    expected = eager(model, inputs, loss, target)
    found = [expected.loss, *expected.inputs.values(), *expected.parameters.values()]
    if not all(value.isfinite().all() for value in found):
        return
    try:
        assert_same(on_tiles(model, inputs, loss, target, grid), expected)
    except BaseException as error:
        error.add_note(f"seed {seed}, grid {grid}, input {inputs[0].shape}: {model}")
        raise


@pytest.mark.parametrize("first", range(0, NUM_GRAPHS, PER_TEST))
def test_random_networks_on_tiles_are_the_networks(first: int) -> None:
    for seed in range(first, first + PER_TEST):
        check(seed)


def test_many_more_random_networks(request: pytest.FixtureRequest) -> None:
    for seed in range(
        NUM_GRAPHS, NUM_GRAPHS + request.config.getoption("--many-graphs")
    ):
        check(seed)
