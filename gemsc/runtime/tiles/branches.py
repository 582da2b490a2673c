"""Branches on different ranks: their results travel together, and random numbers.

A rank puts the results of its branches into one row, an exchange brings it those of the
other ranks, and it takes them out of it again. On rank 0, where rank 1 has b:

    row = tiles.pack((a, c), (6144,))
    row = tiles.redistribute(self.grid, row, JOIN_ROW)
    (b,) = tiles.unpack(row, ((4, 32, 8, 8),))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gemsc.base.rng import are_draws_same, seed_of, torch_seeded
from gemsc.runtime.tiles.collectives import applied

__all__ = ["nothing", "own_numbers", "pack", "tied", "unpack"]


def pack(values: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    """Return values side by side along the last dimension, in the shape given.

    Of each value the first dimensions are those of the shape; all others are flattened.
    """
    rows = [value.reshape(*shape[:-1], -1) for value in values]
    return rows[0] if len(rows) == 1 else torch.cat(rows, -1)


def unpack(packed: Tensor, shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, ...]:
    """Return the values that `pack` put side by side, in these shapes."""
    kept = prod(packed.shape[:-1])
    sizes = [prod(shape) // kept for shape in shapes]
    parts = torch.split(packed, sizes, -1)
    return tuple(part.reshape(s) for part, s in zip(parts, shapes, strict=True))


def nothing(
    like: Tensor,
    shape: tuple[int, ...],
    *,
    dtype: torch.dtype | None = None,
    learns: bool = True,
) -> Tensor:
    """Return a tensor without elements: what a rank without a branch gives to a join.

    If it `learns` it needs a gradient, as the results of the others do: then the rank
    takes part in the exchange of the gradients as well.
    """
    empty = like.new_empty(shape, dtype=dtype)
    return empty.requires_grad_() if learns and torch.is_grad_enabled() else empty


def tied(value: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Return a value whose backward is also that of others, which get no gradient.

    The others came to a rank that has no use for them. The ranks that have send their
    gradients, and this one takes part.
    """
    return applied(_Tied, value, *others)


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, *others: Tensor) -> Tensor:
        ctx.count = len(others)
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, *(None,) * ctx.count


@contextmanager
def own_numbers(draw: int) -> Iterator[None]:
    """Draw random numbers that no other rank draws, apart from those that all do.

    They depend on the seed of the stage and on `draw`, the number of the node in it.
    """
    if are_draws_same():
        yield
        return
    device = torch.device("cuda" if torch.cuda._initialized else "cpu")
    with torch_seeded(seed_of(torch.initial_seed(), draw), device):
        yield
