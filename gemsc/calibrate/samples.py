"""Operators of random shapes, spread over what models use: what calibration measures.

No model stands behind them. Sizes are drawn evenly in their logarithm.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_ATEN = torch.ops.aten
POWERS = 0.4  # of the numbers of channels


@dataclass(frozen=True)
class AtenCall:
    """An ATen operator with its arguments.

    `warm` are those that the operator before has just computed, when a model runs.
    """

    operator: Any
    args: tuple[Any, ...]
    warm: tuple[Tensor, ...]

    def run(self) -> Any:
        """Return what the operator computes."""
        return self.operator(*self.args)


@dataclass
class Draw:
    """A source of random sizes and tensors.

    `largest` bounds the operations, and a tenth of it the elements, of one operator.
    """

    rng: random.Random
    largest: float
    device: str = "cpu"

    def between(self, low: float, high: float) -> int:
        """Return a whole number, even in its logarithm."""
        return round(math.exp(self.rng.uniform(math.log(low), math.log(high))))

    def pick(self, *choices: Any) -> Any:
        """Return one of the choices."""
        return self.rng.choice(choices)

    def channels(self, low: int = 8, high: int = 512) -> int:
        """Return a number of channels: a power of two or a multiple of 16, mostly."""
        if self.rng.random() < POWERS:
            power = round(self.rng.uniform(math.log2(low), math.log2(high)))
            return max(low, min(high, 1 << power))
        step = int(self.pick(16, 16, 8))
        return max(low, step * max(1, round(self.between(low, high) / step)))

    def tensor(self, *shape: int) -> Tensor:
        """Return random numbers."""
        return torch.randn(*shape, device=self.device)

    def activation(self, *shape: int) -> Tensor:
        """Return what a convolution and a ReLU would: neighbours alike, half of it 0.

        Comparing such numbers takes less time than comparing those of `tensor`, as the
        branches can be foreseen.
        """
        smooth = (F.avg_pool2d, F.avg_pool3d)[len(shape) - 4]
        return smooth(self.tensor(*shape), 3, stride=1, padding=1).relu_()

    def work(self) -> float:
        """Return a number of operations, from a thousandth of the largest on."""
        return float(self.between(max(1e4, self.largest / 3000), self.largest))

    def elements(self) -> int:
        """Return a number of elements for an operator that moves data."""
        return self.between(1e3, self.largest / 75)

    def image(
        self, elements: int, *, smallest: int = 4, widest: int = 512
    ) -> tuple[int, int, int, int]:
        """Return (batch, channels, height, width) of about so many elements."""
        batch, channels = self.between(1, 16), self.channels(8, widest)
        side = math.sqrt(elements / (batch * channels))
        while side < smallest and batch * channels > 8:
            batch, channels = max(1, batch // 2), max(8, channels // 16 * 8)
            side = math.sqrt(elements / (batch * channels))
        size = max(smallest, min(256, round(side)))
        return batch, channels, size, size


Source = Callable[[Draw], Iterator[AtenCall]]


def _convolution(
    draw: Draw,
    kernels: tuple[int, ...],
    *,
    dims: tuple[int, ...] = (2,),
    depthwise: bool = False,
    transposed: bool = False,
    single: bool = False,
    batch: tuple[int, ...] = (),
    last: bool = False,
) -> Iterator[AtenCall]:
    """Yield a convolution over as many axes as one of `dims`, and its two gradients.

    `single` of one small image; `last` as at the end of a network: few positions and
    many channels.
    """
    axes = draw.pick(*dims) if len(dims) > 1 else dims[0]
    count = draw.pick(*batch) if batch else draw.between(2, 16) if last else 0
    kernel = draw.pick(*kernels)
    stride = 2 if transposed else draw.pick(1, 1, 1, 2)
    first = not depthwise and not transposed and kernel > 1 and draw.rng.random() < 0.15
    widest = 2048 if kernel == 1 else 512
    fewest = widest // 8 if last else 8
    channels_in = draw.pick(1, 3, 4) if first else draw.channels(fewest, widest)
    channels_out = channels_in if depthwise else draw.channels(fewest, widest)
    groups = channels_in if depthwise else 1
    count = 1 if single else count or draw.between(1, 16)
    per_position = 2 * channels_in * channels_out // groups * kernel**axes * count
    positions = (draw.work() if not depthwise else draw.work() / 20) / per_position
    side = max(draw.pick(1, 2, 2, 3), min(128, round(positions ** (1 / axes))))
    if last:
        side = draw.pick(1, 2, 2, 3, 4)
    if single:
        side = min(side, int(math.sqrt(20480 / channels_in)))  # as PyTorch decides
    if side < 1 or per_position * side**axes > 4 * draw.largest:
        return
    padding = 0 if transposed else kernel // 2
    inner = side if transposed else side * stride
    filters = (channels_in, channels_out) if transposed else (channels_out, channels_in)
    weight = draw.tensor(filters[0], filters[1] // groups, *[kernel] * axes)
    x = draw.tensor(count, channels_in, *[inner] * axes)
    shape = ([stride] * axes, [padding] * axes, [1] * axes)
    settings = (*shape, transposed, [0] * axes, groups)
    forward = (x, weight, draw.tensor(channels_out), *settings)
    yield AtenCall(_ATEN.convolution.default, forward, (x,))
    gradient = torch.empty_like(_ATEN.convolution.default(*forward)).normal_()
    back = (gradient, x, weight, [channels_out], *settings)
    for wanted in ([True, False, False], [False, True, True]):
        call = _ATEN.convolution_backward.default
        yield AtenCall(call, (*back, wanted), (gradient,))


def matmul(draw: Draw) -> Iterator[AtenCall]:
    """Yield a linear layer's product and the two of its backward."""
    inner, columns = draw.channels(16, 2048), draw.channels(16, 2048)
    rows = max(1, min(8192, round(draw.work() / (2 * inner * columns))))
    x, weight = draw.tensor(rows, inner), draw.tensor(columns, inner)
    gradient = draw.tensor(rows, columns)
    bias = draw.tensor(columns)
    yield AtenCall(_ATEN.addmm.default, (bias, x, weight.t()), (x,))
    yield AtenCall(_ATEN.mm.default, (gradient, weight), (gradient,))
    yield AtenCall(_ATEN.mm.default, (gradient.t(), x), (gradient,))


