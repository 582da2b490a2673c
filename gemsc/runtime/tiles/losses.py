"""Losses whose sums go over tiles and whose denominators are those of all of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gemsc.runtime.tiles.collectives import TileGrid, all_reduce

__all__ = ["cross_entropy"]


def cross_entropy(
    grid: TileGrid,
    output: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    among: tuple[int, ...] = (),
) -> Tensor:
    """Return `F.cross_entropy` of all tiles' pixels, or of those among some.

    Targets are classes (N x ...) or probabilities (N x C x ...). The mean over classes
    is weighted by `weight` of the target, and leaves out `ignore_index`; that over
    probabilities divides by the number of pixels.
    """
    total = F.cross_entropy(
        output,
        target,
        weight,
        ignore_index=ignore_index,
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    if reduction == "sum":
        return all_reduce(grid, total, among)
    pixels = target
    if target.is_floating_point():
        pixels = target.detach()[:, 0]
        count = total.new_tensor(float(pixels.numel()))
    else:
        used = pixels != ignore_index
        if weight is None:
            count = used.sum().to(total.dtype)
        else:
            chosen = torch.where(used, pixels, 0)
            count = (weight.detach()[chosen] * used).sum()
    sums = all_reduce(grid, torch.stack([total, count.to(total.dtype)]), among)
    return sums[0] / sums[1].detach()
