"""Windows over the axes behind the channels: pools, padding, grids and patches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from gemsc.importers.onnx.operators.node import (
    Node,
    Number,
    Numbers,
    at,
    number,
    operator,
)
from gemsc.importers.sheet import Symbol, flat_pads, one_number
from gemsc.importers.weight import Array

MAX_RANK = 3
PAD_MODES = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}

# ----------------------------------------------------------------------------- pools


@dataclass(frozen=True)
class NodeWindows:
    """The windows of a pool or a convolution: for each axis that they move over.

    `beyond` is how far the last window reaches behind the padding, with ceil_mode.
    """

    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    counts: tuple[int, ...]
    beyond: tuple[int, ...]

    @staticmethod
    def of(node: Node, sizes: Sequence[int], kernel: Sequence[int]) -> NodeWindows:
        """Return the windows of a node over axes of these sizes.

        Raises:
            GemscError: they do not fit.
        """
        rank = len(sizes)
        stride = node.attr.strides or [1] * rank
        dilation = node.attr.dilations or [1] * rank
        pads = node.attr.pads or [0] * (2 * rank)
        if not len(kernel) == len(stride) == len(dilation) == len(pads) // 2 == rank:
            raise node.refuse(f"has windows that do not fit {rank} axes")
        before, after = list(pads[:rank]), list(pads[rank:])
        counts, beyond = [], []
        mode = node.attr.auto_pad
        for i, n in enumerate(sizes):
            reach = (kernel[i] - 1) * dilation[i] + 1
            if mode in ("SAME_UPPER", "SAME_LOWER"):
                total = max((math.ceil(n / stride[i]) - 1) * stride[i] + reach - n, 0)
                few, many = total // 2, total - total // 2
                before[i] = few if mode == "SAME_UPPER" else many
                after[i] = total - before[i]
            elif mode == "VALID":
                before[i] = after[i] = 0
            room = n + before[i] + after[i] - reach
            if room < 0:
                raise node.refuse(f"has a window of {reach} over {n} elements")
            count = room // stride[i] + 1
            if node.attr.ceil_mode and mode in ("NOTSET", "VALID"):
                count = -(-room // stride[i]) + 1
                if (count - 1) * stride[i] >= n + before[i]:
                    count -= 1  # a window may not begin behind the values
            counts.append(count)
            beyond.append(max(0, (count - 1) * stride[i] - room))
        lists = (sizes, kernel, stride, dilation, before, after, counts, beyond)
        return NodeWindows(*map(tuple, lists))

    @property
    def is_plain(self) -> bool:
        """Whether PyTorch pads so by itself: alike on both sides, half a window."""
        return self.before == self.after and all(
            b <= k // 2 for b, k in zip(self.before, self.kernel, strict=True)
        )

    @property
    def is_dense(self) -> bool:
        """Whether the windows are without gaps."""
        return all(d == 1 for d in self.dilation)

    def padded(self, text: str, value: str = "") -> str:
        """Return a value with what is around it, with what ceil_mode needs."""
        sides = zip(self.before, self.after, self.beyond, strict=True)
        pads = flat_pads([(b, a + more) for b, a, more in sides])
        return f"F.pad({text}, {pads}{value})" if any(pads) or value else text

    def settings(self, *, padding: bool = True) -> str:
        """Return the arguments of a pool behind its input."""
        words = [str(one_number(self.kernel))]
        if self.stride != self.kernel:
            words.append(f"stride={one_number(self.stride)}")
        if padding and any(self.before):
            words.append(f"padding={one_number(self.before)}")
        if not self.is_dense:
            words.append(f"dilation={one_number(self.dilation)}")
        if padding and any(self.beyond):
            words.append("ceil_mode=True")
        return ", ".join(words)

    def sum(self, x: Symbol, text: str) -> str:
        """Return the sum of each window: a convolution of each channel with ones."""
        channels, rank = x.shape[1], len(self.sizes)
        ones = f"{x}.new_ones({channels}, 1, {', '.join(map(str, self.kernel))})"
        settings = f"stride={self.stride}, dilation={self.dilation}"
        return f"F.conv{rank}d({text}, {ones}, {settings}, groups={channels})"

    def share(self, counts_pads: int) -> np.ndarray:
        """Return which share of each window is counted, of the shape of the output."""
        share = np.ones(())
        for i, n in enumerate(self.sizes):
            low = -self.before[i] if counts_pads else 0
            high = n + self.after[i] if counts_pads else n
            starts = np.arange(self.counts[i]) * self.stride[i] - self.before[i]
            places = starts[:, None] + np.arange(self.kernel[i]) * self.dilation[i]
            share = share[..., None] * ((places >= low) & (places < high)).mean(1)
        return share


def _pool(node: Node, x: Symbol) -> NodeWindows:
    rank = x.rank - 2
    if not 1 <= rank <= MAX_RANK:
        raise node.refuse(f"pools over {rank} axes; PyTorch has pools over 1 to 3")
    return NodeWindows.of(node, x.shape[2:], node.attr.kernel_shape)


@operator("MaxPool")
def _max_pool(node: Node, x: Symbol) -> Symbol:
    if any(node.outputs[1:]):
        raise node.refuse("gives the indices of the largest elements")
    windows = _pool(node, x)
    function = f"F.max_pool{len(windows.sizes)}d"
    if windows.is_plain:
        return node.gives(f"{function}({x}, {windows.settings()})")
    dtype = x.tensor.dtype
    least = -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min
    padded = windows.padded(x.text, f", value={number(least)}")
    return node.gives(f"{function}({padded}, {windows.settings(padding=False)})")


@operator("AveragePool")
def _average_pool(node: Node, x: Symbol) -> Symbol:
    """The mean of each window; zeros around the values are counted or not."""
    windows = _pool(node, x)
    share = windows.share(node.attr.count_include_pad)
    padded = windows.padded(x.text)
    if not windows.is_dense:
        total, share = windows.sum(x, padded), share * math.prod(windows.kernel)
        count = node.buffer("count", share, x.tensor.dtype)
        return node.gives(f"{total} / {count}")
    function = f"F.avg_pool{len(windows.sizes)}d"
    if windows.is_plain:
        uncounted = any(windows.before) and not node.attr.count_include_pad
        end = ", count_include_pad=False" if uncounted else ""
        return node.gives(f"{function}({x}, {windows.settings()}{end})")
    if padded != x.text:
        x = node.sheet.line("padded", padded)
    text = f"{function}({x}, {windows.settings(padding=False)})"
    if (share == 1).all():
        return node.gives(text)
    return node.gives(f"{text} / {node.buffer('share', share, x.tensor.dtype)}")


@operator("LpPool")
def _lp_pool(node: Node, x: Symbol) -> Symbol:
    p = node.attr.p
    windows = _pool(node, x)
    padded = windows.padded(f"{x}.abs()")
    if not windows.is_dense:
        return node.gives(f"{windows.sum(x, f'{padded} ** {p}')} ** (1 / {p})")
    function = f"F.lp_pool{len(windows.sizes)}d"
    return node.gives(f"{function}({padded}, {p}, {windows.settings(padding=False)})")


def _global(function: str, otherwise: str, node: Node, x: Symbol) -> Symbol:
    rank = x.rank - 2
    if 1 <= rank <= MAX_RANK:
        return node.gives(f"F.adaptive_{function}_pool{rank}d({x}, 1)")
    axes = tuple(range(2, x.rank))
    return node.gives(f"{x}.{otherwise}(dim={axes}, keepdim=True)")


operator("GlobalAveragePool")(partial(_global, "avg", "mean"))
operator("GlobalMaxPool")(partial(_global, "max", "amax"))


@operator("GlobalLpPool")
def _global_lp_pool(node: Node, x: Symbol) -> Symbol:
    settings = f"ord={node.attr.p}, dim={tuple(range(2, x.rank))}, keepdim=True"
    return node.gives(f"torch.linalg.vector_norm({x}, {settings})")


# --------------------------------------------------------------------------- padding


@operator("Pad")
def _pad(
    node: Node, x: Symbol, pads: Numbers, value: Number | None, axes: Numbers | None
) -> Symbol:
    """PyTorch's own padding where it does the same, else a table of places."""
    mode = node.attr.mode
    pairs = _pairs(node, x.rank, pads, axes)
    if not any(map(any, pairs)):
        return x
    if mode == "constant":
        while pairs[0] == (0, 0):
            pairs.pop(0)
        fill = number(0 if value is None else value)
        fill = "" if fill in ("0", "0.0", "False") else f", value={fill}"
        return node.gives(f"F.pad({x}, {flat_pads(pairs)}{fill})")
    if mode not in PAD_MODES:
        raise node.refuse(f"pads by {mode!r}")
    if _is_torchs(x, pairs, mode):
        sizes = flat_pads(pairs[2:])
        return node.gives(f'F.pad({x}, {sizes}, mode="{PAD_MODES[mode]}")')
    text = x.text
    for axis, (low, high) in enumerate(pairs):
        if low or high:
            places = _places(node, x.shape[axis], low, high, mode)
            text += at(axis, node.buffer("index", places).text)
    return node.gives(text)


