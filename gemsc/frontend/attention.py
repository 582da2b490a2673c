"""Let the attention of torch.nn be seen as the plain calls that it is made of.

PyTorch computes nn.MultiheadAttention in one call, in which there are no heads:

    before      F.multi_head_attention_forward(x, x, x, 128, 4, ...)
    after       qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias)
                q, k, v = qkv.unflatten(-1, (3, 4, 32)).permute(2, 1, 3, 0, 4).unbind(0)
                y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
                F.linear(y.permute(2, 0, 1, 3).flatten(2), self.out_proj.weight, ...)
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_Attention = tuple[Tensor, Tensor | None]
_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


def attention_of(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], _Attention] | None:
    """Return what computes the same by plain calls; nothing if there is none.

    Without samples and with extra keys (`add_bias_kv`, `add_zero_attn`, `static_k`)
    attention stays one call.
    """
    if function is not F.multi_head_attention_forward:
        return None
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    call = SimpleNamespace(**bound.arguments)
    return partial(_attend, call) if _is_plain(call) else None


def _attend(call: SimpleNamespace) -> _Attention:
    """Return what is attended to, and with `need_weights` how much.

    Queries are L x N x E. Source: Vaswani et al., "Attention is all you need", 2017,
    and the function that this one stands for: the same random numbers are drawn, and
    results have the same order in memory, on which those of a later dropout depend.
    """
    query, key, value = _heads(call)
    weights = None
    if call.need_weights:
        weights = _weights(call, query, key)
        mixed = weights @ value
        weights = weights.mean(1) if call.average_attn_weights else weights
    else:
        options = _options(call)
        mixed = F.scaled_dot_product_attention(query, key, value, **options)
    mixed = mixed.permute(2, 0, 1, 3).flatten(2)
    result = F.linear(mixed, call.out_proj_weight, call.out_proj_bias)
    return result, weights


def _is_plain(call: SimpleNamespace) -> bool:
    extra = (call.bias_k, call.bias_v, call.static_k, call.static_v)
    return (
        call.query.dim() == 3
        and not call.add_zero_attn
        and all(keys is None for keys in extra)
        and (call.attn_mask is not None or not call.is_causal)
    )


def _heads(call: SimpleNamespace) -> tuple[Tensor, ...]:
    """Return queries, keys and values, each N x heads x L x width."""
    given = call.query, call.key, call.value
    heads = call.num_heads, call.embed_dim_to_check // call.num_heads
    if call.use_separate_proj_weight:
        weights = call.q_proj_weight, call.k_proj_weight, call.v_proj_weight
    elif given[0] is given[1] is given[2]:
        qkv: Any = F.linear(call.query, call.in_proj_weight, call.in_proj_bias)
        qkv = qkv.unflatten(-1, (3, *heads))
        query, key, value = qkv.permute(2, 1, 3, 0, 4).unbind(0)
        return query, key, value
    else:
        weights = call.in_proj_weight.chunk(3)
    bias = call.in_proj_bias
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    projected: list[Any] = list(map(F.linear, given, weights, biases))
    return tuple(x.unflatten(-1, heads).permute(1, 2, 0, 3) for x in projected)


def _options(call: SimpleNamespace) -> dict[str, Any]:
    """Return what the fused attention needs beside its inputs."""
    options: dict[str, Any] = {}
    if call.is_causal and call.key_padding_mask is None:
        options["is_causal"] = True
    elif (mask := _mask(call)) is not None:
        options["attn_mask"] = mask
    if call.dropout_p:
        options["dropout_p"] = call.dropout_p if call.training else 0.0
    return options


def _weights(call: SimpleNamespace, query: Tensor, key: Tensor) -> Tensor:
    scores = query * math.sqrt(1 / query.shape[-1]) @ key.transpose(-2, -1)
    if (mask := _mask(call)) is not None:
        scores = scores + mask
    weights = F.softmax(scores, -1)
    if call.dropout_p:
        weights = F.dropout(weights, call.dropout_p, training=call.training)
    return weights


def _mask(call: SimpleNamespace) -> Tensor | None:
    """Return what is added to the products: L x S, N x 1 x 1 x S, or all dimensions."""
    mask, padding = (
        torch.zeros_like(mask, dtype=call.query.dtype).masked_fill(mask, -math.inf)
        if mask is not None and mask.dtype == torch.bool
        else mask
        for mask in (call.attn_mask, call.key_padding_mask)
    )
    if mask is not None and mask.dim() == 3:
        mask = mask.unflatten(0, (call.query.shape[1], call.num_heads))
    if padding is None:
        return mask
    padding = padding[:, None, None]
    return padding if mask is None else mask + padding
