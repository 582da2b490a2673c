"""Attention with dropout whose mask is the tile's part of that of one process."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from gemsc.base.boxes import Box
from gemsc.base.dtypes import lowered
from gemsc.runtime.tiles.dropout import dropout

__all__ = ["scaled_dot_product_attention"]


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
