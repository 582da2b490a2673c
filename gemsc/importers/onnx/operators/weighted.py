"""Convolutions, matrix products and BatchNormalization."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

import gemsc.nn
from gemsc.importers.onnx.node import Node, Operator
from gemsc.importers.onnx.static import Static, torch_type
from gemsc.importers.sheet import Symbol
from gemsc.importers.weight import Array

CONVOLUTIONS: Any = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED: Any = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
BATCHNORMS: Any = {
    **dict.fromkeys([2, 3], (gemsc.nn.BatchNorm1d, nn.BatchNorm1d)),
    4: (gemsc.nn.BatchNorm2d, nn.BatchNorm2d),
    5: (gemsc.nn.BatchNorm3d, nn.BatchNorm3d),
}

# ---------------------------------------------------------------------- convolutions


def _convolution(node: Node) -> Symbol:
    """Conv: a layer, with a line that pads where the two ends are padded unlike."""
    x, shape = node.value(0), _weight_shape(node)
    rank = len(shape) - 2
    stride, dilation, groups = _window(node, rank)
    spans = [d * (k - 1) + 1 for k, d in zip(shape[2:], dilation, strict=True)]
    begin, end = _pads(node, x.shape[2:], spans, stride)
    if begin != end:
        pads = [p for pair in zip(begin[::-1], end[::-1], strict=True) for p in pair]
        x = node.sheet.line("padded", f"F.pad({x}, {tuple(pads)})")
        begin = (0,) * rank
    weight, bias = node.weight(1), _bias(node)
    if weight is None or isinstance(node.operand(2), Symbol):
        settings = ", ".join(map(str, [stride, begin, dilation, groups]))
        return node.gives(f"F.conv{rank}d({x}, {_tensors(node)}, {settings})")
    layer = CONVOLUTIONS[rank](
        shape[1] * groups,
        shape[0],
        tuple(shape[2:]),
        stride,
        begin,
        dilation,
        groups,
        bias=bias is not None,
        dtype=torch_type(weight.dtype),
    )
    return node.gives(f"{node.layer(layer, weight=weight, bias=bias)}({x})")


def _transposed_convolution(node: Node) -> Symbol:
    """ConvTranspose: a layer, with a line that crops where padding cannot say it."""
    x, shape = node.value(0), _weight_shape(node)
    rank = len(shape) - 2
    stride, dilation, groups = _window(node, rank)
    more = list(_setting(node, "output_padding", rank, 0))
    spans = [d * (k - 1) + 1 for k, d in zip(shape[2:], dilation, strict=True)]
    full = [
        (n - 1) * s + span + extra
        for n, s, span, extra in zip(x.shape[2:], stride, spans, more, strict=True)
    ]
    begin, end = _crops(node, x.shape[2:], full, stride)
    padding, crop = list(begin), ""
    for axis in range(rank):
        extra = more[axis] + begin[axis] - end[axis]
        fits = extra < max(stride[axis], dilation[axis])
        if begin[axis] != end[axis] and (begin[axis] < end[axis] or not fits):
            padding, crop = [0] * rank, _crop(begin, end, full)
            break
    if not crop:
        more = [m + b - e for m, b, e in zip(more, begin, end, strict=True)]
    weight, bias = node.weight(1), _bias(node)
    if weight is None or isinstance(node.operand(2), Symbol):
        settings = [stride, tuple(padding), tuple(more), groups, dilation]
        text = f"{x}, {_tensors(node)}, {', '.join(map(str, settings))}"
        return node.gives(f"F.conv_transpose{rank}d({text}){crop}")
    layer = TRANSPOSED[rank](
        shape[0],
        shape[1] * groups,
        tuple(shape[2:]),
        stride,
        tuple(padding),
        tuple(more),
        groups,
        bias=bias is not None,
        dilation=dilation,
        dtype=torch_type(weight.dtype),
    )
    return node.gives(f"{node.layer(layer, weight=weight, bias=bias)}({x}){crop}")


def _window(node: Node, rank: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return stride and dilation, a number for each axis, and the groups."""
    stride, dilation = (_setting(node, n, rank) for n in ("strides", "dilations"))
    return stride, dilation, node.attribute("group", 1)


