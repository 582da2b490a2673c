"""Softmax, and attention, which is made of it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gemsc.verify.field.dispatch import Rules
from gemsc.verify.field.mode import OverField
from gemsc.verify.field.numbers import NotDecidedError

__all__ = ["RULES"]

RULES = Rules()


@RULES.of("_softmax")
def _softmax(mode: OverField, t: Tensor, dim: int, *rest: Any, **how: Any) -> Tensor:
    exps = mode.exp(t)
    total = mode.sum(exps, [dim], True)
    empty = (mode.of(t) == -math.inf).all(dim, keepdim=True)
    if bool(empty.any()):
        return mode.mul(exps, mode.field.inverse(total))
    return mode.mul(exps, mode.inverse(total))


@RULES.of("_softmax_backward_data")
def _softmax_backward(
    mode: OverField, g: Tensor, y: Tensor, dim: int, *rest: Any
) -> Tensor:
    g, y = mode.of(g), mode.of(y)
    part = mode.mul(g, y)
    return mode.add(part, -mode.mul(y, mode.sum(part, [dim], True)))


@RULES.of("_log_softmax")
def _log_softmax(mode: OverField, t: Tensor, dim: int, *rest: Any) -> Tensor:
    total = mode.sum(mode.exp(t), [dim], True)
    result = mode.reduced(mode.of(t) - mode.field.apply("log", total))
    return mode.remember(result, mode.mul(mode.exp(t), mode.inverse(total)))


@RULES.of("_log_softmax_backward_data")
def _log_softmax_backward(
    mode: OverField, g: Tensor, y: Tensor, dim: int, *rest: Any
) -> Tensor:
    exps, g = mode.exp(y), mode.of(g)
    return mode.add(g, -mode.mul(exps, mode.sum(g, [dim], True)))


def _scores(
    mode: OverField, q: Tensor, k: Tensor, causal: bool, mask: Any, scale: Any
) -> tuple[Tensor, float]:
    factor = mode.of(1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    scores = mode.mul(mode.matmul(q, k.transpose(-2, -1)), factor)
    if causal:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~keep, -math.inf)
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = mode.reduced(scores + mode.of(mask))
    return scores, factor


@RULES.of("_scaled_dot_product_flash_attention_for_cpu")
def _attention(
    mode: OverField,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Any = None,
    scale: Any = None,
) -> Any:
    q, k, v = mode.of(q), mode.of(k), mode.of(v)
    k, v = (_for_each_head(q, t) for t in (k, v))
    if dropout_p:
        raise NotDecidedError("attention that drops within its kernel")
    scores, _ = _scores(mode, q, k, is_causal, attn_mask, scale)
    weights = _softmax(mode, scores, -1)
    # as the kernel leaves it in memory: batch x queries x heads x size
    out = mode.matmul(weights, v).transpose(1, 2).contiguous().transpose(1, 2)
    return out, mode.field.apply("log", mode.sum(mode.exp(scores), [-1]))


@RULES.of("_scaled_dot_product_flash_attention_for_cpu_backward")
def _attention_backward(
    mode: OverField,
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Any = None,
    scale: Any = None,
) -> Any:
    g, q, k, v = mode.of(g), mode.of(q), mode.of(k), mode.of(v)
    heads = k.shape[1]
    k, v = (_for_each_head(q, t) for t in (k, v))
    scores, factor = _scores(mode, q, k, is_causal, attn_mask, scale)
    weights = _softmax(mode, scores, -1)
    of_v = mode.matmul(weights.transpose(-2, -1), g)
    of_weights = mode.matmul(g, v.transpose(-2, -1))
    of_scores = mode.mul(_softmax_backward(mode, of_weights, weights, -1), factor)
    of_k = mode.matmul(of_scores.transpose(-2, -1), q)
    of_k, of_v = (
        mode.sum(torch.unflatten(t, 1, (heads, -1)), [2]) for t in (of_k, of_v)
    )
    return mode.matmul(of_scores, k), of_k, of_v


def _for_each_head(q: Tensor, t: Tensor) -> Tensor:
    """Return keys or values, of which some heads of queries may share one."""
    count = q.shape[1] // t.shape[1]
    return t if count == 1 else t.repeat_interleave(count, 1)
