"""Forms: the equation of one call, where it depends on how it is called."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor, fx

from gemsc.ir.operators.calls import Call
from gemsc.nn import FrozenBatchNorm


@dataclass(frozen=True)
class Equation:
    """An equation, and its operands' names among a call's arguments and parameters.

    `sizes` are those of the letters of products. What `whole` says why is not cut.
    """

    text: str
    operands: tuple[str, ...] = ("input", "weight", "bias")
    sizes: Mapping[str, int] = field(default_factory=dict)
    whole: str = ""


Form = Callable[[Call, Equation], Equation | None]  # of one call; None: it has none


def tensor_of(node: fx.Node) -> Tensor:
    """Return what stands for a node's value; the rest of `ir` is above this room."""
    tensor: Tensor = node.meta["val"]
    return tensor


def _rank_of(node: fx.Node) -> int:
    return tensor_of(node).dim()


def _batched(call: Call, equation: Equation) -> Equation | None:
    """See that there are samples; a layer of no rank takes any."""
    alone = call.detail and _rank_of(call.input) != call.rank + 2
    return None if alone else equation


def _of_channels(call: Call, equation: Equation) -> Equation | None:
    """See that whole channels are dropped, and nothing is put in their place."""
    return _batched(call, equation) if call.detail else None


def _convolution(call: Call, equation: Equation) -> Equation | None:
    differs = call.get("padding_mode", "zeros") != "zeros"
    if _rank_of(call.input) != call.rank + 2:
        return None
    whole = "only zeros are padded in parts" if differs else ""
    return replace(equation, sizes={"g": int(call.get("groups", 1))}, whole=whole)


def _by_channels(call: Call, equation: Equation) -> Equation | None:
    """Return the equation of a frozen BatchNorm or of PReLU; others mix channels."""
    if isinstance(call.layer, FrozenBatchNorm):
        return equation
    weight = getattr(call.layer, "weight", call.arguments.get("weight"))
    if weight is None:
        return None
    slopes = weight if isinstance(weight, Tensor) else tensor_of(weight)
    text = "n c *x, c -> n c *x" if slopes.numel() > 1 else "*d, s! -> *d"
    return Equation(text, ("input", "weight")) if slopes.dim() else None


def _padded(call: Call, equation: Equation) -> Equation | None:
    pad = call.get("pad", call.get("padding"))
    if not isinstance(pad, tuple | list):
        return None
    rank, count = _rank_of(call.input), len(pad) // 2
    kept = [f"k{place}" for place in range(rank - count)]
    source = [*kept, *(f"x{place}!" for place in range(count))]
    result = [*kept, *(f"y{place}" for place in range(count))]
    return replace(equation, text=f"{' '.join(source)} -> {' '.join(result)}")


