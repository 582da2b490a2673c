"""Pieces of tensors: whether they make up another one, and what finding out takes."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from gemsc.runtime.checkpoint.pieces import TensorPiece, make_up


def pieces_of(cuts: list[list[int]]) -> list[TensorPiece]:
    """Return a grid of pieces that are cut at these places of each dimension."""
    shape = tuple(places[-1] for places in cuts)
    rows = [[((a, b),) for a, b in itertools.pairwise([0, *places])] for places in cuts]
    return [TensorPiece(shape, found) for found in itertools.product(*rows)]


def covered(piece: TensorPiece) -> Tensor:
    found = torch.zeros(piece.shape, dtype=torch.int64)
    for own, _ in TensorPiece.whole(piece.shape).overlap(piece):
        found[own] = 1
    return found


def test_pieces_make_up_one_if_they_have_each_element_once() -> None:
    draw, seen = random.Random(0), [0, 0]
    grid = pieces_of([[2, 3, 6], [1, 4], [2]])
    half = TensorPiece((6, 4, 2), (((0, 1), (3, 6)), ((0, 4),), ((0, 2),)))
    whole = TensorPiece.whole((6, 4, 2))
    for _ in range(300):
        found = [*grid]
        for _ in range(draw.randrange(3)):
            at, other = draw.randrange(len(found)), draw.choice([*grid, half])
            found[at : at + draw.randrange(2)] = draw.choice([[other], []])
        wanted = draw.choice([whole, half, *grid])
        times = sum(map(covered, found), torch.zeros(wanted.shape))
        is_once = bool(times[covered(wanted) == 1].eq(1).all())
        assert make_up(wanted, found) == is_once
        seen[is_once] += 1
    assert min(seen) > 50
    twice = [TensorPiece((4,), (((0, 2),),)), TensorPiece((4,), (((1, 3),),))]
    assert not make_up(TensorPiece.whole((4,)), twice)  # as many elements as there are


def lines_run(act: Callable[[], object]) -> int:
    """Return how many lines of Python a call runs."""
    count = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("grid", [(1, 4), (4, 1), (2, 2)])
def test_four_times_as_many_pieces_take_four_times_the_work(
    grid: tuple[int, int],
) -> None:
    few, many = (
        [[*range(2, 2 * n * scale + 2, 2)] for n, scale in zip((8, 8), by, strict=True)]
        for by in ((1, 1), grid)
    )
    work = []
    for cuts in (few, many):
        found = pieces_of(cuts)
        whole = TensorPiece.whole(found[0].shape)
        assert make_up(whole, found)
        work.append(lines_run(partial(make_up, whole, found)))
    assert work[1] < 5 * work[0]
