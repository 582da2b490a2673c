"""Ring attention: keys and values come part by part, and are not kept.

    tile 1 of 3      own keys           keys of tile 0     keys of tile 2
                     attended while     while those of     last
                     0's are on         2 are on
                     their way          their way
    causal           half of them       all of them        none: nothing is sent

Under a causal mask a tile's queries may be those of tokens in two places (`rows`).
What a part gives is joined to what those before gave by the logarithms of the sums of
their weights. The backward goes round once more: it fetches each part again, and sends
its gradient home.

Source: Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers, 2023. Here
a part comes straight from the tile that holds it, not from a neighbour that had it
before: as many bytes, and none where a causal mask needs none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gemsc.base.boxes import Box, Interval
from gemsc.base.dtypes import lowered, widened
from gemsc.messages.exchange import Exchange
from gemsc.runtime.tiles.collectives import InFlight, TileGrid, applied
from gemsc.runtime.tiles.dropout import PairMask, query_strips

__all__ = ["ring_attention"]

_ATEN = torch.ops.aten


def ring_attention(
    grid: TileGrid,
    key: Tensor,
    exchange: Exchange,
    value: Tensor,
    query: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    rows: tuple[Interval, ...] = (),
    dropout_p: float = 0.0,
    shape: tuple[int, ...] = (),
    box: Box = (),
    draw: int = 0,
) -> Tensor:
    """Return attention of the tile's queries to the keys that `exchange` wants.

    All are batch x heads x tokens x features, and cut by tokens; the exchange is that
    of keys and values side by side. A mask has the rows of the tile's queries, and the
    columns of all keys or one for all. With `is_causal` queries are cut as keys are, or
    are those of the tokens in `rows`, of which each interval is within one part.
    Dropout takes `box` of a mask of `shape`, those of batch x heads x queries x keys.
    """
    if attn_mask is not None:
        attn_mask = lowered(attn_mask)[(None,) * (4 - attn_mask.dim())]
    if scale is None:
        scale = 1 / math.sqrt(query.size(-1))
    heads = query.size(1) // key.size(1) if enable_gqa else 1
    drops = PairMask(dropout_p, shape, draw) if dropout_p else None
    columns = exchange.held[grid.tile][-2]
    span = box[-2] if box else columns if is_causal else (0, query.size(2))
    rows = rows or (span,)
    learns = attn_mask is not None and attn_mask.requires_grad
    in_kernel = _has_kernel(query) and drops is None and not learns
    pieces = rows if in_kernel else tuple(s for row in rows for s in query_strips(row))
    how = is_causal, scale, heads, pieces, drops, box, in_kernel
    ring = _Ring(grid, exchange, *how)
    given = map(lowered, (key, value, query))
    return applied(_RingAttention, *given, attn_mask, ring)


class _Part(NamedTuple):
    """Keys and values of some tokens: the own ones, or those that a round brought."""

    key: Tensor
    value: Tensor
    columns: Interval


class _Block(NamedTuple):
    """Some of the tile's queries and of a part's keys, each as numbers of all tokens.

    `here` is where they are among the tile's own queries, `there` among the part's
    keys. With `is_causal` they are the same tokens, and each sees those before it.
    """

    rows: Interval
    columns: Interval
    here: slice
    there: slice
    is_causal: bool


@dataclass(frozen=True, slots=True)
class _Ring:
    """What a tile attends to, and how; `heads` of queries share one of keys.

    The `rows` of the tile's queries are in pieces, which meet keys one by one.
    """

    grid: TileGrid
    exchange: Exchange
    is_causal: bool
    scale: float
    heads: int
    rows: tuple[Interval, ...]
    drops: PairMask | None
    box: Box  # of all weights: what the tile computes
    in_kernel: bool

    def parts(
        self, key: Tensor, value: Tensor, home: Callable[[Exchange], None] | None = None
    ) -> Iterator[_Part]:
        """Yield the parts that this tile attends to, the own one first.

        The next one is on its way meanwhile. Then the gradient of one that a round
        brought may go `home`.
        """
        both = torch.cat((key, value), -1)
        columns = self.exchange.held[self.grid.tile][-2]
        part: _Part | None = _Part(key, value, columns)
        before = None
        for step in (*self.exchange.rounds, None):
            flight = self.grid.depart(step, both) if step else None
            if part is not None:
                yield part
            part = self._arrived(step, flight) if step and flight else None
            if before and home:
                home(before)
            before = step

    def _arrived(self, step: Exchange, flight: InFlight) -> _Part | None:
        part = None
        for source, (piece,) in step.seen_from(self.grid.tile).received.items():
            (both,) = flight.take(source)
            key, value = both.chunk(2, -1)
            part = _Part(key, value, piece.box[-2])
        flight.finish()
        return part

    def blocks(self, part: _Part) -> Iterator[_Block]:
        """Yield what the pieces of the tile's queries see of a part."""
        first, last = part.columns
        done = 0
        for start, stop in self.rows:
            here = slice(done, done := done + stop - start)
            ends = (start, stop) if self.is_causal else (last, last)
            seen = first, min(ends[0], last)
            diagonal = max(first, ends[0]), min(ends[1], last)
            for columns, is_causal in ((seen, False), (diagonal, True)):
                there = slice(columns[0] - first, columns[1] - first)
                if columns[0] < columns[1]:
                    yield _Block((start, stop), columns, here, there, is_causal)

    def attend(
        self, query: Tensor, part: _Part, block: _Block, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return attention to a block alone, and logarithms of its weights' sums."""
        how = self._settings(part, block, mask)
        bias = how["attn_mask"]
        given = _dense(query[:, :, block.here]), *self._for_each_head(part, block)
        if self.in_kernel:
            kernel = _ATEN._scaled_dot_product_flash_attention_for_cpu
            out, sums = kernel(*given, 0.0, **how)
        else:
            out, sums = _attention(*given, self._kept(query, block), **how)
        if bias is not None:  # of rows that see nothing the kernel says 0
            blind = (bias == -math.inf).all(-1)
            sums = torch.where(blind, -math.inf, sums)
        return out, sums

    def gradients(
        self,
        gradient: Tensor,
        query: Tensor,
        part: _Part,
        block: _Block,
        out: Tensor,
        sums: Tensor,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return a block's gradients: of queries, keys and values, and of the bias.

        PyTorch's kernel finds none of a bias.
        """
        how = self._settings(part, block, mask)
        sliced = (tensor[:, :, block.here] for tensor in (gradient, query, out, sums))
        gradient, queries, out, sums = sliced
        keys = self._for_each_head(part, block)
        given, of_bias = (_dense(gradient), _dense(queries), *keys, out, sums), None
        if self.in_kernel:
            kernel = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
            of_query, *others = kernel(*given, 0.0, how.pop("is_causal"), **how)
        else:
            kept = self._kept(query, block)
            of_bias, of_query, *others = _attention_backward(*given, kept, **how)
        if self.heads > 1:
            others = [t.unflatten(1, (-1, self.heads)).sum(2) for t in others]
        return of_query, torch.cat(others, -1), of_bias

    def _settings(
        self, part: _Part, block: _Block, mask: Tensor | None
    ) -> dict[str, Any]:
        """Return how queries attend to a block, as PyTorch's kernel takes it."""
        if mask is not None:
            mask = mask[_within(mask, block)]
        if mask is not None and mask.dtype is torch.bool:
            seen = torch.zeros((), dtype=part.key.dtype, device=mask.device)
            mask = torch.where(mask, seen, -math.inf)
        return {
            "is_causal": block.is_causal,
            "attn_mask": None if mask is None else _dense(mask),
            "scale": self.scale,
        }

    def _kept(self, query: Tensor, block: _Block) -> Tensor | None:
        """Return what a block's weights are multiplied with by dropout."""
        if self.drops is None:
            return None
        return self.drops.part(
            widened(query), (*self.box[:2], block.rows, block.columns)
        )

    def _for_each_head(self, part: _Part, block: _Block) -> tuple[Tensor, Tensor]:
        """Return a block's keys and values for each head of queries."""
        key, value = (_dense(t[:, :, block.there]) for t in part[:2])
        if self.heads > 1:
            key, value = (t.repeat_interleave(self.heads, 1) for t in (key, value))
        return key, value


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        key: Tensor,
        value: Tensor,
        query: Tensor,
        mask: Tensor | None,
        ring: _Ring,
    ) -> Tensor:
        query = _dense(query)
        by_row: dict[int, tuple[Tensor, Tensor]] = {}  # by the first row of a piece
        for part in ring.parts(key, value):
            for block in ring.blocks(part):
                more, row = ring.attend(query, part, block, mask), block.here.start
                by_row[row] = _joined(*by_row[row], *more) if row in by_row else more
        pieces = [by_row[row] for row in sorted(by_row)]
        out, sums = map(_in_order, zip(*pieces, strict=True))
        if mask is not None:
            sums = torch.where(sums == -math.inf, 0.0, sums)
        out = out.to(query.dtype)
        ctx.save_for_backward(key, value, query, mask, out, sums)
        ctx.ring = ring
        if ring.drops is not None:
            ring.drops.forget()
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        key, value, query, mask, out, sums = ctx.saved_tensors
        ring: _Ring = ctx.ring
        gradient, kept = _dense(gradient), (out, sums, mask)
        foreign: list[Tensor] = []  # the gradient of the part on board

        def home(step: Exchange) -> None:
            view = step.seen_from(ring.grid.tile)
            sends = {tile: [foreign.pop()] for tile in view.received}
            flight = ring.grid.depart_back(step, sends, key)
            for tile in view.sent:
                (came,) = flight.take(tile)
                local.add_(came)
            flight.finish()

        learns = any(ctx.needs_input_grad[:2])
        local: Any = None
        of_query: Any = None
        of_mask = widened(torch.zeros_like(mask)) if ctx.needs_input_grad[3] else None
        for part in ring.parts(key, value, home if learns else None):
            of_part: Any = None
            for block in ring.blocks(part):
                more, of_block, of_bias = ring.gradients(
                    gradient, query, part, block, *kept
                )
                if of_mask is not None and of_bias is not None:
                    own_bias = of_mask[_within(of_mask, block)]
                    own_bias += of_bias.sum_to_size(own_bias.shape)
                of_query = _added(of_query, more, block.here, query)
                of_part = _added(of_part, of_block, block.there, part.key)
            if local is None:
                local = of_part
            elif learns:
                foreign.append(of_part.to(key.dtype))
        if ring.drops is not None:
            ring.drops.forget()
        of_key, of_value = local.to(key.dtype).chunk(2, -1)
        of_mask = None if of_mask is None else of_mask.to(mask.dtype)
        return of_key, of_value, of_query.to(query.dtype), of_mask, None


def _added(total: Tensor | None, more: Tensor, rows: slice, like: Tensor) -> Tensor:
    """Add to some rows of the total so far, which has as many as `like`."""
    more = widened(more)
    if total is None and more.size(2) == like.size(2):
        return more
    if total is None:
        total = more.new_zeros((*more.shape[:2], like.size(2), more.size(3)))
    total[:, :, rows] += more
    return total


def _in_order(pieces: tuple[Tensor, ...]) -> Tensor:
    """Return what was computed of pieces of the queries, by the order of their rows."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)


def _within(mask: Tensor, block: _Block) -> tuple[slice, ...]:
    """Return where the mask of a block is; a row or column may be for all."""
    everywhere = slice(None)
    rows = block.here if mask.size(-2) > 1 else everywhere
    columns = slice(*block.columns) if mask.size(-1) > 1 else everywhere
    return everywhere, everywhere, rows, columns


def _joined(
    out: Tensor, sums: Tensor, more: Tensor, more_sums: Tensor
) -> tuple[Tensor, Tensor]:
    """Return attention to two parts, from that to each of them."""
    both = torch.stack((sums, more_sums))
    first, second = _ATEN._safe_softmax(both, 0).unsqueeze(-1)
    return out * first + more * second, torch.logsumexp(both, 0)


def _has_kernel(tensor: Tensor) -> bool:
    """Whether PyTorch has a kernel that gives the sums of the weights, too."""
    return tensor.device.type == "cpu"


def _attention(
    query: Tensor, key: Tensor, value: Tensor, kept: Tensor | None, **how: Any
) -> tuple[Tensor, Tensor]:
    """Do what the kernel for CPUs does, and drop weights that are not kept."""
    scores = _scores(*_scaled(query, key, how.pop("scale")), **how)
    sums = torch.logsumexp(scores, -1)
    weights = _ATEN._safe_softmax(scores, -1)
    if kept is not None:
        weights = weights * kept
    return weights @ widened(value), sums


def _attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    kept: Tensor | None,
    **how: Any,
) -> tuple[Tensor, ...]:
    """Return the gradients of scores, queries, keys and values, as the kernel does."""
    query, key = _scaled(query, key, scale := how.pop("scale"))
    scores = _scores(query, key, **how)
    gradient, value, out = map(widened, (gradient, value, out))
    weights = (scores - sums.unsqueeze(-1)).exp()
    of_weights, used = gradient @ value.mT, weights
    if kept is not None:
        of_weights, used = of_weights * kept, weights * kept
    of_weights = of_weights - (gradient * out).sum(-1, keepdim=True)
    of_bias = weights * of_weights
    of_query, of_key = _scaled(of_bias @ key, of_bias.mT @ query, scale)
    return of_bias, of_query, of_key, used.mT @ gradient


def _scaled(query: Tensor, key: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return both multiplied by a root of the scale, as PyTorch does without kernel."""
    root = math.sqrt(abs(scale))
    return widened(query) * math.copysign(root, scale), widened(key) * root


def _scores(
    query: Tensor,
    key: Tensor,
    *,
    is_causal: bool,
    attn_mask: Tensor | None,
) -> Tensor:
    scores = query @ key.mT
    if is_causal:
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores if attn_mask is None else scores + attn_mask


def _dense(tensor: Tensor) -> Tensor:
    """Return a tensor whose last dimension is dense in memory."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
