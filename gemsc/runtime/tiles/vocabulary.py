"""A vocabulary, or any list of classes, of which each tile has some rows.

    embedding                each tile looks up its own words, and has zeros for others;
                             the sum over the tiles is the embedding
    parallel_cross_entropy   each tile has the logits of its own classes

The loss needs two numbers of each token and tile: the log of the sum of exp(logit), and
the target's logit. These are put together by all tiles alike, after Shoeybi et al.,
Megatron-LM (2019), section 3. With l the logits, t the target, C classes, w their
weights and label smoothing e, the loss of a token is

    (1 - e) w_t (lse(l) - l_t) + e / C sum_c w_c (lse(l) - l_c)

for which e > 0 takes a third number, the weighted sum of the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gemsc.base.boxes import Interval
from gemsc.base.dtypes import current_autocast, widened
from gemsc.runtime.tiles.collectives import TileGrid, applied, rows

__all__ = ["embedding", "parallel_cross_entropy"]


def embedding(
    ids: Tensor,
    weight: Tensor,
    words: Interval,
    *,
    num_words: int,
    padding_idx: int | None = None,
) -> Tensor:
    """Return the tile's addend of `F.embedding`: zeros for words that others have.

    `weight` has the rows of `words`, one at least, of the whole vocabulary of
    `num_words`, in which `padding_idx` counts from 0.
    """
    is_own, places = _local_rows(ids, words, num_words)
    skipped = None
    if padding_idx is not None and words[0] <= padding_idx < words[1]:
        skipped = padding_idx - words[0]
    embedded = F.embedding(places, weight, skipped)
    return embedded.masked_fill(~is_own.unsqueeze(-1), 0)


def parallel_cross_entropy(
    grid: TileGrid,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    words: Interval,
    num_words: int,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    among: tuple[int, ...] = (),
) -> Tensor:
    """Return `F.cross_entropy` of logits of which this tile has those of some classes.

    `logits` (N x C x ...) are those of `words` of all `num_words` classes; `target`
    (N x ...) are classes, `weight` one number for each of all classes. Every tile gets
    the same result, bit for bit. `among` are the tiles that have some, () for all.
    """
    how = _Loss(words, num_words, ignore_index, reduction, label_smoothing)
    return applied(_CrossEntropy, logits, target, weight, grid.among(among), how)


@dataclass(frozen=True, slots=True)
class _Loss:
    """The settings of a loss."""

    words: Interval
    num_words: int
    ignore_index: int
    reduction: str
    smoothing: float

    def local(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return which targets are the tile's, and their places; none is ignored."""
        is_own, places = _local_rows(target, self.words, self.num_words)
        is_own = is_own & (target != self.ignore_index)
        return is_own, torch.where(is_own, places, 0)

    def weights(self, weight: Tensor | None, target: Tensor) -> Tensor:
        """Return the weight of each target, 0 where it is ignored."""
        used = target != self.ignore_index
        return used if weight is None else weight[torch.where(used, target, 0)] * used

    def weighted(self, value: Tensor, weight: Tensor | None) -> Tensor:
        """Return a value (N x C x ...) of the tile's classes times their weights."""
        if weight is None:
            return value
        part = weight[slice(*self.words)].to(value.dtype)
        return value * part.view(-1, *(1,) * (value.dim() - 2))


class _CrossEntropy(torch.autograd.Function):
    """Keeps the tile's logits, and one number a token."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        grid: TileGrid,
        how: _Loss,
    ) -> Tensor:
        wide = widened(logits)
        is_own, places = how.local(target)
        chosen = wide.gather(1, places.unsqueeze(1)).squeeze(1).masked_fill(~is_own, 0)
        row = [wide.logsumexp(1), chosen]
        if how.smoothing:
            row.append(how.weighted(wide, weight).sum(1))
        sums, targets, *others = rows(grid, torch.stack(row)).unbind(1)
        total = sums.logsumexp(0)
        weights = how.weights(weight, target).to(total.dtype)
        loss = (total - targets.sum(0)) * weights * (1 - how.smoothing)
        if how.smoothing:
            count = how.num_words if weight is None else weight.sum().to(total.dtype)
            smooth = count * total - others[0].sum(0)
            loss = loss + smooth * (how.smoothing / how.num_words)
        loss = loss.masked_fill(target == how.ignore_index, 0)
        if how.reduction != "none":
            loss = loss.sum()
        if how.reduction == "mean":
            loss = loss / weights.sum()
        ctx.save_for_backward(logits, target, weight, total)
        ctx.grid, ctx.how = grid, how
        is_mixed = current_autocast(logits.device) is not None
        return loss if is_mixed else loss.to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, target, weight, total = ctx.saved_tensors
        how: _Loss = ctx.how
        gradient = ctx.grid.all_reduce(gradient.clone().contiguous()).to(total.dtype)
        weights = how.weights(weight, target).to(total.dtype)
        if how.reduction == "mean":
            gradient = gradient / weights.sum()
        sharp = gradient * weights * (1 - how.smoothing)
        used = target != how.ignore_index
        smooth = gradient * used * (how.smoothing / how.num_words)
        count = how.num_words if weight is None else weight.sum().to(total.dtype)
        result = (widened(logits) - total.unsqueeze(1)).exp_()
        result *= (sharp + smooth * count).unsqueeze(1)
        if how.smoothing:
            ones = torch.ones_like(result)
            result -= smooth.unsqueeze(1) * how.weighted(ones, weight)
        is_own, places = how.local(target)
        mine = sharp.masked_fill(~is_own, 0)
        result.scatter_add_(1, places.unsqueeze(1), -mine.unsqueeze(1))
        return result.to(logits.dtype), None, None, None, None


def _local_rows(ids: Tensor, words: Interval, count: int) -> tuple[Tensor, Tensor]:
    """Return which ids are among the tile's words, and their rows; 0 for others.

    One that is out of range goes to the first or the last tile, where it fails.
    """
    start, stop = words
    near = ids.clamp(0, count - 1)
    is_own = (near >= start) & (near < stop)
    return is_own, torch.where(is_own, ids - start, 0)
