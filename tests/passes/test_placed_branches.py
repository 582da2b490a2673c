"""Branches go where a plan places them."""

from __future__ import annotations

import pytest
import torch
from program_support import run_passes
from torch import Tensor, nn

from gemsc.base.grid_shape import GridShape
from gemsc.compiler import trace
from gemsc.costs.hardware import LinkSpeed
from gemsc.ir.program import Program
from gemsc.ir.shards import Fork
from gemsc.passes.balance_stages import BalanceStages
from gemsc.passes.branches.choice import NOT_PLACED, choose_forks
from gemsc.passes.branches.forks import most_branches

FAST = LinkSpeed(latency=0.0, bandwidth=1e12)
Placed = dict[str, list[list[str]]]


class Block(nn.Module):
    """Four branches, of which b is heaviest."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(32, 8), nn.Linear(32, 8)
        self.b = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 8))
        self.d = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.a(x), self.b(x), self.c(x), self.d(x)], 1)


@pytest.fixture(scope="module")
def program() -> Program:
    model = nn.Sequential(Block(), nn.ReLU(), Block())
    traced = trace(model, (torch.randn(16, 32),), check=False)
    one = BalanceStages(num_stages=1, grids=(GridShape(branches=2),))
    return run_passes(traced.program, [one])


def forks(program: Program, placed: Placed | None = None) -> tuple[Fork, ...]:
    (stage,) = program.require_stages()
    return choose_forks(program, stage, 2, FAST, placed=placed)


def as_text(chosen: tuple[Fork, ...]) -> Placed:
    return {
        fork.join: [[b.name for b in fork.branches if b.rank == r] for r in range(2)]
        for fork in chosen
        if not fork.reason
    }


def test_what_was_chosen_is_chosen_again(program: Program) -> None:
    chosen = forks(program)
    assert [fork.name for fork in chosen] == ["0", "2"]
    assert as_text(chosen)["cat"] == [["0.b"], ["0.a", "0.c", "0.d"]]
    assert forks(program, as_text(chosen)) == chosen


def test_a_branch_is_where_the_plan_has_it(program: Program) -> None:
    wish = as_text(forks(program))
    wish["cat"] = [["0.a"], ["0.c", "0.b", "0.d"]]
    placed = forks(program, wish)
    ranks = {branch.name: branch.rank for branch in placed[0].branches}
    assert ranks == {"0.a": 0, "0.b": 1, "0.c": 1, "0.d": 1}
    assert placed[0].saved < forks(program)[0].saved
    assert placed[1] == forks(program)[1]


def test_a_branch_that_no_rank_has_is_computed_by_all(program: Program) -> None:
    (fork, *_) = forks(program, {"cat": [["0.b"], ["0.a", "0.c"]]})
    assert [branch.name for branch in fork.branches] == ["0.a", "0.b", "0.c"]


def test_branches_go_even_where_they_save_nothing(program: Program) -> None:
    placed = as_text(forks(program, {"cat": [["0.a", "0.b", "0.c", "0.d"], []]}))
    assert placed == {"cat": [["0.a", "0.b", "0.c", "0.d"], []]}


def test_other_forks_stay_whole_and_say_so(program: Program) -> None:
    join = list(as_text(forks(program)))[1]
    placed, whole = forks(program, {join: [["2.b"], ["2.a", "2.c", "2.d"]]})
    assert (placed.name, placed.reason) == ("2", "")
    assert (whole.name, whole.reason) == ("0", NOT_PLACED)
    assert not as_text(forks(program, {}))


def test_a_model_has_so_many_branches_side_by_side(program: Program) -> None:
    assert most_branches(program) == 4
    chain = trace(nn.Sequential(nn.Linear(4, 4)), (torch.randn(2, 4),), check=False)
    assert most_branches(chain.program) == 0


def test_unknown_branches_are_placed_nowhere(program: Program) -> None:
    assert not as_text(forks(program, {"cat": [["0.b"], ["0.e"]]}))