def _bias(node: Node) -> Static | None:
    """Return the bias; None for zeros that are not trained, as torch.onnx writes."""
    bias = node.weight(2)
    if bias is None or bias.trained or bias.array.any():
        return bias
    return None


def _crop(begin: Sequence[int], end: Sequence[int], full: Sequence[int]) -> str:
    slices = [
        f"{b or ''}:{n - e if e else ''}"
        for b, e, n in zip(begin, end, full, strict=True)
    ]
    return f"[{', '.join([':', ':', *slices])}]"


def _weight_shape(node: Node) -> tuple[int, ...]:
    operand = node.operand(1)
    if operand is None or not 3 <= len(operand.shape) <= 5:
        raise node.refuse("is no convolution over 1, 2 or 3 axes")
    return operand.shape


def _setting(node: Node, name: str, rank: int, default: int = 1) -> tuple[int, ...]:
    return tuple(node.attribute(name, [default] * rank))


def _tensors(node: Node) -> str:
    bias = node.operand(2)
    if isinstance(bias, Symbol) and len(bias.shape) != 1:  # which torch sees too late
        raise node.refuse(f"has a bias of {bias.shape}")
    return f"{node.value(1)}, {'None' if bias is None else node.value(2)}"


def _pads(
    node: Node, sizes: Sequence[int], spans: Sequence[int], stride: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return how many zeros are put before and behind the values of each axis."""
    rank = len(spans)
    kind = node.attribute("auto_pad", "NOTSET")
    if kind == "VALID":
        return (0,) * rank, (0,) * rank
    if kind == "NOTSET":
        pads = tuple(node.attribute("pads", [0] * 2 * rank))
        return pads[:rank], pads[rank:]
    totals = [
        max((-(-n // s) - 1) * s + span - n, 0)
        for n, span, s in zip(sizes, spans, stride, strict=True)
    ]
    return _halves(totals, larger_first=kind == "SAME_LOWER")


def _crops(
    node: Node, sizes: Sequence[int], full: Sequence[int], stride: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return how many results of a transposed convolution go at each end."""
    kind = node.attribute("auto_pad", "NOTSET")
    wanted = node.attribute("output_shape")
    if wanted is None and not kind.startswith("SAME"):
        return _pads(node, sizes, full, stride)
    if wanted is None:
        wanted = [n * s for n, s in zip(sizes, stride, strict=True)]
    totals = [n - w for n, w in zip(full, wanted[-len(full) :], strict=True)]
    if min(totals) < 0:
        raise node.refuse(f"gives {tuple(full)}, less than its output_shape")
    return _halves(totals, larger_first=kind != "SAME_UPPER")


def _halves(
    totals: Sequence[int], *, larger_first: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    small = tuple(total // 2 for total in totals)
    large = tuple(total - half for total, half in zip(totals, small, strict=True))
    return (large, small) if larger_first else (small, large)


# ------------------------------------------------------------------- matrix products


def _matrix_product(node: Node) -> Symbol:
    """MatMul: nn.Linear where the second operand is a weight.

    A third operand is what the next node adds; see `fuse_bias`.
    """
    weight = node.weight(1)
    if weight is not None and weight.trained and len(weight.shape) == 2:
        return _linear(node, _turned(weight))
    text = f"{node.value(0)} @ {node.value(1)}"
    return node.gives(text + (f" + {node.value(2)}" if node.operand(2) else ""))


def _general_product(node: Node) -> Symbol:
    """Gemm: nn.Linear where the second operand is a weight."""
    alpha, beta = node.attribute("alpha", 1.0), node.attribute("beta", 1.0)
    weight = node.weight(1)
    if weight is not None and weight.trained and len(weight.shape) == 2:
        turned = weight if node.attribute("transB", 0) else _turned(weight)
        return _linear(node, turned, alpha, beta)
    right = f"{node.value(1)}.T" if node.attribute("transB", 0) else f"{node.value(1)}"
    return _plus(node, f"{_scale(alpha)}({_left(node)} @ {right})", beta)


def _left(node: Node) -> str:
    return f"{node.value(0)}.T" if node.attribute("transA", 0) else node.value(0).text


def _linear(
    node: Node, weight: Static, alpha: float = 1.0, beta: float = 1.0
) -> Symbol:
    left, bias = _left(node), node.weight(2)
    width = weight.shape[0]
    if bias is not None and alpha == beta == 1 and bias.shape in ((width,), (1, width)):
        bias = replace(
            bias,
            shape=(width,),
            weight=bias.weight.then(lambda array: array.reshape(-1)),
        )
    else:
        bias = None
    rest = 0.0 if bias is not None else beta
    held = node.held(weight, weight.shape)
    if held is not None and bias is None:
        return _plus(node, f"{_scale(alpha)}F.linear({left}, {held})", rest)
    layer = nn.Linear(
        weight.shape[1],
        width,
        bias=bias is not None,
        dtype=torch_type(weight.dtype),
    )
    text = node.layer(layer, weight=weight, bias=bias)
    return _plus(node, f"{_scale(alpha)}{text}({left})", rest)


def _scale(alpha: float) -> str:
    return "" if alpha == 1 else f"{alpha} * "


def _plus(node: Node, text: str, beta: float) -> Symbol:
    if node.operand(2) is None or beta == 0:
        return node.gives(text)
    return node.gives(f"{text} + {_scale(beta)}{node.value(2)}")


def _turned(weight: Static) -> Static:
    """Return a matrix as nn.Linear has it: a row for each output."""

    def turn(array: Array) -> Array:
        return array.T

    shape = weight.shape[::-1]
    return replace(weight, shape=shape, weight=weight.weight.then(turn))


# ---------------------------------------------------------------- BatchNormalization


def _batch_normalization(node: Node) -> Sequence[Symbol | None]:
    """BatchNormalization: a layer that trains, whatever `training_mode` says.

    Outputs but the first are what the layer's buffers become.
    """
    x = node.value(0)
    scale, shift, mean, variance = (node.weight(index) for index in range(1, 5))
    epsilon = node.attribute("epsilon", 1e-5)
    if not node.attribute("spatial", 1):
        raise node.refuse("is not spatial: it has a mean for each place")
    if mean is None or variance is None or scale is None or shift is None:
        terms = [x, *(node.value(index) for index in (3, 4, 1, 2))]
        text = ", ".join(map(str, terms))
        return [node.gives(f"F.batch_norm({text}, False, 0.0, {epsilon})")]
    if len(x.shape) not in BATCHNORMS:
        raise node.refuse(f"takes a value of {len(x.shape)} axes, not 2 to 5")
    ours, plain = BATCHNORMS[len(x.shape)]
    is_affine = not (node.is_filler(1, 1.0) and node.is_filler(2, 0.0))
    weights: dict[str, Static] = {}
    if is_affine:
        weights = {"weight": scale, "bias": shift}
    momentum = round(1 - node.attribute("momentum", 0.9), 9)
    settings: dict[str, Any] = {
        "eps": epsilon,
        "affine": is_affine,
        "dtype": torch_type(scale.dtype),
    }
    # before opset 14 a node that trains gives five values
    in_training = node.attribute("training_mode", 0) or len(node.proto.output) > 1
    count = x.shape[1]
    if in_training and node.is_filler(3, 0.0) and node.is_filler(4, 1.0):
        layer = plain(count, track_running_stats=False, **settings)
    else:
        layer = ours(count, momentum=momentum, **settings)
        weights |= {"running_mean": mean, "running_var": variance}
    return [node.gives(f"{node.layer(layer, **weights)}({x})")]


WEIGHTED: Mapping[str, Operator] = {
    "BatchNormalization": _batch_normalization,
    "Conv": _convolution,
    "ConvTranspose": _transposed_convolution,
    "Gemm": _general_product,
    "MatMul": _matrix_product,
}
