"""Dropout of which each tile multiplies by its part of one mask."""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from gemsc.base.boxes import Box, everything, intersection, shape_of
from gemsc.base.rng import are_draws_same, seed_of

__all__ = ["dropout"]

STRIPS = 16
LARGE = 2**18  # elements: a mask that it takes longer to draw than to seed its strips


def dropout(
    value: Tensor,
    p: float = 0.5,
    training: bool = True,
    *,
    shape: tuple[int, ...],
    box: Box,
    draw: int = 0,
) -> Tensor:
    """Return `F.dropout` with the tile's part of the mask of the whole value.

    `shape` is that of the whole value, `box` the tile's part. All tiles have the
    stage's seed: each draws a small mask as a whole. A large one is drawn in strips
    along the first dimension that is cut, each with a seed of its own, which depends on
    `draw`, the number of this dropout in its stage: a tile draws those that it meets,
    and the mask is the same for any number of tiles.
    """
    if not training or p == 0:
        return value
    cut = [d for d, sides in enumerate(everything(shape)) if sides != box[d]]
    in_strips = cut and prod(shape) >= LARGE and p < 1
    if not in_strips or are_draws_same():
        whole = torch.ones(shape, dtype=value.dtype, device=value.device)
        mask = F.dropout(whole, p)[tuple(slice(start, stop) for start, stop in box)]
        return value * mask.clone()
    return value * _mask(value, p, shape, box, cut[0], draw)


def _mask(
    value: Tensor, p: float, shape: tuple[int, ...], box: Box, dim: int, draw: int
) -> Tensor:
    """Return the box of a mask that is drawn in strips along a dimension."""
    size, parts = shape[dim], []
    generator = torch.Generator(value.device)
    for number in range(STRIPS):
        strip = list(everything(shape))
        strip[dim] = size * number // STRIPS, size * (number + 1) // STRIPS
        wanted = intersection(box, tuple(strip))
        if not all(shape_of(wanted)):
            continue
        generator.manual_seed(seed_of(torch.initial_seed(), draw, number))
        drawn = value.new_empty(shape_of(tuple(strip)))
        drawn.bernoulli_(1 - p, generator=generator)
        rows = (
            slice(start - begin, stop - begin)
            for (start, stop), (begin, _) in zip(wanted, strip, strict=True)
        )
        parts.append(drawn[tuple(rows)])
    return torch.cat(parts, dim).div_(1 - p)
