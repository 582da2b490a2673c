"""Stages are consecutive blocks, as even as they can be or as the user wants them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from program_support import Net, blocks_of
from torch import Tensor, nn

from gemsc.errors import GemscError
from gemsc.ir.program import Program
from gemsc.passes.balance_stages import BalanceStages


def chain(*widths: int) -> Program:
    """Return a chain of linear layers between these widths."""
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    return blocks_of(nn.Sequential(*layers), torch.zeros(64, widths[0]))


def sizes(program: Program) -> list[int]:
    return [len(stage.blocks) for stage in program.require_stages()]


def balanced(program: Program, num_stages: int, **options: Any) -> Program:
    return BalanceStages(num_stages=num_stages, **options).apply(program)


def seconds(program: Program) -> list[float]:
    return [
        stage.total("forward_seconds") + stage.total("backward_seconds")
        for stage in program.require_stages()
    ]


def every_split(program: Program, num_stages: int) -> list[tuple[int, ...]]:
    count = len(program.blocks or ())
    return [
        split
        for split in itertools.product(range(1, count), repeat=num_stages)
        if sum(split) == count
    ]


@pytest.mark.slow
def test_the_slowest_stage_is_as_fast_as_it_can_be() -> None:
    program = chain(8, 512, 512, 8, 8, 256, 1024, 8)
    slowest = max(seconds(balanced(program, 3)))
    best = min(
        max(seconds(balanced(program, 3, kind="explicit", blocks=split)))
        for split in every_split(program, 3)
    )
    assert best <= slowest <= 1.02 * best


@pytest.mark.slow
def test_of_equally_fast_splits_the_one_that_sends_least_is_taken() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.out(self.small(self.heavy(x)))

    model = Net(
        forward,
        heavy=nn.Linear(4096, 4096),
        small=nn.Linear(4096, 16),  # too quick to matter
        out=nn.Linear(16, 16),
    )
    program = blocks_of(model, torch.zeros(1024, 4096))
    stages = balanced(program, 2).require_stages()
    assert [block.name for block in stages[1].blocks] == ["out"]


def test_memory_counts_weights_and_what_each_stage_holds_at_once() -> None:
    program = chain(*[256] * 9)  # equal layers: activations of 64 x 256
    even = balanced(program, 2, kind="memory", live=(1, 1))
    assert sizes(even) == [4, 4]
    full = balanced(program, 2, kind="memory", live=(50, 1))
    assert sizes(full)[0] < 4


@pytest.mark.slow
def test_the_fullest_stage_holds_as_little_as_it_can() -> None:
    program = chain(16, 512, 64, 512, 512, 16, 256, 16)
    live = (3, 2, 1)

    def fullest(done: Program) -> int:
        stages = zip(done.require_stages(), live, strict=True)
        return max(
            3 * s.total("parameter_bytes") + n * s.total("saved_bytes")
            for s, n in stages
        )

    held = fullest(balanced(program, 3, kind="memory", live=live))
    best = min(
        fullest(balanced(program, 3, kind="explicit", blocks=split))
        for split in every_split(program, 3)
    )
    assert best <= held <= 1.02 * best


def test_one_stage_for_each_block_is_the_most() -> None:
    program = chain(4, 4, 4, 4)
    assert sizes(balanced(program, 3)) == [1, 1, 1]


def test_the_user_may_give_the_blocks_of_each_stage() -> None:
    program = chain(4, 4, 4, 4, 4)
    done = balanced(program, 3, kind="explicit", blocks=(1, 2, 1))
    assert sizes(done) == [1, 2, 1]


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ((2, 2), "is for 2 stages, not 3"),
        ((0, 3, 1), "each with at least one block"),
        ((1, 1, 1), "adds up to 3 blocks, the model has 4: 0, 1, 2, 3"),
        ((), "is for 0 stages"),
    ],
)
def test_blocks_that_do_not_add_up_are_refused(
    blocks: tuple[int, ...], message: str
) -> None:
    with pytest.raises(GemscError, match=message):
        balanced(chain(4, 4, 4, 4, 4), 3, kind="explicit", blocks=blocks)


def nested() -> Program:
    def pair() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    model = nn.Sequential(pair(), pair(), pair())
    return blocks_of(model, torch.zeros(2, 4))


def test_the_user_may_name_where_later_stages_begin() -> None:
    done = balanced(nested(), 3, kind="explicit", cuts=("1", "2.2"))
    assert sizes(done) == [2, 3, 1]


@pytest.mark.slow(3)
@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        (("1",), "makes 2 stages, but 3 are needed"),
        (("2", "1"), "are not in the order of the model"),
        (("0", "1"), "are not in the order of the model"),
        (("1", "1"), "are not in the order of the model"),
        (("1", "nowhere"), "no block lies in a module 'nowhere'"),
    ],
)
def test_cuts_that_cannot_be_are_refused(cuts: tuple[str, ...], message: str) -> None:
    with pytest.raises(GemscError, match=message):
        balanced(nested(), 3, kind="explicit", cuts=cuts)


def test_a_cut_inside_a_block_is_refused() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.a(x)
        h = self.c(self.b(x)) + x
        return self.d(h)

    program = blocks_of(Net(forward), torch.zeros(2, 4))
    with pytest.raises(GemscError, match="'c' begins inside block 'b'"):
        balanced(program, 2, kind="explicit", cuts=("c",))


def side_by_side(num_stages: int, micro_batches: int, *row: int) -> list[str]:
    """Return the first block of each stage of two equal towers and a light join."""

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        return self.last(self.left(x) * self.right(y))

    def tower() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))

    x = torch.zeros(256, 512)
    model = Net(forward, left=tower(), right=tower(), last=nn.Linear(512, 8))
    done = BalanceStages(
        num_stages=num_stages,
        rows=(row or tuple(range(num_stages)),),
        micro_batches=(micro_batches,),
    ).apply(blocks_of(model, x, x))
    return [stage.blocks[0].name for stage in done.require_stages()]


@pytest.mark.slow
def test_few_micro_batches_want_towers_side_by_side_many_want_even_stages() -> None:
    # T a tower: T for each micro-batch, or (2 + micro-batches) 2/3 T
    assert side_by_side(3, 1) == ["left.0", "right.0", "last"]
    assert side_by_side(3, 3) == ["left.0", "right.0", "last"]
    assert side_by_side(3, 8) == ["left.0", "left.4", "right.2"]


@pytest.mark.slow
def test_the_join_may_share_a_rank_with_a_tower() -> None:
    assert side_by_side(3, 8, 0, 1, 0) == ["left.0", "right.0", "last"]


def test_the_join_of_towers_can_be_named() -> None:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        return (self.b(self.a(x)) * self.d(self.c(y))).sum(1)

    program = blocks_of(Net(forward), torch.zeros(2, 4), torch.zeros(2, 4))
    done = balanced(program, 3, kind="explicit", cuts=("c", "mul"))
    assert sizes(done) == [2, 2, 1]
    names = [n.name for n in done.require_stages()[2].nodes]
    assert names[:2] == ["mul", "sum_1"]
