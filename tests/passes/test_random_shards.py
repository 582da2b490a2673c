"""Random networks on shards are the networks: loss, gradients and statistics."""

from __future__ import annotations

import random
import re

import pytest
import torch
import torch.nn.functional as F
from random_networks import is_fixed, seeds
from random_shards import ShardCase, random_shards
from shard_support import on_shards
from tile_support import Step, assert_same, eager
from torch import Tensor, nn

from gemsc.errors import GemscError

pytestmark = [
    pytest.mark.usefixtures("in_double"),
    pytest.mark.filterwarnings("ignore:Full backward hook"),
]
PER_TEST = 4
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
    return compare(random_shards(seed), seed)


def compare(case: ShardCase, seed: int) -> int:
    """Compare a network with itself; return how many tensors were cut."""
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


@pytest.mark.parametrize("first", seeds(4, 300, PER_TEST))
def test_random_networks_on_shards_are_the_networks(first: int) -> None:
    cut = list(map(check, range(first, first + PER_TEST)))
    if is_fixed(first):
        assert sum(count > 0 for count in cut) >= PER_TEST - 2
        assert sum(cut) >= 2 * PER_TEST


class Grouped(nn.Module):
    """Of the classes, each group of channels makes some."""

    def __init__(self, groups: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(3, 4, 1)
        self.second = nn.Conv1d(4, classes, 1, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


@pytest.mark.slow(2)
@pytest.mark.parametrize(("groups", "classes"), [(4, 8), (2, 8), (4, 4), (1, 8)])
def test_classes_of_groups_are_shared_in_one_run(groups: int, classes: int) -> None:
    target = torch.randint(classes, (2, 5))
    x, loss = torch.randn(2, 3, 5), nn.CrossEntropyLoss(label_smoothing=0.1)
    model = Grouped(groups, classes)
    assert compare(ShardCase(model, (x,), loss, target, 2, "whole"), seed=0)


class Factored(nn.Module):
    """Words are pairs, of each of which the model tells the first or the second."""

    def __init__(self, first: int, second: int, tells: str) -> None:
        super().__init__()
        self.form, self.tells = (first, second), tells
        self.words = nn.Embedding(first * second, 6)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids).flatten(0, 1)
        pairs = self.words.weight.view(*self.form, 6)
        scores = torch.einsum("nh,abh->nab", x, pairs)
        return scores if self.tells == "first" else scores.transpose(1, 2)


@pytest.mark.slow(2)
@pytest.mark.parametrize("tells", ["first", "second"])
@pytest.mark.parametrize(("first", "second"), [(2, 6), (3, 4)])
def test_words_that_are_pairs_are_shared_in_one_run(
    first: int, second: int, tells: str
) -> None:
    ids = torch.randint(first * second, (2, 5))
    classes, others = (first, second) if tells == "first" else (second, first)
    target = torch.randint(classes, (10, others))
    model = Factored(first, second, tells)
    compare(ShardCase(model, (ids,), F.cross_entropy, target, 2, "whole"), seed=0)


class Residual(nn.Module):
    """All that could be cut is as wide as the input that goes by."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.layer(x)
        return out


def test_a_refusal_says_what_is_as_wide_as_an_input() -> None:
    says = "layer.weight: an input of the model has this dimension"
    x, target = torch.randn(2, 64), torch.randn(2, 64)
    with pytest.raises(GemscError, match=f"{NOTHING}; {says}"):
        on_shards(Residual(), (x,), F.mse_loss, target, 2, "whole")
