"""Random networks whose branches are on several ranks are the networks."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from random_branches import BranchCase, random_branches
from random_networks import is_fixed, seeds
from shard_support import on_branches
from tile_support import Step, assert_same, eager
from torch import Tensor, nn

from gemsc.base.grid_shape import GridShape
from gemsc.base.rng import same_draws
from gemsc.errors import GemscError

pytestmark = [
    pytest.mark.usefixtures("in_double", "drawn_alike"),
    pytest.mark.filterwarnings("ignore:Full backward hook"),
]
PER_TEST = 2


def run(case: BranchCase, whole: tuple[str, ...] = ()) -> tuple[Step, int]:
    """Run a step; where shards are too many for a layer, do what the error says."""
    given = case.model, case.inputs, case.loss, case.target
    try:
        return on_branches(*given, case.grid, case.trunk, whole)
    except GemscError as error:
        advice = re.search(r"--whole (\S+)", str(error))
        if advice is None or advice[1] in whole:
            raise
        return run(case, (*whole, *advice[1].split(",")))


def check(case: BranchCase) -> int:
    """Compare a network with itself; return how many forks were shared out."""
    step, forks = run(case)
    with same_draws():
        expected = eager(case.model, case.inputs, case.loss, case.target)
    assert_same(step, expected)
    return forks


def check_seed(seed: int) -> int:
    try:
        return check(random_branches(seed))
    except Exception as error:
        error.add_note(f"seed {seed}")
        raise


@pytest.mark.parametrize("first", seeds(2, 300, PER_TEST))
def test_random_branches_are_the_networks(first: int) -> None:
    shared = list(map(check_seed, range(first, first + PER_TEST)))
    assert not is_fixed(first) or sum(map(bool, shared)) >= PER_TEST - 1


class TwoForks(nn.Module):
    """Three branches, then two whose values `join` joins; three ranks share them."""

    def __init__(self, join: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = (
            nn.ModuleList(nn.Linear(6, 6) for _ in range(count)) for count in (3, 2)
        )
        self.join = join

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([branch(x) for branch in self.first]).amax(0)
        return self.join(*(branch(x) for branch in self.second))


JOINS = {
    "a rank without a branch": torch.maximum,
    "a branch without a gradient": lambda a, b: torch.where(a > 0, b, b.cos()),
}


@pytest.mark.parametrize("trunk", ["whole", "batch"])
@pytest.mark.parametrize("name", JOINS)
def test_ranks_without_a_gradient_wait_for_that_of_others(
    name: str, trunk: str
) -> None:
    torch.manual_seed(0)
    x, target = torch.randn(4, 6), torch.randn(4, 6)
    model = nn.Sequential(nn.Linear(6, 6), TwoForks(JOINS[name]))
    grid = GridShape(branches=3)
    assert check(BranchCase(model, (x,), F.mse_loss, target, grid, trunk)) == 2


class GatedAfterwards(nn.Module):
    """Two experts, and then the weights of both."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.gate = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        outputs = [expert(x) for expert in self.experts]
        weights = self.gate(x).softmax(-1)
        return sum(weights[..., i, None] * y for i, y in enumerate(outputs))


@pytest.mark.parametrize("trunk", ["whole", "batch"])
def test_weights_computed_after_their_branches_stay_outside(trunk: str) -> None:
    torch.manual_seed(0)
    x, target = torch.randn(4, 6), torch.randn(4, 6)
    model = nn.Sequential(nn.Linear(6, 6), GatedAfterwards(), nn.Linear(6, 6))
    grid = GridShape(branches=2)
    assert check(BranchCase(model, (x,), F.mse_loss, target, grid, trunk)) == 1


class OneReadsTheForm(nn.Module):
    """Of two branches one takes no more of the trunk than its shape or its dtype."""

    def __init__(self, form: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.form = form
        self.trunk, self.a, self.b = (nn.Linear(6, 6) for _ in range(3))
        self.row = nn.Parameter(torch.randn(1, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        return torch.stack([self.a(x), self.b(self.form(self.row, x))]).amax(0)


FORMS = {
    "shape": lambda row, x: row.expand_as(x),
    "dtype": lambda row, x: row.expand(4, 6).type_as(x),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("trunk", ["whole", "batch"])
def test_a_branch_that_reads_a_form_alone_waits_for_gradients(
    trunk: str, form: str
) -> None:
    torch.manual_seed(0)
    x, target = torch.randn(4, 6), torch.randn(4, 6)
    grid = GridShape(branches=2)
    model = OneReadsTheForm(FORMS[form])
    case = BranchCase(model, (x,), F.mse_loss, target, grid, trunk)
    assert check(case) == 1
