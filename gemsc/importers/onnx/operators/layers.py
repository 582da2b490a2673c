"""Convolutions, products, norms and Dropout, as layers where PyTorch has them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from torch import nn

import gemsc.nn
from gemsc.importers.onnx.operators.node import (
    Node,
    Number,
    dim_of,
    number,
    operator,
)
from gemsc.importers.onnx.operators.parameters import Static, Value, torch_type
from gemsc.importers.onnx.operators.windows import NodeWindows
from gemsc.importers.sheet import Symbol, layer_class, slices

Sizes = tuple[int, ...]

# ---------------------------------------------------------------------- convolutions


@operator("Conv")
def _convolution(node: Node, x: Symbol, weight: Value, bias: Value | None) -> Symbol:
    """A layer, with a line that pads where the two ends are padded unlike."""
    group = node.attr.group
    _check_rank(node, weight)
    windows = NodeWindows.of(node, x.shape[2:], weight.shape[2:])
    rank, stride, padding = len(windows.sizes), windows.stride, windows.before
    if padding != windows.after:
        x = node.sheet.line("padded", windows.padded(x.text))
        padding = (0,) * rank
    channels = weight.shape[1] * group, weight.shape[0]
    settings = {"stride": stride, "padding": padding, "dilation": windows.dilation}
    settings["groups"] = group
    return node.gives(_convolved(node, x, weight, bias, channels, settings))


@operator("ConvTranspose")
def _transposed_convolution(
    node: Node, x: Symbol, weight: Value, bias: Value | None
) -> Symbol:
    """A layer, with a line that crops where padding cannot say it."""
    group = node.attr.group
    _check_rank(node, weight)
    rank, kernel = weight.rank - 2, weight.shape[2:]
    stride = tuple(node.attr.strides or [1] * rank)
    dilation = tuple(node.attr.dilations or [1] * rank)
    more = tuple(node.attr.output_padding or [0] * rank)
    full = [
        (n - 1) * s + d * (k - 1) + 1 + extra
        for n, s, d, k, extra in zip(
            x.shape[2:], stride, dilation, kernel, more, strict=True
        )
    ]
    begin, end = _crops(node, x.shape[2:], full, stride)
    uneven = tuple(m + b - e for m, b, e in zip(more, begin, end, strict=True))
    fits = all(
        b == e or (b > e and extra < max(s, d))
        for b, e, extra, s, d in zip(begin, end, uneven, stride, dilation, strict=True)
    )
    padding, crop = begin, ""
    if fits:
        more = uneven
    else:
        padding, crop = (0,) * rank, slices([*zip(begin, end, strict=True)])
    channels = weight.shape[0], weight.shape[1] * group
    settings = {"stride": stride, "padding": padding, "output_padding": more}
    settings |= {"groups": group, "dilation": dilation}
    return node.gives(_convolved(node, x, weight, bias, channels, settings) + crop)


def _convolved(
    node: Node,
    x: Symbol,
    weight: Value,
    bias: Value | None,
    channels: tuple[int, int],
    settings: Mapping[str, Any],
) -> str:
    """Return the call of a layer; of a function, where the data give a weight."""
    rank = weight.rank - 2
    if isinstance(weight, Symbol) or isinstance(bias, Symbol):
        if isinstance(bias, Symbol) and bias.rank != 1:  # which torch sees too late
            raise node.refuse(f"has a bias of {bias.shape}")
        tensors = [weight, *([] if bias is None else [bias])]
        texts = [str(node.tensor(tensor)) for tensor in tensors]
        texts += ["None"] * (bias is None) + [str(v) for v in settings.values()]
        name = "conv" if node.kind == "Conv" else "conv_transpose"
        return f"F.{name}{rank}d({x}, {', '.join(texts)})"
    if bias is not None and not bias.trained and not bias.array.any():
        bias = None  # as torch.onnx writes none
    layer = layer_class(node.kind, rank)(
        *channels,
        weight.shape[2:],
        **settings,
        bias=bias is not None,
        dtype=torch_type(weight.dtype),
    )
    return f"{node.layer(layer, weight=weight, bias=bias)}({x})"


def _check_rank(node: Node, weight: Value) -> None:
    if not 3 <= weight.rank <= 5:
        raise node.refuse("is not a convolution over 1, 2 or 3 axes")


def _crops(
    node: Node, sizes: Sequence[int], full: Sequence[int], stride: Sequence[int]
) -> tuple[Sizes, Sizes]:
    """Return how many results of a transposed convolution go at each end."""
    rank, kind, wanted = len(full), node.attr.auto_pad, node.attr.output_shape
    if wanted is None and not kind.startswith("SAME"):
        pads = kind == "NOTSET" and node.attr.pads
        pads = tuple(pads or [0] * 2 * rank)
        return pads[:rank], pads[rank:]
    if wanted is None:
        wanted = [n * s for n, s in zip(sizes, stride, strict=True)]
    totals = [n - w for n, w in zip(full, wanted[-rank:], strict=True)]
    if min(totals) < 0:
        raise node.refuse(f"gives {tuple(full)}, less than its output_shape")
    few, many = (tuple((total + odd) // 2 for total in totals) for odd in (0, 1))
    return (few, many) if kind == "SAME_UPPER" else (many, few)


# ------------------------------------------------------------------- matrix products


@operator("MatMul")
def _matrix_product(node: Node, x: Value, weight: Value, bias: Value | None) -> Symbol:
    """nn.Linear where the second operand is a weight.

    A third operand is what the next node adds; see `fuse_bias`.
    """
    if _is_matrix(weight):
        return _linear(node, str(node.tensor(x)), _turned(weight), bias)
    text = f"{node.tensor(x)} @ {node.tensor(weight)}"
    return node.gives(text if bias is None else f"{text} + {node.tensor(bias)}")


@operator("Gemm")
def _general_product(node: Node, x: Value, weight: Value, bias: Value | None) -> Symbol:
    left = f"{node.tensor(x)}{'.T' * node.attr.transA}"
    is_turned, alpha, beta = bool(node.attr.transB), node.attr.alpha, node.attr.beta
    if _is_matrix(weight):
        turned = weight if is_turned else _turned(weight)
        return _linear(node, left, turned, bias, alpha, beta)
    right = f"{node.tensor(weight)}{'.T' * is_turned}"
    return _plus(node, f"{_scale(alpha)}({left} @ {right})", bias, beta)


def _is_matrix(weight: Value) -> TypeGuard[Static]:
    """Whether an operand is what nn.Linear holds."""
    return isinstance(weight, Static) and weight.trained and weight.rank == 2


def _linear(
    node: Node,
    left: str,
    weight: Static,
    bias: Value | None,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> Symbol:
    width, depth = weight.shape
    held_bias = None
    fits = bias is not None and bias.shape in ((width,), (1, width))
    if fits and isinstance(bias, Static) and alpha == beta == 1:
        held_bias, bias = bias.flat(), None
    held = node.parameters.held(weight)
    if held is not None and held_bias is None:
        text = f"F.linear({left}, {held})"
    else:
        layer = nn.Linear(
            depth, width, bias=held_bias is not None, dtype=torch_type(weight.dtype)
        )
        text = f"{node.layer(layer, weight=weight, bias=held_bias)}({left})"
    return _plus(node, f"{_scale(alpha)}{text}", bias, beta)


def _turned(weight: Static) -> Static:
    """Return a matrix as nn.Linear has it: a row for each output."""
    return weight.moved(lambda array: array.T, *weight.shape[::-1])


def _scale(alpha: float) -> str:
    return "" if alpha == 1 else f"{alpha} * "


def _plus(node: Node, text: str, bias: Value | None, beta: float) -> Symbol:
    if bias is None or beta == 0:
        return node.gives(text)
    return node.gives(f"{text} + {_scale(beta)}{node.tensor(bias)}")


# ----------------------------------------------------------------------------- norms


@operator("BatchNormalization")
def _batch_norm(
    node: Node, x: Symbol, scale: Value, shift: Value, mean: Value, variance: Value
) -> Sequence[Symbol]:
    """A layer that trains, whatever `training_mode` says.

    Outputs but the first are what the layer's buffers become.
    """
    if node.attr.spatial == 0:
        raise node.refuse("is not spatial: it has a mean for each place")
    held = [v for v in (scale, shift, mean, variance) if isinstance(v, Static)]
    if len(held) < 4:
        values = [x, *map(node.tensor, (mean, variance, scale, shift))]
        text = ", ".join(map(str, values))
        return [node.gives(f"F.batch_norm({text}, False, 0.0, {node.attr.epsilon})")]
    if not 2 <= x.rank <= 5:
        raise node.refuse(f"takes a value of {x.rank} axes, not 2 to 5")
    name = f"BatchNorm{max(x.rank - 2, 1)}d"
    is_affine = not (node.is_filler(scale, 1.0) and node.is_filler(shift, 0.0))
    names = ("weight", "bias", "running_mean", "running_var")
    weights = dict(zip(names, held, strict=True))
    settings: dict[str, Any] = {
        "eps": node.attr.epsilon,
        "affine": is_affine,
        "dtype": torch_type(held[0].dtype),
    }
    if not is_affine:
        del weights["weight"], weights["bias"]
    # before opset 14 a node that trains gives five values
    in_training = node.attr.training_mode or len(node.proto.output) > 1
    if in_training and node.is_filler(mean, 0.0) and node.is_filler(variance, 1.0):
        layer = getattr(nn, name)(x.shape[1], track_running_stats=False, **settings)
        del weights["running_mean"], weights["running_var"]
    else:
        settings["momentum"] = round(1 - node.attr.momentum, 9)
        layer = getattr(gemsc.nn, name)(x.shape[1], **settings)
    return [node.gives(f"{node.layer(layer, **weights)}({x})")]


def _held(shape: Sequence[int], *operands: Value | None) -> list[Static]:
    """Return the operands if a layer can hold them: all known, and of this shape."""
    known = [v for v in operands if isinstance(v, Static) and v.shape == tuple(shape)]
    return known if len(known) == len(operands) else []


def _called(node: Node, module: nn.Module, held: Sequence[Static], x: Symbol) -> Symbol:
    weights = dict(zip(("weight", "bias"), held, strict=False))
    return node.gives(f"{node.layer(module, **weights)}({x})")


@operator("LayerNormalization", "RMSNormalization")
def _layer_norm(
    node: Node, x: Symbol, scale: Value, bias: Value | None
) -> Sequence[Symbol | None]:
    """A norm of the last axes; and their mean and deviation, where these are used."""
    place, epsilon = node.axis(node.attr.axis, x.rank), node.attr.epsilon
    shape, eps = x.shape[place:], number(epsilon)
    is_rms = node.kind == "RMSNormalization"
    if held := _held(shape, scale, *[] if bias is None else [bias]):
        module = (
            nn.RMSNorm(shape, eps=epsilon)
            if is_rms
            else nn.LayerNorm(shape, eps=epsilon, bias=bias is not None)
        )
        y = _called(node, module, held, x)
    else:
        function = "F.rms_norm" if is_rms else "F.layer_norm"
        text = f"{function}({x}, {shape}, eps={eps}) * {node.tensor(scale)}"
        y = node.gives(text if bias is None else f"{text} + {node.tensor(bias)}")
    results: list[Symbol | None] = [y, None, None]
    last = place == x.rank - 1
    dims = dim_of(place, x.rank) if last else tuple(range(place, x.rank))
    if any(node.outputs[1:2]):
        results[1] = node.gives(f"{x}.mean({dims}, keepdim=True)", 1)
    if any(node.outputs[2:3]):
        variance = f"{x}.var({dims}, correction=0, keepdim=True)"
        results[2] = node.gives(f"({variance} + {eps}).rsqrt()", 2)
    return results[: len(node.outputs)]


@operator("InstanceNormalization")
def _instance_norm(node: Node, x: Symbol, scale: Value, bias: Value) -> Symbol:
    held, eps = _held(x.shape[1:2], scale, bias), number(node.attr.epsilon)
    # torch.onnx makes weights up for a norm without them
    if held and node.is_filler(scale, 1) and node.is_filler(bias, 0):
        return node.gives(f"F.instance_norm({x}, eps={eps})")
    if held and 3 <= x.rank <= 5:
        make = layer_class("InstanceNorm", x.rank - 2)
        module = make(x.shape[1], eps=node.attr.epsilon, affine=True)
        return _called(node, module, held, x)
    settings = f"weight={node.tensor(scale)}, bias={node.tensor(bias)}, eps={eps}"
    return node.gives(f"F.instance_norm({x}, {settings})")


@operator("GroupNormalization")
def _group_norm(node: Node, x: Symbol, scale: Value, bias: Value) -> Symbol:
    num_groups, channels = node.attr.num_groups, x.shape[1]
    held = _held((channels,), scale, bias)
    if held and (node.opset > 20 or num_groups == channels):
        module = nn.GroupNorm(num_groups, channels, eps=node.attr.epsilon)
        return _called(node, module, held, x)
    across = f".reshape(-1{', 1' * (x.rank - 2)})"  # beside values with further axes
    if node.opset < 21:  # one number for each group
        across += f".repeat_interleave({channels // num_groups}, 0)"
    normal = f"F.group_norm({x}, {num_groups}, eps={number(node.attr.epsilon)})"
    scale, bias = node.tensor(scale), node.tensor(bias)
    return node.gives(f"{normal} * {scale}{across} + {bias}{across}")


@operator("LRN")
def _local_response_norm(node: Node, x: Symbol) -> Symbol:
    size = node.attr.size
    if size % 2:
        module = nn.LocalResponseNorm(
            size, alpha=node.attr.alpha, beta=node.attr.beta, k=node.attr.bias
        )
        return node.gives(f"{node.layer(module)}({x})")
    # PyTorch takes the odd one before the channel
    pads = (0, 0, (size - 1) // 2, size // 2)
    squares = f"F.pad({x}.square().flatten(2).unsqueeze(1), {pads})"
    mean = f"F.avg_pool2d({squares}, ({size}, 1), stride=1).reshape({x}.shape)"
    share = node.sheet.line("near", mean)
    scale = f"({number(node.attr.bias)} + {number(node.attr.alpha)} * {share})"
    return node.gives(f"{x} / {scale} ** {number(node.attr.beta)}")


@operator("LpNormalization")
def _lp_norm(node: Node, x: Symbol) -> Symbol:
    dim = dim_of(node.axis(node.attr.axis, x.rank), x.rank)
    return node.gives(f"F.normalize({x}, p={node.attr.p}, dim={dim})")


@operator("MeanVarianceNormalization")
def _mean_variance_norm(node: Node, x: Symbol) -> Symbol:
    dims = tuple(node.axis(axis, x.rank) for axis in node.attr.axes)
    spread = f"{x}.std({dims}, correction=0, keepdim=True)"
    return node.gives(f"({x} - {x}.mean({dims}, keepdim=True)) / ({spread} + 1e-9)")


@operator("Dropout")
def _dropout(node: Node, x: Symbol, ratio: Number | None) -> Symbol:
    """A layer, which does nothing in evaluation."""
    if any(node.outputs[1:]):
        raise node.refuse("gives its mask")
    share = 0.5 if ratio is None else ratio
    if not 0 <= share <= 1 or math.isnan(share):
        raise node.refuse(f"has the ratio {share}")
    return node.gives(f"{node.layer(nn.Dropout(float(number(share))))}({x})")