def _pixel_shuffle(call: Call, equation: Equation) -> Equation | None:
    factor, shape = int(call["upscale_factor"]), tensor_of(call.input).shape
    sizes = {"c": shape[-3] // factor**2, "r": factor}
    return replace(equation, sizes=sizes) if len(shape) == 4 else None


def _instance_norm(call: Call, equation: Equation) -> Equation | None:
    tracks = call.get("track_running_stats", False) or call.get("running_mean")
    alone = _rank_of(call.input) == getattr(call.layer, "_get_no_batch_dim", int)()
    return None if tracks or alone else equation


def _group_norm(call: Call, equation: Equation) -> Equation:
    return replace(equation, sizes={"g": int(call["num_groups"])})


def _last_normalized(call: Call, equation: Equation) -> Equation:
    shape = call["normalized_shape"]
    count = 1 if isinstance(shape, int) else len(tuple(shape))
    last = " ".join(f"h{place}!" for place in range(count))
    return replace(equation, text=f"*b {last}, {last}, {last} -> *b {last}")


def _matmul(call: Call, equation: Equation) -> Equation:
    names = ("input", "mat2" if "mat2" in call.arguments else "other")
    left, right = (_rank_of(call[name]) for name in names)
    first = "*b m k+" if left > 1 else "k+"
    second = "*b k n" if right > 1 else "k"
    free = ("m " if left > 1 else "") + ("n" if right > 1 else "")
    batch = "*b " if max(left, right) > 1 else ""
    return Equation(f"{first}, {second} -> {batch}{free}", names)


def _addmm(call: Call, equation: Equation) -> Equation:
    scaled = call.get("beta", 1) != 1 or call.get("alpha", 1) != 1
    names = ("mat1", "mat2", "input")
    if "batch1" in call.arguments:
        names = ("batch1", "batch2", "input")
    k = "k!" if scaled else "k+"
    text = f"*b m {k}, *b k n, *b m n -> *b m n"
    if _rank_of(call["input"]) == 1:
        text = f"m {k}, k n, n -> m n"
    return Equation(text, names)


def _attention(call: Call, equation: Equation) -> Equation:
    if not call.get("enable_gqa", False):
        return equation
    heads = int(tensor_of(call["key"]).shape[-3])
    mask = call.arguments.get("attn_mask")
    lower = isinstance(mask, fx.Node) and _rank_of(mask) == 2
    heads_of = "" if lower else "*b (h r) "
    text = f"*b (h r) q d!, *b h k! d, *b h k e, {heads_of}q k -> *b (h r) q e"
    return replace(equation, text=text, sizes={"h": heads})


def _embedding(call: Call, equation: Equation) -> Equation:
    whole = call.get("max_norm") is not None or any(
        call.get(name, False) for name in ("sparse", "scale_grad_by_freq")
    )
    return replace(equation, whole="it looks at all words" if whole else "")


def _cross_entropy(call: Call, equation: Equation) -> Equation:
    target = tensor_of(call["target"])
    if target.is_floating_point() or _rank_of(call.input) < 2:
        return replace(equation, text="*x!, *y! -> ")
    result = "n *x" if call.get("reduction", "mean") == "none" else ""
    return replace(equation, text=f"n c *x, n *x -> {result}")


def _einsum(call: Call, equation: Equation) -> Equation | None:
    text = call.node.args[0]
    if not isinstance(text, str) or "->" not in text:
        return None
    left, right = text.replace(" ", "").split("->")
    summed = set(left) - set(right) - set(",.")

    def spaced(side: str) -> str:
        words = re.findall(r"\.\.\.|\w", side)
        marked = [f"{w}+" if w in summed else w for w in words]
        return " ".join("*B" if word == "..." else word for word in marked)

    sides = left.split(",")
    diagonal = any(len(set(side)) < len(side.replace("...", ".")) for side in sides)
    return Equation(
        f"{', '.join(map(spaced, sides))} -> {spaced(right)}",
        tuple(f"operand{place}" for place in range(len(sides))),
        whole="it takes a diagonal" if diagonal else "",
    )


def _index_add(call: Call, equation: Equation) -> Equation | None:
    plain = call.get("alpha", 1) == 1 and call.get("dim") in (0, -_rank_of(call.input))
    return equation if plain else None


FORMS: dict[str, Form] = {
    "conv": _convolution,
    "conv_transpose": _convolution,
    **dict.fromkeys(("max_pool", "avg_pool", "interpolate"), _batched),
    **dict.fromkeys(("adaptive_avg_pool", "adaptive_max_pool"), _batched),
    "pixel_shuffle": _pixel_shuffle,
    "pad": _padded,
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
    "layer_norm": _last_normalized,
    "rms_norm": _last_normalized,
    "channel_dropout": _of_channels,
    "channels": _by_channels,
    "matmul": _matmul,
    "addmm": _addmm,
    "einsum": _einsum,
    "embedding": _embedding,
    "attention": _attention,
    "index_add": _index_add,
    "cross_entropy": _cross_entropy,
}