def _pairs(
    node: Node, rank: int, pads: Numbers, axes: Numbers | None
) -> list[tuple[int, int]]:
    """Return the padding before and after each axis; negative ones cut."""
    places = [node.axis(a, rank) for a in (range(rank) if axes is None else axes)]
    count = len(places)
    if len(pads) != 2 * count:
        raise node.refuse(f"has {len(pads)} sizes for {count} axes")
    pairs = [(0, 0)] * rank
    for axis, low, high in zip(places, pads[:count], pads[count:], strict=True):
        pairs[axis] = (int(low), int(high))
    return pairs


def _is_torchs(x: Symbol, pairs: Sequence[tuple[int, int]], mode: str) -> bool:
    """Return whether PyTorch has this padding: of a picture's last axes."""
    if not 3 <= x.rank <= 5 or any(map(any, pairs[:2])):
        return False
    fits = all(
        min(pair) >= 0 and (mode == "edge" or max(pair) <= n - (mode == "reflect"))
        for pair, n in zip(pairs[2:], x.shape[2:], strict=True)
    )
    return fits and x.tensor.is_floating_point()


def _places(node: Node, size: int, low: int, high: int, mode: str) -> Array:
    """Return which element of an axis stands in each place of the padded one."""
    try:
        cut = np.arange(size)[max(-low, 0) : size - max(-high, 0)]
        sides = (max(low, 0), max(high, 0))
        places: Array = np.pad(cut, sides, mode=mode)  # type: ignore[call-overload]
        return places
    except ValueError as why:
        raise node.refuse(f"pads an axis of {size} by {low} and {high}") from why


