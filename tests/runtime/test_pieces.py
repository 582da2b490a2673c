"""Pieces of tensors: whether they make up another one, and what finding out takes."""

from __future__ import annotations

import functools
import itertools
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from gemsc.base.parts import Part
from gemsc.runtime.checkpoint.pieces import TensorPiece, make_up


def pieces_of(cuts: list[list[int]]) -> list[TensorPiece]:
    """Return a grid of pieces that are cut at these places of each dimension."""
    shape = tuple(places[-1] for places in cuts)
    rows = [[((a, b),) for a, b in itertools.pairwise([0, *places])] for places in cuts]
    return [TensorPiece(shape, intervals) for intervals in itertools.product(*rows)]


def covered(piece: TensorPiece) -> Tensor:
    mask = torch.zeros(piece.shape, dtype=torch.int64)
    for place, _ in TensorPiece.whole(piece.shape).overlap(piece):
        mask[place] = 1
    return mask


def test_pieces_make_up_one_if_they_have_each_element_once() -> None:
    draw, seen = random.Random(0), [0, 0]
    grid = pieces_of([[2, 3, 6], [1, 4], [2]])
    half = TensorPiece((6, 4, 2), (((0, 1), (3, 6)), ((0, 4),), ((0, 2),)))
    whole = TensorPiece.whole((6, 4, 2))
    for _ in range(300):
        pieces = [*grid]
        for _ in range(draw.randrange(3)):
            at, other = draw.randrange(len(pieces)), draw.choice([*grid, half])
            pieces[at : at + draw.randrange(2)] = draw.choice([[other], []])
        wanted = draw.choice([whole, half, *grid])
        times = sum(map(covered, pieces), torch.zeros(wanted.shape))
        is_once = bool(times[covered(wanted) == 1].eq(1).all())
        assert make_up(wanted, pieces) == is_once
        seen[is_once] += 1
    assert min(seen) > 50
    twice = [TensorPiece((4,), (((0, 2),),)), TensorPiece((4,), (((1, 3),),))]
    assert not make_up(TensorPiece.whole((4,)), twice)  # as many elements as there are


@pytest.mark.parametrize(("start", "stop"), [(0, 6), (1, 3), (2, 5), (3, 3)])
def test_rows_are_counted_in_the_piece(start: int, stop: int) -> None:
    whole, part = torch.arange(24).view(12, 2), Part((12, 2), 0, 3, 2, (0, 1))
    piece = TensorPiece.of_part(part).rows(start, stop)
    rows = [whole[first:last] for first, last in piece.intervals[0]]
    assert torch.equal(torch.cat([whole[:0], *rows]), part.of(whole)[start:stop])


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
        pieces = pieces_of(cuts)
        whole = TensorPiece.whole(pieces[0].shape)
        assert make_up(whole, pieces)
        work.append(lines_run(partial(make_up, whole, pieces)))
    assert work[1] < 5 * work[0]


def stairs(count: int) -> tuple[TensorPiece, list[TensorPiece]]:
    """Return columns that are each cut at a row of their own."""
    shape = count + 1, count
    columns = [
        TensorPiece(shape, ((rows,), ((column, column + 1),)))
        for column in range(count)
        for rows in ((0, column + 1), (column + 1, count + 1))
    ]
    return TensorPiece.whole(shape), columns


def repeated(outer: int) -> tuple[TensorPiece, list[TensorPiece]]:
    """Return the fused parts of 8 ranks, and the part of one of two ranks."""
    part = functools.partial(Part, (outer * 8, 4), outer=outer)
    parts = [part(units=8, rows=(unit, unit + 1)) for unit in range(8)]
    wanted = part(units=2, rows=(1, 2))
    return TensorPiece.of_part(wanted), [*map(TensorPiece.of_part, parts)]


@pytest.mark.parametrize("make", [stairs, repeated])
def test_parts_take_the_work_of_reading_them(
    make: Callable[[int], tuple[TensorPiece, list[TensorPiece]]],
) -> None:
    work = []
    for count in (16, 64):
        wanted, pieces = make(count)
        assert make_up(wanted, pieces)
        assert not make_up(wanted, pieces[:-1])
        assert not make_up(wanted, [*pieces, pieces[-1]])
        work.append(lines_run(partial(make_up, wanted, pieces)))
    assert work[1] < 5 * work[0]


def test_the_overlap_of_parts_is_that_of_their_elements() -> None:
    """Of random rows in two dimensions, with gaps and rows that touch."""
    draw = random.Random(1)

    def rows(size: int) -> tuple[tuple[int, int], ...]:
        cuts = sorted(draw.sample(range(size + 1), 6))
        return tuple(zip(cuts[::2], cuts[1::2], strict=True))

    numbers = torch.arange(12 * 9).view(12, 9)
    for _ in range(100):
        one, other = (TensorPiece((12, 9), (rows(12), rows(9))) for _ in range(2))
        held = [torch.full(piece.sizes, -1) for piece in (one, other)]
        for piece, values in zip((one, other), held, strict=True):
            for mine, theirs in piece.overlap(TensorPiece.whole((12, 9))):
                values[mine] = numbers[theirs]
        seen = torch.full((12, 9), -1)
        for mine, theirs in one.overlap(other):
            assert torch.equal(held[0][mine], held[1][theirs])
            seen.view(-1)[held[0][mine].flatten()] = held[1][theirs].flatten()
        both = covered(one) * covered(other)
        assert torch.equal(seen.ge(0), both.eq(1))
