"""Attention: projections as nn.Linear around F.scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import nn

from gemsc.importers.keras.core import linear_layer
from gemsc.importers.keras.layer import Laid, LayerCall, translates
from gemsc.importers.sheet import Symbol

NO_MASKS = "leave the mask out; use_causal_mask=True is supported"


@translates("MultiHeadAttention")
def _multi_head(call: LayerCall) -> Laid | Sequence[Laid]:
    config, rank = call.config, len(call.inputs[0].shape)
    axes = config.get("attention_axes")
    if rank != 3 or (axes is not None and list(axes) not in ([1], [-2])):
        raise call.refuse(
            f"attends over axes {axes} of {rank}",
            help="reshape its inputs to (batch, steps, features), and leave "
            "attention_axes out",
        )
    count, size = int(config["num_heads"]), int(config["key_dim"])
    value_size = int(config.get("value_dim") or size)
    return _projected(call, (count, count), (size, value_size))


@translates("GroupedQueryAttention")
def _grouped(call: LayerCall) -> Laid | Sequence[Laid]:
    config = call.config
    size = int(config["head_dim"])
    counts = int(config["num_query_heads"]), int(config["num_key_value_heads"])
    return _projected(call, counts, (size, size))


def _projected(
    call: LayerCall, counts: tuple[int, int], sizes: tuple[int, int]
) -> Laid | Sequence[Laid]:
    """Attend with so many heads of queries and of keys, which have these sizes."""
    config = call.config
    _check(call)
    if config.get("sliding_window"):
        raise call.refuse("has a sliding_window", help="leave it out: it is a mask")
    query, value, key = _arguments(call)
    q = _heads(call, "query", query, counts[0], sizes[0])
    k = _heads(call, "key", key, counts[1], sizes[0])
    v = _heads(call, "value", value, counts[1], sizes[1])
    if counts[0] != counts[1]:
        times = counts[0] // counts[1]
        k = call.sheet.line("key", f"{k}.repeat_interleave({times}, 1)")
        v = call.sheet.line("value", f"{v}.repeat_interleave({times}, 1)")
    mixed, scores = _attended(call, q, k, v, 1.0 / sizes[0] ** 0.5, "mixed")
    if config.get("use_gate"):
        gate = _heads(call, "gate", query, counts[0], sizes[1])
        mixed = call.sheet.line("gated", f"{mixed} * torch.sigmoid({gate})")
    output = _output(call, mixed)
    return output if scores is None else [output, scores]


def _heads(call: LayerCall, word: str, x: Symbol, count: int, size: int) -> Symbol:
    """Return (batch, heads, steps, size) of (batch, steps, features)."""
    layer = _linear(call, word, x.shape[-1], count * size)
    flat = call.sheet.line(word, f"{layer}({x})")
    text = f"{flat}.unflatten(-1, ({count}, {size})).transpose(1, 2)"
    return call.sheet.line(f"{word}_heads", text)


def _linear(call: LayerCall, word: str, inside: int, outside: int) -> str:
    bias = call.config.get("use_bias", True)
    return linear_layer(call, inside, outside, bias, word, _part(call, word))


def _part(call: LayerCall, word: str) -> str:
    """Return where a projection is in the file: some are private to Keras."""
    part = f"{word}_dense"
    return part if part in call.layer.variables else f"_{part}"


def _output(call: LayerCall, mixed: Symbol) -> Laid:
    """Project (batch, heads, steps, size) back to (batch, steps, features)."""
    shape = call.size(0, _part(call, "output"))[2:]
    width = mixed.shape[1] * mixed.shape[3]
    layer = _linear(call, "output", width, prod(shape))
    text = f"{layer}({mixed}.transpose(1, 2).flatten(2))"
    return call.gives(f"{text}.unflatten(-1, {shape})" if len(shape) > 1 else text)


def _arguments(call: LayerCall) -> tuple[Symbol, Symbol, Symbol]:
    """Return query, value and key, which are given by position or by name."""
    names = ("query", "value", "key")
    given: dict[str, Any] = dict(zip(names, call.inputs, strict=False))
    given |= {name: call.keywords[name] for name in names if name in call.keywords}
    if "query" not in given or "value" not in given:
        raise call.refuse("needs a query and a value")
    query, value = call.last(given["query"]), call.last(given["value"])
    return query, value, call.last(given["key"]) if "key" in given else value


# -------------------------------------------------------------- layers without heads


@translates("Attention")
def _attention(call: LayerCall) -> Laid | Sequence[Laid]:
    """Mix values by products of queries and keys, without a scale but a learnt one."""
    query, value, key = _listed(call)
    config = call.config
    if config.get("score_mode") == "concat":
        return _added(call, query, value, key, dot=True)
    if config.get("use_scale"):
        scale = call.tensor("scale", (), call.variable(0))
        query = call.sheet.line("query", f"{query} * {scale}")
    mixed, scores = _attended(call, query, key, value, 1.0, call.layer.name)
    return Laid(mixed) if scores is None else [Laid(mixed), scores]


@translates("AdditiveAttention")
def _additive(call: LayerCall) -> Laid | Sequence[Laid]:
    query, value, key = _listed(call)
    return _added(call, query, value, key, dot=False)


def _added(
    call: LayerCall, query: Symbol, value: Symbol, key: Symbol, *, dot: bool
) -> Laid | Sequence[Laid]:
    """Score by tanh(query + key): additive attention, or Attention with "concat"."""
    both = f"{query}.unsqueeze(-2) + {key}.unsqueeze(-3)"
    scale = ""
    if call.config.get("use_scale"):
        scale = f"{call.tensor('scale', call.size(0), call.variable(0))} * "
    if dot:
        last = 1 if scale else 0
        weight = call.tensor("concat_score_weight", (), call.variable(last))
        both = f"{scale}({both})" if scale else both
        text = f"{weight} * torch.tanh({both}).sum(-1)"
    else:
        text = f"({scale}torch.tanh({both})).sum(-1)"
    scores = call.sheet.line("scores", text)
    outputs = _weighted(call, scores, value)
    return outputs if call.keywords.get("return_attention_scores") else outputs[0]


def _listed(call: LayerCall) -> tuple[Symbol, Symbol, Symbol]:
    """Return query, value and key of a list of two or three."""
    _check(call)
    if len(call.inputs) not in (2, 3):
        raise call.refuse("needs a list of query, value and perhaps key")
    value = call.last(1)
    return call.last(0), value, call.last(2) if len(call.inputs) > 2 else value


# --------------------------------------------------------------------------- parts


def _attended(
    call: LayerCall, q: Symbol, k: Symbol, v: Symbol, scale: float, wish: str
) -> tuple[Symbol, Laid | None]:
    """Return the mixed values, and the weights where the model asks for them."""
    rate = float(call.config.get("dropout") or 0.0)
    if call.keywords.get("return_attention_scores"):
        scores = call.sheet.line("scores", f"{q} @ {k}.transpose(-2, -1) * {scale!r}")
        mixed, weights = _weighted(call, scores, v)
        return mixed.value, weights
    extra = ""
    if rate:
        extra += f", dropout_p={rate!r} if self.training else 0.0"
    if call.keywords.get("use_causal_mask"):
        extra += ", is_causal=True"
    if scale != 1.0 / q.shape[-1] ** 0.5:
        extra += f", scale={scale!r}"
    text = f"F.scaled_dot_product_attention({q}, {k}, {v}{extra})"
    return call.sheet.line(wish, text), None


def _weighted(call: LayerCall, scores: Symbol, value: Symbol) -> tuple[Laid, Laid]:
    """Return the values mixed by the softmax of scores, and that."""
    rate = float(call.config.get("dropout") or 0.0)
    if call.keywords.get("use_causal_mask"):
        later = f"torch.ones_like({scores}, dtype=torch.bool).triu(1)"
        text = f'{scores}.masked_fill({later}, float("-inf"))'
        scores = call.sheet.line("scores", text)
    weights = call.gives(f"F.softmax({scores}, -1)", wish="weights")
    used = str(weights.value)
    if rate:
        used = f"{call.add(lambda: nn.Dropout(rate), 'dropout')}({used})"
    return call.gives(f"{used} @ {value}"), weights


def _check(call: LayerCall) -> None:
    for name, value in call.keywords.items():
        if "mask" in name and name != "use_causal_mask" and value not in (None, []):
            raise call.refuse(f"is given {name}: masks are not supported", NO_MASKS)