def batched_matmul(draw: Draw) -> Iterator[AtenCall]:
    """Yield the two products of attention that is written out."""
    batch, length = draw.between(4, 128), draw.between(16, 512)
    size = draw.pick(16, 32, 64, 128)
    if 2.0 * batch * length * length * size > draw.largest:
        return
    query, key = draw.tensor(batch, length, size), draw.tensor(batch, length, size)
    scores = draw.tensor(batch, length, length)
    yield AtenCall(_ATEN.bmm.default, (query, key.transpose(1, 2)), (query,))
    yield AtenCall(_ATEN.bmm.default, (scores, key), (scores,))


def attention(draw: Draw) -> Iterator[AtenCall]:
    """Yield scaled dot product attention and its backward, which are a CPU's alone."""
    if draw.device != "cpu":
        return
    heads, size = draw.pick(4, 8, 12), draw.pick(16, 32, 64, 128)
    length, batch = draw.between(16, 512), draw.between(1, 16)
    if 4.0 * batch * heads * length * length * size > draw.largest:
        return
    # as a projection gives them: (batch, length, heads, size) with two axes swapped
    shape = (batch, length, heads, size)
    query, key, value = (draw.tensor(*shape).transpose(1, 2) for _ in range(3))
    forward = _ATEN._scaled_dot_product_flash_attention_for_cpu.default
    backward = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default
    yield AtenCall(forward, (query, key, value, 0.0, False), (query, key, value))
    out, sums = forward(query, key, value, 0.0, False)
    gradient = draw.tensor(*shape).transpose(1, 2)
    args = (gradient, query, key, value, out, sums, 0.0, False)
    yield AtenCall(backward, args, (gradient,))


def _batch_norm(draw: Draw) -> Iterator[AtenCall]:
    x = draw.tensor(*draw.image(draw.elements(), smallest=2, widest=2048))
    channels = x.shape[1]
    weight, bias, mean = (draw.tensor(channels) for _ in range(3))
    variance = draw.tensor(channels).abs() + 1
    args = (x, weight, bias, mean, variance, True, 0.1, 1e-5)
    yield AtenCall(_ATEN.native_batch_norm.default, args, (x,))
    _, saved_mean, saved_scale = _ATEN.native_batch_norm.default(*args)
    gradient = draw.tensor(*x.shape)
    back = (gradient, x, weight, mean, variance, saved_mean, saved_scale)
    call = _ATEN.native_batch_norm_backward.default
    yield AtenCall(call, (*back, True, 1e-5, [True, True, True]), (gradient,))


