"""Convolutions: kernels turned to PyTorch's order of axes, padding in numbers."""

from __future__ import annotations

import numpy as np

from gemsc.importers.keras.activation import activated
from gemsc.importers.keras.images import Pads, image, padded, pads_of, per_axis
from gemsc.importers.keras.layer import Laid, LayerCall, translates
from gemsc.importers.sheet import Symbol, layer_class, slices
from gemsc.importers.weight import Array, Weight


@translates("Conv1D", "Conv2D", "Conv3D", "DepthwiseConv1D", "DepthwiseConv2D")
def _conv(call: LayerCall) -> Laid:
    """Let (..., in / groups, out) become (out, in / groups, ...).

    Of each channel alone, (..., in, multiplier) becomes (in * multiplier, 1, ...).
    """
    x, first = image(call)
    if call.layer.kind.startswith("Depthwise"):
        kernel, groups = call.variable(0).then(_each_channel), x.shape[1]
    else:
        kernel, groups = call.variable(0).then(_out_first), call.config["groups"]
    text = _convolved(call, x, "", kernel, _bias(call, 1), groups)
    return activated(call, text, call.config["activation"], first)


@translates("SeparableConv1D", "SeparableConv2D")
def _separable(call: LayerCall) -> Laid:
    """Two convolutions: one for each channel, and one of single pixels."""
    x, first = image(call)
    kernel = call.variable(0).then(_each_channel)
    text = _convolved(call, x, "depthwise", kernel, None, x.shape[1])
    between = call.sheet.line(f"{call.layer.name}_depthwise", text)
    bias, pixels = _bias(call, 2), call.variable(1).then(_out_first)
    sizes = between.shape[1], call.config["filters"], 1
    name = call.add(
        lambda: layer_class("Conv", len(x.shape) - 2)(*sizes, bias=bias is not None),
        "pointwise",
        weight=pixels,
        bias=bias,
    )
    return activated(call, f"{name}({between})", call.config["activation"], first)


def _bias(call: LayerCall, index: int) -> Weight | None:
    return call.variable(index) if call.config["use_bias"] else None


def _convolved(
    call: LayerCall,
    x: Symbol,
    part: str,
    kernel: Weight,
    bias: Weight | None,
    groups: int,
) -> str:
    """Return the expression of a convolution; a line pads its input where needed."""
    axes = len(x.shape) - 2
    made = call.shape_of(kernel)
    strides = per_axis(call.config["strides"], axes)
    dilation = per_axis(call.config["dilation_rate"], axes)
    pads = pads_of(call, x.shape[2:], made[2:], strides, dilation)
    padding = tuple(before for before, _ in pads)
    if any(before != after for before, after in pads):
        padding = (0,) * axes
    name = call.add(
        lambda: layer_class("Conv", axes)(
            made[1] * groups,
            made[0],
            made[2:],
            stride=strides,
            padding=padding,
            dilation=dilation,
            groups=groups,
            bias=bias is not None,
        ),
        part,
        weight=kernel,
        bias=bias,
    )
    return f"{name}({padded(call, x, _left(call, name, pads))})"


def _left(call: LayerCall, name: str, pads: Pads) -> Pads:
    """Return what a layer's own padding leaves: an earlier call may have chosen it."""
    padding = call.sheet.empty(name).padding
    left = [(b - p, a - p) for (b, a), p in zip(pads, padding, strict=True)]
    if any(size < 0 for pair in left for size in pair):
        raise call.refuse(
            "is called with images of sizes that it pads differently",
            help="build it once for each size",
        )
    return left


def _out_first(kernel: Array) -> Array:
    return np.moveaxis(kernel, (-1, -2), (0, 1))


def _each_channel(kernel: Array) -> Array:
    *sizes, channels, multiplier = kernel.shape
    moved = np.moveaxis(kernel, (-2, -1), (0, 1))
    return moved.reshape(channels * multiplier, 1, *sizes)


# ------------------------------------------------------------------ transposed


@translates("Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose")
def _transposed(call: LayerCall) -> Laid:
    """(..., out, in) becomes (in, out, ...); what Keras crops is cropped.

    PyTorch's window of all outputs is [padding, all - padding + output_padding). Where
    that reaches no further, zeros after the input do.
    """
    x, first = image(call)
    config, axes = call.config, len(x.shape) - 2
    kernel = call.variable(0).then(_out_first)
    made = call.shape_of(kernel)
    strides = per_axis(config["strides"], axes)
    dilation = per_axis(config["dilation_rate"], axes)
    after = config["output_padding"]
    wanted = [None] * axes if after is None else list(per_axis(after, axes))
    windows = [
        _window(config["padding"], d * (k - 1) + 1, s, max(s, d), extra)
        for k, s, d, extra in zip(made[2:], strides, dilation, wanted, strict=True)
    ]
    zeros, before, further, crops = zip(*windows, strict=True)
    bias = _bias(call, 1)
    name = call.add(
        lambda: layer_class("ConvTranspose", axes)(
            *made[:2],
            made[2:],
            stride=strides,
            padding=before,
            output_padding=further,
            bias=bias is not None,
            dilation=dilation,
        ),
        weight=kernel,
        bias=bias,
    )
    text = f"{name}({padded(call, x, [(0, size) for size in zeros])})"
    if any(crops):
        text += slices([(0, crop) for crop in crops])
    return activated(call, text, config["activation"], first)


def _window(
    padding: str, kernel: int, stride: int, limit: int, extra: int | None
) -> tuple[int, int, int, int]:
    """Return zeros after the input, padding, output_padding, and what is cropped.

    As TensorFlow and JAX have it. `kernel` counts its gaps, and `extra` is Keras' own
    output_padding: of (n - 1) * stride + kernel % 2, or of + kernel where it is
    'valid'. PyTorch's output_padding is less than `limit`.
    """
    if padding == "valid":
        before = 0
        after = -(max(stride - kernel, 0) if extra is None else extra)
    elif padding == "same":
        total = stride + kernel - 2
        if extra is not None:
            total = kernel + kernel % 2 - 2 + extra
        left = min((total + 1) // 2, kernel - 1)
        before, after = kernel - 1 - left, kernel - 1 - (total - left)
    else:
        raise ValueError(f"padding={padding!r:.40}")
    zeros = max(-(-(before - after - limit + 1) // stride), 0)
    further = before - after - zeros * stride
    return zeros, before, max(further, 0), max(-further, 0)