# ----------------------------------------------------------------- grids and patches


@operator("GridSample")
def _grid_sample(node: Node, x: Symbol, grid: Symbol) -> Symbol:
    mode, padding_mode = node.attr.mode, node.attr.padding_mode
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    is_known = mode in ("bilinear", "nearest") or (mode == "bicubic" and x.rank == 4)
    if not is_known:
        raise node.refuse(f"samples {x.rank - 2} axes by {mode!r}")
    if padding_mode not in ("zeros", "border", "reflection"):
        raise node.refuse(f"pads by {padding_mode!r}")
    settings = f'mode="{mode}", padding_mode="{padding_mode}"'
    corners = f"align_corners={bool(node.attr.align_corners)}"
    return node.gives(f"F.grid_sample({x}, {grid}, {settings}, {corners})")


@operator("AffineGrid")
def _affine_grid(node: Node, theta: Symbol, size: Numbers) -> Symbol:
    sizes = ", ".join([f"{theta}.shape[0]", *map(str, size[1:])])
    corners = f"align_corners={bool(node.attr.align_corners)}"
    return node.gives(f"F.affine_grid({theta}, ({sizes}), {corners})")


@operator("Col2Im")
def _columns_to_image(
    node: Node, x: Symbol, image_shape: Numbers, block_shape: Numbers
) -> Symbol:
    if len(image_shape) != 2:
        raise node.refuse(
            f"puts together {len(image_shape)} axes; PyTorch has it for 2"
        )
    top, left, bottom, right = pads = node.attr.pads or (0, 0, 0, 0)
    height, width = image_shape
    whole = (height + top + bottom, width + left + right)
    stride = tuple(node.attr.strides or (1, 1))
    dilation = tuple(node.attr.dilations or (1, 1))
    settings = f"stride={stride}, dilation={dilation}"
    text = f"F.fold({x}, {whole}, {tuple(block_shape)}, {settings})"
    if any(pads):
        text += f"[:, :, {top}:{top + height}, {left}:{left + width}]"
    return node.gives(text)
