"""What sequences need: LSTM, GRU and RNN, attention, its rotations; and losses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from gemsc.importers.onnx.operators.node import Node, number, operator
from gemsc.importers.onnx.operators.parameters import Static, Value, torch_type
from gemsc.importers.sheet import Symbol
from gemsc.importers.weight import Array

# where PyTorch's gates are among those of the file: iofc and zrh
GATES = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
ACTIVATIONS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"]}

# ------------------------------------------------------------------------- recurrence


@operator("GRU", "LSTM", "RNN")
def _recurrent(
    node: Node,
    x: Symbol,
    weight: Value,
    recurrence: Value,
    bias: Value | None,
    lengths: Value | None,
) -> Sequence[Symbol | None]:
    """One layer of torch.nn in one direction or both; both biases are parameters."""
    direction = node.attr.direction
    activations = node.attr.activations or []
    usual = ACTIVATIONS.get(node.kind, activations[:1] or ["Tanh"])
    _check(node, activations, usual, direction)
    _check_lengths(node, lengths, x.shape[1 if node.attr.layout else 0])
    batch_first = bool(node.attr.layout)
    flip = f".flip({1 if batch_first else 0})" if direction == "reverse" else ""
    if flip:
        x = node.sheet.line("reversed", f"{x}{flip}")
    known = _known(node, [weight, recurrence, bias])
    settings = {"nonlinearity": usual[0].lower()} if node.kind == "RNN" else {}
    make: Any = getattr(nn, node.kind)
    layer = make(
        x.shape[-1],
        recurrence.shape[-1],
        bias=bias is not None,
        batch_first=batch_first,
        bidirectional=weight.shape[0] == 2,
        dtype=torch_type(known[0].dtype),
        **settings,
    )
    call = node.layer(layer, **_gates(node.kind, *known))
    names = ["y", "states"] if node.kind == "LSTM" else ["y", "h"]
    y, states = node.sheet.unpack(names, f"{call}({x}{_state(node, batch_first)})")
    outputs: list[Symbol | None] = [None, None, None]
    used = [*node.outputs, "", "", ""]
    if used[0]:
        axis = 2 if batch_first else 1
        text = f"{y}{flip}.unsqueeze({axis})"
        if direction == "bidirectional":
            turn = "" if batch_first else ".transpose(1, 2)"
            text = f"{y}.unflatten(-1, (2, -1)){turn}"
        outputs[0] = node.gives(text)
    lasts = [f"{states}[0]", f"{states}[1]"] if node.kind == "LSTM" else [states.text]
    for output, last in enumerate(lasts, 1):
        if used[output]:
            text = f"{last}.transpose(0, 1)" if batch_first else last
            outputs[output] = node.gives(text, output)
    return outputs


def _check(
    node: Node, activations: list[str], usual: list[str], direction: str
) -> None:
    usual = usual * (2 if direction == "bidirectional" else 1)
    named = activations[: len(usual)] or usual  # of RNN, the standard says two
    if named != usual or usual[0] not in ("Sigmoid", "Tanh", "Relu"):
        raise node.refuse(f"has the activations {', '.join(named)}; PyTorch has not")
    if node.attr.clip is not None:
        raise node.refuse("clips its cells, which PyTorch does not")
    if node.attr.input_forget:
        raise node.refuse("has one gate for input and forgetting; PyTorch has two")
    if node.kind == "GRU" and not node.attr.linear_before_reset:
        raise node.refuse(
            "resets before its product (linear_before_reset=0); PyTorch's GRU after it",
            help="train the model with linear_before_reset=1 (Keras: reset_after=True)",
        )
    peepholes = node.operand(7)
    if node.kind == "LSTM" and peepholes is not None and not _is_zero(peepholes):
        raise node.refuse("has peepholes, which PyTorch has not")


def _check_lengths(node: Node, lengths: Value | None, steps: int) -> None:
    if lengths is None:
        return
    if isinstance(lengths, Symbol) or bool((lengths.array != steps).any()):
        raise node.refuse(
            "has sequences of several lengths",
            help="export the model without sequence lengths",
        )


def _known(node: Node, operands: Sequence[Value | None]) -> list[Static]:
    for index, operand in enumerate(operands, 1):
        if isinstance(operand, Symbol):
            raise node.refuse(f"takes its weight, input {index}, from the data")
    return [operand for operand in operands if isinstance(operand, Static)]


def _gates(
    kind: str, weight: Static, recurrence: Static, bias: Static | None = None
) -> dict[str, Static]:
    """Return the layer's parameters by the names that PyTorch has."""
    size = recurrence.shape[-1]
    height = len(GATES[kind]) * size
    params = {}
    for direction in range(weight.shape[0]):
        end = "_reverse" * direction
        parts = {"weight_ih": (weight, 0), "weight_hh": (recurrence, 0)}
        if bias is not None:
            parts |= {"bias_ih": (bias, 0), "bias_hh": (bias, 1)}
        for name, (whole, half) in parts.items():
            move = partial(_rows, GATES[kind], size, direction, half)
            params[f"{name}_l0{end}"] = whole.moved(move, height, *whole.shape[2:])
    return params


