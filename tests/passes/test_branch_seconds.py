"""The time of stages with branches: what is predicted, and how stages are balanced."""

from __future__ import annotations

import pytest
import torch
from networks import mean
from program_support import blocks_of
from torch import Tensor, nn

from gemsc.base.grid_shape import GridShape
from gemsc.compiler import compile
from gemsc.costs.hardware import LinkSpeed
from gemsc.ir import meta
from gemsc.passes.balance_stages import BalanceStages

LINK = LinkSpeed(latency=1e-6, bandwidth=1e10)


class Forked(nn.Module):
    """Branches of these many layers side by side; their results are added."""

    def __init__(self, *layers: int, width: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))
            for count in layers
        )

    def forward(self, x: Tensor) -> Tensor:
        return sum(branch(x) for branch in self.branches).tanh()


@pytest.mark.slow
def test_forks_one_after_the_other_take_the_slowest_rank_of_each() -> None:
    """Each rank is the slower one in one of them: 4 + 5 layers, not 8 of 17."""
    model = nn.Sequential(Forked(3, 2, 2, width=512), Forked(5, 1, width=512))
    x = torch.zeros(256, 512)
    program = compile(
        model, (x,), loss=mean, ranks=2, branches=("2",), micro_batches=1, check=False
    )
    whole = program.compilation.whole.program
    forks = whole.shards[0].forks
    ranks = [[b.rank for b in fork.branches] for fork in forks]
    assert ranks == [[0, 1, 1], [0, 1]]
    slowest = []
    for fork in forks:
        loads = [0.0, 0.0]
        for branch in fork.branches:
            loads[branch.rank] += branch.seconds
        slowest.append(max(loads))
    everything = sum(meta.facts(node).seconds for node in whole.compute_nodes)
    least = everything - sum(fork.seconds for fork in forks) + sum(slowest)
    assert program.plan.step_seconds > least > 8.9 / 13 * everything


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["compute", "memory"])
def test_two_ranks_get_more_blocks_only_where_branches_are_even(kind: str) -> None:
    def first_blocks(*layers: int) -> int:
        forks = (Forked(*layers, width=128) for _ in range(9))
        program = blocks_of(nn.Sequential(*forks), torch.zeros(64, 128))
        grids = (GridShape(branches=2), GridShape())
        balance = BalanceStages(num_stages=2, kind=kind, grids=grids, link=LINK)
        first, _ = balance.apply(program).require_stages()
        return sum("tanh" in n.name for n in first.nodes)

    assert first_blocks(2, 2) == 6  # twice as fast
    assert first_blocks(5, 1) == 5  # 5 of 6 layers are on one rank


class Convolved(nn.Module):
    """Two branches of convolutions, joined by cat."""

    def __init__(self) -> None:
        super().__init__()
        self.light = nn.Conv2d(32, 16, 1)
        self.heavy = nn.Sequential(
            nn.Conv2d(32, 32, 1), nn.Conv2d(32, 32, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.light(x), self.heavy(x)], 1)


def test_seconds_do_not_depend_on_the_threads_of_this_machine() -> None:
    """PyTorch takes other kernels of a convolution with more threads than one."""

    def predicted(threads: int) -> float:
        torch.set_num_threads(threads)
        options = {"ranks": 2, "branches": ("2",), "trunk": "whole", "check": False}
        x = torch.zeros(8, 32, 32, 32)
        return compile(Convolved(), (x,), loss=mean, **options).plan.step_seconds

    before = torch.get_num_threads()
    try:
        assert predicted(2) == predicted(1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