def _group_norm(draw: Draw) -> Iterator[AtenCall]:
    x = draw.tensor(*draw.image(draw.elements()))
    batch, channels, height, width = x.shape
    weight, bias = draw.tensor(channels), draw.tensor(channels)
    sizes = (batch, channels, height * width, draw.pick(1, 4, 8))
    args = (x, weight, bias, *sizes, 1e-5)
    yield AtenCall(_ATEN.native_group_norm.default, args, (x,))
    _, mean, scale = _ATEN.native_group_norm.default(*args)
    gradient = draw.tensor(*x.shape)
    back = (gradient, x, mean, scale, weight, *sizes, [True, True, True])
    yield AtenCall(_ATEN.native_group_norm_backward.default, back, (gradient,))


def _table(draw: Draw) -> Tensor:
    width = draw.channels(16, 2048)
    return draw.tensor(max(1, draw.elements() // width), width)


def _layer_norm(draw: Draw) -> Iterator[AtenCall]:
    x = _table(draw)
    width = [x.shape[1]]
    weight, bias, gradient = (
        draw.tensor(*width),
        draw.tensor(*width),
        draw.tensor(*x.shape),
    )
    forward = _ATEN.native_layer_norm.default
    yield AtenCall(forward, (x, width, weight, bias, 1e-5), (x,))
    _, mean, scale = forward(x, width, weight, bias, 1e-5)
    back = (gradient, x, width, mean, scale, weight, bias, [True, True, True])
    yield AtenCall(_ATEN.native_layer_norm_backward.default, back, (gradient,))


def _softmax(draw: Draw) -> Iterator[AtenCall]:
    x = _table(draw)
    gradient = draw.tensor(*x.shape)
    yield AtenCall(_ATEN._softmax.default, (x, -1, False), (x,))
    out = _ATEN._softmax.default(x, -1, False)
    back = (gradient, out, -1, x.dtype)
    yield AtenCall(_ATEN._softmax_backward_data.default, back, (gradient,))


def pointwise(draw: Draw) -> Iterator[AtenCall]:
    """Yield what activations and residuals cost, forward and backward."""
    x = draw.tensor(*draw.image(draw.elements()))
    y = draw.tensor(*x.shape)
    yield AtenCall(_ATEN.relu.default, (x,), (x,))
    yield AtenCall(_ATEN.threshold_backward.default, (x, y, 0), (x,))
    yield AtenCall(_ATEN.add.Tensor, (x, y), (x,))
    yield AtenCall(_ATEN.mul.Tensor, (x, y), (x,))


def functions(draw: Draw) -> Iterator[AtenCall]:
    """Yield the functions that take more than a few operations an element."""
    x = draw.tensor(*draw.image(draw.elements()))
    y = draw.tensor(*x.shape)
    yield AtenCall(_ATEN.gelu.default, (x,), (x,))
    yield AtenCall(_ATEN.gelu_backward.default, (x, y), (x,))
    yield AtenCall(_ATEN.silu.default, (x,), (x,))
    yield AtenCall(_ATEN.sigmoid.default, (x,), (x,))
    yield AtenCall(_ATEN.silu_backward.default, (x, y), (x,))
    yield AtenCall(_ATEN.bernoulli.p, (x, 0.9), (x,))


def sums(draw: Draw) -> Iterator[AtenCall]:
    """Yield sums over rows (the gradient of a bias), columns and images."""
    x = _table(draw)
    yield AtenCall(_ATEN.sum.dim_IntList, (x, [0]), (x,))
    image = draw.tensor(*draw.image(draw.elements()))
    yield AtenCall(_ATEN.mean.dim, (image, [-1, -2]), (image,))


def copies(draw: Draw) -> Iterator[AtenCall]:
    """Yield concatenation, a gradient's slice, and copies in another order."""
    batch, channels, height, width = draw.image(draw.elements())
    x = draw.tensor(batch, channels, height, width)
    y = draw.tensor(batch, channels, height, width)
    yield AtenCall(_ATEN.cat.default, ([x, y], 1), (x,))
    part = x[:, : channels // 2]
    yield AtenCall(_ATEN.clone.default, (part,), (x,))
    rows = draw.tensor(batch, height * width, channels)
    swapped = rows.transpose(1, 2)
    args = (swapped,)
    yield AtenCall(_ATEN.clone.default, args, (rows,))


def pooling(draw: Draw) -> Iterator[AtenCall]:
    """Yield max and average pooling and their backwards."""
    x = draw.activation(*draw.image(draw.elements(), smallest=8))
    kernel = draw.pick(2, 2, 3)
    window = ([kernel] * 2, [2, 2], [kernel // 2 if kernel == 3 else 0] * 2)
    forward = _ATEN.max_pool2d_with_indices.default
    yield AtenCall(forward, (x, *window), (x,))
    out, indices = forward(x, *window)
    gradient = torch.randn_like(out)
    back = (gradient, x, *window, [1, 1], False, indices)
    yield AtenCall(_ATEN.max_pool2d_with_indices_backward.default, back, (gradient,))
    yield AtenCall(_ATEN.avg_pool2d.default, (x, *window), (x,))
    average = (gradient, x, *window, False, True, None)
    yield AtenCall(_ATEN.avg_pool2d_backward.default, average, (gradient,))


def pooling_3d(draw: Draw) -> Iterator[AtenCall]:
    """Yield max pooling of volumes and its backward."""
    batch, channels = draw.between(1, 4), draw.channels(8, 128)
    side = max(4, min(64, round((draw.elements() / (batch * channels)) ** (1 / 3))))
    x = draw.activation(batch, channels, side, side, side)
    window = ([2] * 3, [2] * 3)
    forward = _ATEN.max_pool3d_with_indices.default
    yield AtenCall(forward, (x, *window), (x,))
    out, indices = forward(x, *window)
    gradient = torch.randn_like(out)
    back = (gradient, x, *window, [0] * 3, [1] * 3, False, indices)
    yield AtenCall(_ATEN.max_pool3d_with_indices_backward.default, back, (gradient,))


def _interpolation(draw: Draw) -> Iterator[AtenCall]:
    """Yield interpolation to twice the size, and its backward."""
    x = draw.tensor(*draw.image(draw.elements() // 4))
    size = [2 * x.shape[2], 2 * x.shape[3]]
    gradient = draw.tensor(*x.shape[:2], *size)
    shape = list(x.shape)
    nearest, back = _ATEN.upsample_nearest2d, _ATEN.upsample_nearest2d_backward
    yield AtenCall(nearest.default, (x, size), (x,))
    yield AtenCall(back.default, (gradient, size, shape), (gradient,))
    linear, back = _ATEN.upsample_bilinear2d, _ATEN.upsample_bilinear2d_backward
    yield AtenCall(linear.default, (x, size, False), (x,))
    yield AtenCall(back.default, (gradient, size, shape, False), (gradient,))


def tables(draw: Draw) -> Iterator[AtenCall]:
    """Yield an embedding and its backward."""
    words, width = draw.between(100, 30000), draw.channels(16, 512)
    if words * width > draw.largest / 100:
        return
    weight = draw.tensor(words, width)
    tokens = max(1, draw.elements() // width)
    index = torch.randint(words, (tokens,), device=draw.device)
    yield AtenCall(_ATEN.embedding.default, (weight, index), ())
    gradient = draw.tensor(tokens, width)
    back = (gradient, index, words, -1, False)
    yield AtenCall(_ATEN.embedding_dense_backward.default, back, (gradient,))


def _of(*kernels: int, **how: Any) -> Source:
    """Return where convolutions with one of these kernels come from."""
    return partial(_convolution, kernels=kernels, **how)


# name for people, where operators come from, how many of them
FAMILIES: tuple[tuple[str, Source, int], ...] = (
    ("convolution", _of(3, 3, 3, 5, 7), 160),
    ("convolution 1x1", _of(1), 128),
    ("convolution 1x1 of many", _of(1, batch=(16, 24, 32)), 36),
    ("convolution 1x1 at the end", _of(1, last=True), 48),
    ("convolution at the end", _of(3, last=True), 48),
    ("convolution of volumes", _of(3, dims=(3,)), 128),
    ("convolution of one image", _of(3, dims=(2, 3, 3), single=True), 128),
    ("depthwise convolution", _of(3, 3, 5, 7, depthwise=True), 48),
    ("transposed convolution", _of(2, 4, dims=(2, 2, 3), transposed=True), 36),
    (
        "transposed, of one image",
        _of(2, 4, dims=(2, 3), transposed=True, single=True),
        48,
    ),
    ("matrix product", matmul, 48),
    ("batched matrix product", batched_matmul, 32),
    ("attention", attention, 32),
    ("batch norm", _batch_norm, 56),
    ("group norm", _group_norm, 24),
    ("layer norm", _layer_norm, 24),
    ("softmax", _softmax, 24),
    ("elementwise", pointwise, 32),
    ("functions", functions, 24),
    ("sums", sums, 24),
    ("copies", copies, 32),
    ("pooling", pooling, 24),
    ("pooling of volumes", pooling_3d, 16),
    ("interpolation", _interpolation, 24),
    ("embedding", tables, 24),
)
