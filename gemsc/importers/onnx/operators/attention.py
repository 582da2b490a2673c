"""Attention and the rotation of its queries and keys."""

from __future__ import annotations

from collections.abc import Mapping

from gemsc.importers.onnx.node import Node, Operator
from gemsc.importers.onnx.operators.shape import torch_type_of
from gemsc.importers.onnx.operators.text import number
from gemsc.importers.sheet import Symbol


def _attention(node: Node) -> list[Symbol | None]:
    _refuse_special(node)
    flat = len(node.value(0).shape) == 3
    q = _heads(node, 0, "q_num_heads", "query")
    k = _heads(node, 1, "kv_num_heads", "key")
    v = _heads(node, 2, "kv_num_heads", "value")
    past = 0
    if node.operand(4) is not None:
        past = node.value(4).shape[2]
        k = node.sheet.line("key", f"torch.cat([{node.value(4)}, {k}], dim=2)")
        v = node.sheet.line("value", f"torch.cat([{node.value(5)}, {v}], dim=2)")
    mask = _mask(node, q, k, past)
    if node.attribute("softcap", 0) or any(node.outputs[3:]):
        text, scores = _written_out(node, q, k, v, mask, past)
    else:
        text, scores = _called(node, q, k, v, mask, past), None
    if flat:
        text = f"{text}.transpose(1, 2).flatten(2)"
    y = node.gives(text)
    return [y, k, v, scores][: len(node.outputs)]


def _refuse_special(node: Node) -> None:
    if node.operand(6) is not None:
        raise node.refuse("has keys of several lengths (nonpad_kv_seqlen)")
    for name in ("left_window_size", "right_window_size"):
        if node.attribute(name, -1) >= 0:
            raise node.refuse(f"looks at a window ({name})")
    kind = node.attribute("softmax_precision")
    if kind and torch_type_of(node, kind).itemsize < node.value(0).tensor.itemsize:
        raise node.refuse("rounds what softmax takes (softmax_precision)")


def _heads(node: Node, index: int, attribute: str, name: str) -> Symbol:
    """Return an operand as (batch, heads, length, features)."""
    x = node.value(index)
    if len(x.shape) == 4:
        return x
    count = node.attribute(attribute)
    if not count or x.shape[-1] % count:
        raise node.refuse(f"has {x.shape[-1]} features for {count} heads")
    return node.sheet.line(name, f"{x}.unflatten(-1, ({count}, -1)).transpose(1, 2)")


def _mask(node: Node, q: Symbol, k: Symbol, past: int) -> Symbol | None:
    """Return who looks at whom, but for causality alone; None for all at all."""
    causal = bool(node.attribute("is_causal", 0))
    later = (
        f"torch.ones({q.shape[2]}, {k.shape[2]}, dtype=torch.bool, device={q}.device)"
    )
    if node.operand(3) is None:
        if causal and past:
            return node.sheet.line("mask", f"{later}.tril({past})")
        return None
    mask = node.value(3)
    fill = "-math.inf" if mask.tensor.is_floating_point() else "False"
    missing = k.shape[2] - mask.shape[-1]
    if missing and mask.shape[-1] > 1:
        mask = node.sheet.line("mask", f"F.pad({mask}, (0, {missing}), value={fill})")
    if causal:
        text = f"{mask}.masked_fill({later}.triu({past + 1}), {fill})"
        mask = node.sheet.line("mask", text)
    return mask


def _called(
    node: Node, q: Symbol, k: Symbol, v: Symbol, mask: Symbol | None, past: int
) -> str:
    arguments = [q.text, k.text, v.text]
    if mask is not None:
        arguments.append(f"attn_mask={mask}")
    elif node.attribute("is_causal", 0) and not past:
        arguments.append("is_causal=True")
    if node.attribute("scale") is not None:
        arguments.append(f"scale={number(node.attribute('scale'))}")
    if q.shape[1] != k.shape[1]:
        arguments.append("enable_gqa=True")
    return f"F.scaled_dot_product_attention({', '.join(arguments)})"


def _written_out(
    node: Node, q: Symbol, k: Symbol, v: Symbol, mask: Symbol | None, past: int
) -> tuple[str, Symbol]:
    """Return attention line by line, and the scores that the node gives."""
    add = node.sheet.line
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k = add("key", f"{k}.repeat_interleave({groups}, 1)")
        v = add("value", f"{v}.repeat_interleave({groups}, 1)")
    scale = node.attribute("scale") or q.shape[-1] ** -0.5
    scores = add("scores", f"{q} @ {k}.transpose(-2, -1) * {number(scale)}")
    steps = [scores]
    limit = node.attribute("softcap", 0)
    if limit:
        size = number(limit)
        scores = add("scores", f"{size} * torch.tanh({scores} / {size})")
    steps.append(scores)
    if mask is None and node.attribute("is_causal", 0):
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
    return f"({shares} @ {v})", steps[node.attribute("qk_matmul_output_mode", 0)]


def _rotary(node: Node) -> Symbol:
    x = node.value(0)
    flat = len(x.shape) == 3
    if flat:
        x = _heads(node, 0, "num_heads", "heads")
    # one angle for each place and pair of features, the same for all heads
    places = f"[{node.value(3)}]" if node.operand(3) is not None else ""
    cos = node.sheet.line("cos", f"{node.value(1)}{places}.unsqueeze(1)")
    sin = node.sheet.line("sin", f"{node.value(2)}{places}.unsqueeze(1)")
    size = node.attribute("rotary_embedding_dim", 0) or x.shape[-1]
    turned = f"{x}[..., :{size}]" if size < x.shape[-1] else x.text
    if node.attribute("interleaved", 0):
        a = node.sheet.line("a", f"{x}[..., 0:{size}:2]")
        b = node.sheet.line("b", f"{x}[..., 1:{size}:2]")
        join = "torch.stack([{}, {}], dim=-1).flatten(-2)"
    else:
        a, b = node.sheet.unpack(["a", "b"], f"{turned}.chunk(2, dim=-1)")
        join = "torch.cat([{}, {}], dim=-1)"
    text = join.format(f"{cos} * {a} - {sin} * {b}", f"{sin} * {a} + {cos} * {b}")
    if size < x.shape[-1]:
        text = f"torch.cat([{text}, {x}[..., {size}:]], dim=-1)"
    if flat:
        text = f"{text}.transpose(1, 2).flatten(2)"
    return node.gives(text)


ATTENTION: Mapping[str, Operator] = {
    "Attention": _attention,
    "RotaryEmbedding": _rotary,
}
