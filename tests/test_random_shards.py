"""Random networks on shards are the networks: loss, gradients and statistics."""

from __future__ import annotations

import random
import re

import pytest
from random_networks import is_fixed, seeds
from random_shards import ShardCase, random_shards
from shard_support import on_shards
from tile_support import Step, assert_same, eager

from gemsc.errors import GemscError

pytestmark = [
    pytest.mark.usefixtures("in_double"),
    pytest.mark.filterwarnings("ignore:Full backward hook"),
]
PER_TEST = 6
NOTHING = "nothing in stage 0 can be cut"


def step_of(case: ShardCase, whole: tuple[str, ...]) -> Step:
    """Run a step; where too little can be cut, do what the error says."""
    model, inputs, target = case.model, case.inputs, case.target
    shards, trunk = case.shards, case.trunk
    while True:
        try:
            return on_shards(model, inputs, case.loss, target, shards, trunk, whole)
        except GemscError as error:
            advice = re.search(r"--whole (\S+)", str(error))
            if advice is None or advice[1] in whole:
                raise
            whole += tuple(advice[1].split(","))


def check(seed: int) -> int:
    """Compare a random network with itself; return how many tensors were cut."""
    case = random_shards(seed)
    rng = random.Random(seed)
    names = [name for name, _ in case.model.named_parameters()]
    few = rng.random() < 0.3
    whole = tuple(name for name in names if few and rng.random() < 0.3)
    try:
        step = step_of(case, whole)
    except GemscError as error:
        if NOTHING in str(error):
            return 0
        error.add_note(f"seed {seed}")
        raise
    expected = eager(case.model, case.inputs, case.loss, case.target)
    try:
        assert_same(step, expected)
    except AssertionError as error:
        error.add_note(f"seed {seed}")
        raise
    return len(step.programs[0].parts)


@pytest.mark.parametrize("first", seeds(6, 300, PER_TEST))
def test_random_networks_on_shards_are_the_networks(first: int) -> None:
    cut = list(map(check, range(first, first + PER_TEST)))
    if is_fixed(first):
        assert sum(count > 0 for count in cut) >= PER_TEST - 2
        assert sum(cut) >= 2 * PER_TEST
