"""Ring attention: keys and values come part by part, and are not kept.

    tile 1 of 3      own keys           keys of tile 0     keys of tile 2
                     attended while     while those of     last
                     0's are on         2 are on
                     their way          their way
    causal           half of them       all of them        none: nothing is sent

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

from gemsc.base.boxes import Interval
from gemsc.base.dtypes import lowered
from gemsc.errors import InternalError
from gemsc.messages.exchange import Exchange
from gemsc.runtime.tiles.collectives import InFlight, TileGrid

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
) -> Tensor:
    """Return attention of the tile's queries to the keys that `exchange` wants.

    All are batch x heads x tokens x features, and cut by tokens; the exchange is that
    of keys and values side by side. A mask has the rows of the tile's queries, and the
    columns of all keys or one for all. With `is_causal` queries are cut as keys are.

    Raises:
        InternalError: the mask has a gradient.
    """
    if attn_mask is not None:
        if attn_mask.requires_grad:
            raise InternalError("ring attention gives its mask no gradient")
        attn_mask = lowered(attn_mask)[(None,) * (4 - attn_mask.dim())]
    if scale is None:
        scale = 1 / math.sqrt(query.size(-1))
    heads = query.size(1) // key.size(1) if enable_gqa else 1
    ring = _Ring(grid, exchange, is_causal, scale, heads)
    given = map(lowered, (key, value, query))
    result: Tensor = _RingAttention.apply(*given, attn_mask, ring)  # type: ignore[no-untyped-call]
    return result


class _Part(NamedTuple):
    """Keys and values of some tokens: the own ones, or those that a round brought."""

    key: Tensor
    value: Tensor
    columns: Interval
    is_own: bool


@dataclass(frozen=True, slots=True)
class _Ring:
    """What a tile attends to, and how; `heads` of queries share one of keys."""

    grid: TileGrid
    exchange: Exchange
    is_causal: bool
    scale: float
    heads: int

    def parts(
        self, key: Tensor, value: Tensor, home: Callable[[Exchange], None] | None = None
    ) -> Iterator[_Part]:
        """Yield the parts that this tile attends to, the own one first.

        The next one is on its way meanwhile. Then the gradient of one that a round
        brought may go `home`.
        """
        both = torch.cat((key, value), -1)
        columns = self.exchange.held[self.grid.tile][-2]
        part: _Part | None = _Part(key, value, columns, is_own=True)
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
            part = _Part(key, value, piece.box[-2], is_own=False)
        flight.finish()
        return part

    def attend(
        self, query: Tensor, part: _Part, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return attention to a part alone, and the logarithms of its weights' sums."""
        how = self._settings(part, mask)
        kernel = _ATEN._scaled_dot_product_flash_attention_for_cpu
        function = kernel if _has_kernel(query) else _attention
        out, sums = function(query, *self._for_each_head(part), 0.0, **how)
        if how["attn_mask"] is not None:  # of rows that see nothing the kernel says 0
            blind = (how["attn_mask"] == -math.inf).all(-1)
            sums = torch.where(blind, -math.inf, sums)
        return out, sums

    def gradients(
        self, gradient: Tensor, query: Tensor, part: _Part, *kept: Any
    ) -> tuple[Tensor, Tensor]:
        """Return what a part adds to the gradient of the queries, and its own."""
        out, sums, mask = kept
        how = self._settings(part, mask)
        flags = 0.0, how.pop("is_causal")
        given = gradient, query, *self._for_each_head(part), out, sums, *flags
        kernel = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
        function = kernel if _has_kernel(query) else _attention_backward
        of_query, *others = function(*given, **how)
        if self.heads > 1:
            others = [t.unflatten(1, (-1, self.heads)).sum(2) for t in others]
        return of_query, torch.cat(others, -1)

    def _settings(self, part: _Part, mask: Tensor | None) -> dict[str, Any]:
        """Return how queries attend to a part, as PyTorch's kernel takes it."""
        if mask is not None and mask.size(-1) > 1:
            mask = mask[..., slice(*part.columns)]
        if mask is not None and mask.dtype is torch.bool:
            seen = torch.zeros((), dtype=part.key.dtype, device=mask.device)
            mask = torch.where(mask, seen, -math.inf)
        return {
            "is_causal": self.is_causal and part.is_own,
            "attn_mask": None if mask is None else _dense(mask),
            "scale": self.scale,
        }

    def _for_each_head(self, part: _Part) -> tuple[Tensor, Tensor]:
        """Return a part's keys and values for each head of queries."""
        if self.heads == 1:
            return _dense(part.key), _dense(part.value)
        key, value = (t.repeat_interleave(self.heads, 1) for t in part[:2])
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
        parts = ring.parts(key, value)
        out, sums = ring.attend(query, next(parts), mask)
        for part in parts:
            out, sums = _joined(out, sums, *ring.attend(query, part, mask))
        if mask is not None:
            sums = torch.where(sums == -math.inf, 0.0, sums)
        out = out.to(query.dtype)
        ctx.save_for_backward(key, value, query, mask, out, sums)
        ctx.ring = ring
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
                own.add_(came)
            flight.finish()

        learns = any(ctx.needs_input_grad[:2])
        parts = ring.parts(key, value, home if learns else None)
        first = ring.gradients(gradient, query, next(parts), *kept)
        of_query, own = map(_wide, first)
        for part in parts:
            more, of_part = ring.gradients(gradient, query, part, *kept)
            of_query.add_(more)
            if learns:
                foreign.append(of_part)
        of_key, of_value = own.to(key.dtype).chunk(2, -1)
        return of_key, of_value, of_query.to(query.dtype), None, None


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
    query: Tensor, key: Tensor, value: Tensor, _: float, **how: Any
) -> tuple[Tensor, Tensor]:
    """Do what the kernel for CPUs does."""
    scores = _scores(query, key, **how)
    sums = torch.logsumexp(scores, -1)
    weights = _ATEN._safe_softmax(scores, -1)
    return weights @ _wide(value), sums


def _attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    _: float,
    is_causal: bool,
    **how: Any,
) -> tuple[Tensor, ...]:
    """Do what the backward of the kernel does."""
    scores = _scores(query, key, is_causal=is_causal, **how)
    gradient, query, key, value, out = map(_wide, (gradient, query, key, value, out))
    weights = (scores - sums.unsqueeze(-1)).exp()
    of_weights = gradient @ value.mT - (gradient * out).sum(-1, keepdim=True)
    of_scores = weights * of_weights * how["scale"]
    found = of_scores @ key, of_scores.mT @ query, weights.mT @ gradient
    return tuple(each.to(out.dtype) for each in found)


def _scores(
    query: Tensor,
    key: Tensor,
    *,
    is_causal: bool,
    attn_mask: Tensor | None,
    scale: float,
) -> Tensor:
    scores = _wide(query) @ _wide(key).mT * scale
    if is_causal:
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores if attn_mask is None else scores + attn_mask


def _wide(tensor: Tensor) -> Tensor:
    """Return what sums are made of: float32 for half precision."""
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.float() if half else tensor


def _dense(tensor: Tensor) -> Tensor:
    """Return a tensor whose last dimension is dense in memory."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
