"""What branches send: as many bytes as the formulas say.

What is predicted is compared with what is counted in test_traffic.py.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from nightly import at_night
from parity_support import options
from torch import Tensor, nn

from gemsc.compiler import Traced, lower, trace

BATCH, SIZE, WIDTH = 12, 16, 16
PARTS = (12, 8, 4, 4)  # channels that each branch gives, or has inside
CHANNEL = BATCH * SIZE * SIZE * torch.float32.itemsize  # bytes
RANKS = pytest.mark.parametrize("ranks", [2, *at_night(4)])
INPUT, JOINED = WIDTH * CHANNEL, sum(PARTS) * CHANNEL


def branch(inside: int, outputs: int) -> nn.Module:
    """Return a few layers: what a branch takes is much longer than its messages."""
    convolutions = (nn.Conv2d(inside, inside, 5, padding=2) for _ in range(2))
    return nn.Sequential(
        nn.Conv2d(WIDTH, inside, 1), *convolutions, nn.Conv2d(inside, outputs, 1)
    )


class Cat(nn.Module):
    """Branches side by side, as in Inception, and what makes the next input of them."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branch(16, part) for part in PARTS)
        self.down = nn.Conv2d(sum(PARTS), WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.cat([branch(x) for branch in self.branches], 1)).relu()


class Sum(nn.Module):
    """Branches that are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branch(16, WIDTH) for _ in PARTS)

    def forward(self, x: Tensor) -> Tensor:
        one, two, three, four = (branch(x) for branch in self.branches)
        return (one + two + three + four).relu()


@cache
def traced(block: type[nn.Module], depth: int) -> Traced:
    model = nn.Sequential(
        nn.Conv2d(3, WIDTH, 1),
        *(block() for _ in range(depth)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(WIDTH, 5),
    )
    x, target = torch.randn(BATCH, 3, SIZE, SIZE), torch.zeros(BATCH).long()
    loss = nn.functional.cross_entropy
    return trace(model, (x,), loss=loss, example_target=target, check=False)


def bytes_of_a_block(block: type[nn.Module], ranks: int, trunk: str) -> tuple[int, int]:
    """Return what one more block sends for a micro-batch, there and back; and sums."""
    choice = options(ranks=ranks, branches=ranks, trunk=trunk, micro_batches=1)
    one, two = (lower(traced(block, depth), choice).plan.traffic for depth in (1, 2))
    names = "message_bytes", "sum_bytes"
    messages, sums = (two[name] - one[name] for name in names)
    return messages, sums


@pytest.mark.slow
@RANKS
def test_branches_side_by_side_send_what_they_give_to_all_others(ranks: int) -> None:
    each_way = (ranks - 1) * JOINED
    assert bytes_of_a_block(Cat, ranks, "whole") == (2 * each_way, 0)


@pytest.mark.slow
@RANKS
def test_branches_of_samples_gather_their_input_and_scatter_what_they_give(
    ranks: int,
) -> None:
    each_way = (ranks - 1) * INPUT + (ranks - 1) * JOINED // ranks
    assert bytes_of_a_block(Cat, ranks, "batch") == (2 * each_way, 0)


@pytest.mark.slow
@RANKS
def test_a_sum_of_branches_sends_an_addend_of_each_rank(ranks: int) -> None:
    each_way = ranks * (ranks - 1) * INPUT
    assert bytes_of_a_block(Sum, ranks, "whole") == (2 * each_way, 0)
    each_way = (ranks - 1) * INPUT + (ranks - 1) * INPUT
    assert bytes_of_a_block(Sum, ranks, "batch") == (2 * each_way, 0)