def _rows(
    gates: Sequence[int], size: int, direction: int, half: int, array: Array
) -> Array:
    """Return the rows of one direction in PyTorch's order of gates.

    `half` is which of the two biases they are.
    """
    starts = [(half * len(gates) + gate) * size for gate in gates]
    return np.concatenate([array[direction][s : s + size] for s in starts])


def _state(node: Node, batch_first: bool) -> str:
    """Return the initial states as the call's second argument; "" if all are zeros."""
    count = 2 if node.kind == "LSTM" else 1
    initial = [node.operand(5 + index) for index in range(count)]
    if all(operand is None or _is_zero(operand) for operand in initial):
        return ""
    texts = []
    for index, operand in enumerate(initial):
        if operand is None:  # one of the two states of an LSTM
            other = initial[1 - index]
            texts.append(f"torch.zeros_like({other and node.tensor(other)})")
            continue
        turn = ".transpose(0, 1).contiguous()" if batch_first else ""
        texts.append(f"{node.tensor(operand)}{turn}")
    return f", ({', '.join(texts)})" if count == 2 else f", {texts[0]}"


def _is_zero(operand: Value) -> bool:
    if isinstance(operand, Symbol) or operand.trained:
        return False
    return not operand.array.any()


# -------------------------------------------------------------------------- attention


@operator("Attention")
def _attention(
    node: Node,
    query: Symbol,
    key: Symbol,
    value: Symbol,
    mask: Symbol | None,
    past_key: Symbol | None,
    past_value: Symbol | None,
) -> Sequence[Symbol | None]:
    """PyTorch's function; line by line where the scores are bounded, or an output."""
    scale = node.attr.scale
    _refuse_special(node, query)
    q = _heads(node, query, node.attr.q_num_heads, "query")
    k = _heads(node, key, node.attr.kv_num_heads, "key")
    v = _heads(node, value, node.attr.kv_num_heads, "value")
    past = 0
    if past_key is not None:
        past = past_key.shape[2]
        k = node.sheet.line("key", f"torch.cat([{past_key}, {k}], dim=2)")
        v = node.sheet.line("value", f"torch.cat([{past_value}, {v}], dim=2)")
    mask = _mask(node, q, k, mask, past)
    scores = None
    if node.attr.softcap or any(node.outputs[3:]):
        text, scores = _written_out(node, q, k, v, mask, scale)
    else:
        arguments = [q.text, k.text, v.text]
        if mask is not None:
            arguments.append(f"attn_mask={mask}")
        elif node.attr.is_causal:
            arguments.append("is_causal=True")
        if scale is not None:
            arguments.append(f"scale={number(scale)}")
        if q.shape[1] != k.shape[1]:
            arguments.append("enable_gqa=True")
        text = f"F.scaled_dot_product_attention({', '.join(arguments)})"
    if query.rank == 3:
        text = f"{text}.transpose(1, 2).flatten(2)"
    y = node.gives(text)
    return [y, k, v, scores][: len(node.outputs)]


def _refuse_special(node: Node, query: Symbol) -> None:
    if node.operand(6) is not None:
        raise node.refuse("has keys of several lengths (nonpad_kv_seqlen)")
    for name in ("left_window_size", "right_window_size"):
        if node.attr.get(name, -1) >= 0:
            raise node.refuse(f"looks at a window ({name})")
    kind = node.attr.softmax_precision
    if kind and node.dtype(kind).itemsize < query.tensor.itemsize:
        raise node.refuse("rounds what softmax takes (softmax_precision)")


def _heads(node: Node, x: Symbol, count: int, name: str) -> Symbol:
    """Return an operand as (batch, heads, length, features)."""
    if x.rank == 4:
        return x
    if not count or x.shape[-1] % count:
        raise node.refuse(f"has {x.shape[-1]} features for {count or None} heads")
    return node.sheet.line(name, f"{x}.unflatten(-1, ({count}, -1)).transpose(1, 2)")


def _mask(
    node: Node, q: Symbol, k: Symbol, mask: Symbol | None, past: int
) -> Symbol | None:
    """Return who looks at whom, but for causality alone; None for all at all."""
    causal = bool(node.attr.is_causal)
    later = (
        f"torch.ones({q.shape[2]}, {k.shape[2]}, dtype=torch.bool, device={q}.device)"
    )
    if mask is None:
        if causal and past:
            return node.sheet.line("mask", f"{later}.tril({past})")
        return None
    fill = "-math.inf" if mask.tensor.is_floating_point() else "False"
    missing = k.shape[2] - mask.shape[-1]
    if missing and mask.shape[-1] > 1:
        mask = node.sheet.line("mask", f"F.pad({mask}, (0, {missing}), value={fill})")
    if causal:
        text = f"{mask}.masked_fill({later}.triu({past + 1}), {fill})"
        mask = node.sheet.line("mask", text)
    return mask


