"""Dropout, alone and in attention: each tile multiplies by its part of one mask."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from gemsc.base.boxes import (
    Box,
    Interval,
    everything,
    first_cut,
    intersection,
    shape_of,
)
from gemsc.base.dtypes import lowered
from gemsc.base.rng import are_draws_same, same_draws, seed_of
from gemsc.messages.exchange import index_of

__all__ = ["dropout", "scaled_dot_product_attention"]

STRIPS = 16
LARGE = 2**18  # elements: a mask that it takes longer to draw than to seed its strips
ROWS = 256  # queries that meet keys at once where their scores are in memory


def dropout(
    value: Tensor,
    p: float = 0.5,
    training: bool = True,
    *,
    shape: tuple[int, ...],
    box: Box,
    draw: int = 0,
    along: int | None = None,
) -> Tensor:
    """Return `F.dropout` with the tile's part of the mask of the whole value.

    `shape` is that of the whole value, `box` the tile's part. All tiles have the
    stage's seed: each draws a small mask as a whole. A large one is drawn in strips
    along the first dimension that is cut, each with a seed of its own, which depends on
    `draw`, the number of this dropout in its stage: a tile draws those that it meets,
    and the mask is the same for any number of tiles. `along` is that dimension where
    the tile's part has all of it.
    """
    if not training or p == 0:
        return value
    along = strips_along(shape, box, along)
    if along is None or p == 1 or are_draws_same():
        whole = torch.ones(shape, dtype=value.dtype, device=value.device)
        mask = F.dropout(whole, p)[tuple(slice(start, stop) for start, stop in box)]
        return value * mask.clone()
    return value * _mask(value, p, shape, box, along, draw)


def strips_along(
    shape: tuple[int, ...], box: Box, along: int | None = None
) -> int | None:
    """Return the dimension of the strips of a mask; None if it is drawn as a whole."""
    if prod(shape) < LARGE:
        return None
    return first_cut(shape, box) if along is None else along


def _mask(
    value: Tensor, p: float, shape: tuple[int, ...], box: Box, dim: int, draw: int
) -> Tensor:
    """Return the box of a mask that is drawn in strips along a dimension."""
    size, parts = shape[dim], []
    generator = torch.Generator(value.device)
    for number in range(STRIPS):
        sides = size * number // STRIPS, size * (number + 1) // STRIPS
        strip = (*everything(shape[:dim]), sides, *everything(shape[dim + 1 :]))
        wanted = intersection(box, strip)
        if not all(shape_of(wanted)):
            continue
        generator.manual_seed(seed_of(torch.initial_seed(), draw, number))
        drawn = value.new_empty(shape_of(strip)).bernoulli_(1 - p, generator=generator)
        parts.append(drawn[index_of(wanted, strip)])
    return torch.cat(parts, dim).div_(1 - p)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    shape: tuple[int, ...],
    box: Box,
    draw: int = 0,
) -> Tensor:
    """Return `F.scaled_dot_product_attention` of some heads, samples or queries.

    The attention weights of all have `shape` (batch x heads x queries x keys), those
    computed here are `box` of it. A causal mask needs all queries and keys. It is
    computed as PyTorch does on a CPU: no fused kernel draws a part of a mask.
    """
    if dropout_p == 0.0:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    query, key, value = lowered(query), lowered(key), lowered(value)
    attn_mask = None if attn_mask is None else lowered(attn_mask)
    root = math.sqrt(1 / math.sqrt(query.size(-1)) if scale is None else scale)
    weights = (query * root) @ (key.transpose(-2, -1) * root)
    if is_causal:
        attn_mask = query.new_ones(weights.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        weights = weights.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        weights = weights + attn_mask
    weights = torch.ops.aten._safe_softmax(weights, -1)
    return dropout(weights, dropout_p, shape=shape, box=box, draw=draw) @ value


@dataclass
class PairMask:
    """A dropout mask of attention's weights of which nobody needs all at once.

    It is drawn in cells of `ROWS` queries and some keys, each with a seed of its own:
    whoever asks for a box, and however often, gets the same numbers. In `same_draws` it
    is the part of the mask that one process draws. The seed is that of where the mask
    is made: a backward asks for boxes, too, and has another one.
    """

    p: float
    shape: tuple[int, ...]  # of all weights: batch x heads x queries x keys
    draw: int
    seed: int = field(default_factory=torch.initial_seed)
    alike: bool = field(default_factory=are_draws_same)
    _whole: Tensor | None = None

    def part(self, like: Tensor, box: Box) -> Tensor:
        """Return a box of the mask, of 0 and 1 / (1 - p), in the dtype of `like`."""
        if self.alike:
            return self._all(like)[tuple(slice(*sides) for sides in box)]
        width = max(ROWS, -(-self.shape[-1] // 64))
        rows = [
            torch.cat(
                [self._cell(like, box, r, c, width) for c in _met(box[-1], width)], -1
            )
            for r in _met(box[-2], ROWS)
        ]
        mask = torch.cat(rows, -2)
        return mask.div_(1 - self.p) if self.p < 1 else mask

    def forget(self) -> None:
        """Keep no mask that was drawn as a whole."""
        self._whole = None

    def _all(self, like: Tensor) -> Tensor:
        if self._whole is None:
            ones = torch.ones(self.shape, dtype=like.dtype, device=like.device)
            if are_draws_same():
                self._whole = F.dropout(ones, self.p)
            else:  # a backward in a thread of its own
                with same_draws():
                    self._whole = F.dropout(ones, self.p)
        return self._whole

    def _cell(
        self, like: Tensor, box: Box, row: int, column: int, width: int
    ) -> Tensor:
        """Return what a box has of a cell."""
        whole = everything(self.shape)
        sides = (row * ROWS, (row + 1) * ROWS), (column * width, (column + 1) * width)
        cell = intersection((*whole[:-2], *sides), whole)
        generator = torch.Generator(like.device)
        generator.manual_seed(seed_of(self.seed, self.draw, row, column))
        drawn = like.new_empty(shape_of(cell)).bernoulli_(
            1 - self.p, generator=generator
        )
        return drawn[index_of(intersection(box, cell), cell)]


def query_strips(rows: Interval) -> list[Interval]:
    """Return rows in strips that no cell of a mask reaches beyond."""
    return [
        (max(rows[0], r * ROWS), min(rows[1], (r + 1) * ROWS)) for r in _met(rows, ROWS)
    ]


def _met(sides: Interval, size: int) -> range:
    """Return the numbers of the pieces of a size that an interval meets."""
    return range(sides[0] // size, -(-sides[1] // size))