def _written_out(
    node: Node,
    q: Symbol,
    k: Symbol,
    v: Symbol,
    mask: Symbol | None,
    scale: float | None,
) -> tuple[str, Symbol]:
    """Return attention line by line, and the scores that the node gives."""
    add = node.sheet.line
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k = add("key", f"{k}.repeat_interleave({groups}, 1)")
        v = add("value", f"{v}.repeat_interleave({groups}, 1)")
    factor = number(scale or q.shape[-1] ** -0.5)
    steps = [add("scores", f"{q} @ {k}.transpose(-2, -1) * {factor}")]
    scores = steps[0]
    if limit := node.attr.softcap:
        size = number(limit)
        scores = add("scores", f"{size} * torch.tanh({scores} / {size})")
    steps.append(scores)
    if mask is None and node.attr.is_causal:
        ones = f"torch.ones_like({scores}, dtype=torch.bool)"
        scores = add("scores", f"{scores}.masked_fill({ones}.triu(1), -math.inf)")
    elif mask is not None and mask.tensor.is_floating_point():
        scores = add("scores", f"{scores} + {mask}")
    elif mask is not None:
        scores = add("scores", f"{scores}.masked_fill(~{mask}, -math.inf)")
    steps.append(scores)
    if mask is None:
        shares = add("shares", f"F.softmax({scores}, dim=-1)")
    else:  # who may look at nobody gets zeros
        alone = add("alone", f"({scores} == -math.inf).all(-1, keepdim=True)")
        filled = f"F.softmax({scores}.masked_fill({alone}, 0), dim=-1)"
        shares = add("shares", f"{filled}.masked_fill({alone}, 0)")
    steps.append(shares)
    return f"({shares} @ {v})", steps[node.attr.qk_matmul_output_mode]


@operator("RotaryEmbedding")
def _rotary_embedding(
    node: Node, x: Symbol, cosines: Symbol, sines: Symbol, places: Symbol | None
) -> Symbol:
    """Pairs of features turned by an angle for each place, the same for all heads."""
    is_flat = x.rank == 3
    if is_flat:
        x = _heads(node, x, node.attr.num_heads, "heads")
    index = "" if places is None else f"[{places}]"
    cos = node.sheet.line("cos", f"{cosines}{index}.unsqueeze(1)")
    sin = node.sheet.line("sin", f"{sines}{index}.unsqueeze(1)")
    size = node.attr.rotary_embedding_dim or x.shape[-1]
    turned = f"{x}[..., :{size}]" if size < x.shape[-1] else x.text
    if node.attr.interleaved:
        a = node.sheet.line("a", f"{x}[..., 0:{size}:2]")
        b = node.sheet.line("b", f"{x}[..., 1:{size}:2]")
        join = "torch.stack([{}, {}], dim=-1).flatten(-2)"
    else:
        a, b = node.sheet.unpack(["a", "b"], f"{turned}.chunk(2, dim=-1)")
        join = "torch.cat([{}, {}], dim=-1)"
    text = join.format(f"{cos} * {a} - {sin} * {b}", f"{sin} * {a} + {cos} * {b}")
    if size < x.shape[-1]:
        text = f"torch.cat([{text}, {x}[..., {size}:]], dim=-1)"
    if is_flat:
        text = f"{text}.transpose(1, 2).flatten(2)"
    return node.gives(text)


# ----------------------------------------------------------------------------- losses


@operator("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
def _loss(
    node: Node, scores: Symbol, labels: Symbol, weight: Symbol | None
) -> Sequence[Symbol]:
    reduction = node.attr.reduction
    arguments = [scores.text, f"{labels}.long()"]
    if weight is not None:
        arguments.append(f"weight={weight}")
    if node.attr.ignore_index is not None:
        arguments.append(f"ignore_index={node.attr.ignore_index}")
    if reduction not in ("none", "sum", "mean"):
        raise node.refuse(f"reduces by {reduction!r}")
    if reduction != "mean":
        arguments.append(f'reduction="{reduction}"')
    is_cross = node.kind == "SoftmaxCrossEntropyLoss"
    function = "F.cross_entropy" if is_cross else "F.nll_loss"
    outputs = [node.gives(f"{function}({', '.join(arguments)})")]
    if any(node.outputs[1:]):
        outputs.append(node.gives(f"F.log_softmax({scores}, dim=1)", 1))
    return outputs
