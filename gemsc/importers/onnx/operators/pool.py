"""Pools: windows over the axes behind the channels, padded as the node says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from gemsc.importers.onnx.node import Node, Operator
from gemsc.importers.onnx.operators.text import buffer, number, of_numbers
from gemsc.importers.sheet import Symbol

_MAX_RANK = 3


@dataclass(frozen=True)
class _Windows:
    """The windows of a pool: for each axis that they move over, in turn.

    `beyond` is how far the last window reaches behind the padding, with ceil_mode.
    """

    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def reach(self) -> tuple[int, ...]:
        """How many elements a window spans."""
        pairs = zip(self.kernel, self.dilation, strict=True)
        return tuple((k - 1) * d + 1 for k, d in pairs)

    @property
    def beyond(self) -> tuple[int, ...]:
        return tuple(
            max(0, (c - 1) * s + r - n - b - a)
            for n, r, s, b, a, c in zip(
                *(self.sizes, self.reach, self.stride),
                *(self.before, self.after, self.counts),
                strict=True,
            )
        )

    @property
    def is_plain(self) -> bool:
        """Whether PyTorch pads so by itself: alike on both sides, half a window."""
        return self.before == self.after and all(
            b <= k // 2 for b, k in zip(self.before, self.kernel, strict=True)
        )

    @property
    def is_padded(self) -> bool:
        """Whether there is anything around the values."""
        return any((*self.before, *self.after, *self.beyond))

    def pads(self) -> tuple[int, ...]:
        """Return the arguments of F.pad, with what ceil_mode needs."""
        sides = zip(self.before, self.after, self.beyond, strict=True)
        pairs = [(b, a + more) for b, a, more in sides]
        return tuple(size for pair in reversed(pairs) for size in pair)

    def settings(self, *, padding: bool = True) -> str:
        """Return the arguments of a pool behind its input."""
        words = [_short(self.kernel)]
        if self.stride != self.kernel:
            words.append(f"stride={_short(self.stride)}")
        if padding and any(self.before):
            words.append(f"padding={_short(self.before)}")
        if any(d != 1 for d in self.dilation):
            words.append(f"dilation={_short(self.dilation)}")
        if padding and any(self.beyond):
            words.append("ceil_mode=True")
        return ", ".join(words)


def _short(values: tuple[int, ...]) -> str:
    return str(values[0] if len(set(values)) == 1 else values)


def _windows(node: Node, x: Symbol) -> _Windows:
    sizes = x.shape[2:]
    rank = len(sizes)
    if not 1 <= rank <= _MAX_RANK:
        raise node.refuse(f"pools over {rank} axes; PyTorch has pools over 1 to 3")
    kernel = tuple(node.attribute("kernel_shape"))
    stride = tuple(node.attribute("strides") or [1] * rank)
    dilation = tuple(node.attribute("dilations") or [1] * rank)
    pads = node.attribute("pads") or [0] * (2 * rank)
    if not len(kernel) == len(stride) == len(dilation) == len(pads) // 2 == rank:
        raise node.refuse(f"has windows that do not fit {rank} axes")
    before, after = list(pads[:rank]), list(pads[rank:])
    mode = node.attribute("auto_pad", "NOTSET")
    counts = []
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
        if node.attribute("ceil_mode", 0) and mode in ("NOTSET", "VALID"):
            count = -(-room // stride[i]) + 1
            if (count - 1) * stride[i] >= n + before[i]:
                count -= 1  # a window may not begin behind the values
        counts.append(count)
    return _Windows(
        *(sizes, kernel, stride, dilation, tuple(before), tuple(after), tuple(counts))
    )


def _max_pool(node: Node) -> Symbol:
    if any(node.outputs[1:]):
        raise node.refuse("gives the indices of the largest elements")
    x = node.value(0)
    windows = _windows(node, x)
    function = f"F.max_pool{len(windows.sizes)}d"
    if windows.is_plain:
        return node.gives(f"{function}({x}, {windows.settings()})")
    dtype = x.tensor.dtype
    least = -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min
    padded = f"F.pad({x}, {windows.pads()}, value={number(least)})"
    return node.gives(f"{function}({padded}, {windows.settings(padding=False)})")


def _average_pool(node: Node) -> Symbol:
    x = node.value(0)
    windows = _windows(node, x)
    counts_pads = bool(node.attribute("count_include_pad", 0))
    function = f"F.avg_pool{len(windows.sizes)}d"
    if any(d != 1 for d in windows.dilation):
        return _dilated_average(node, x, windows, counts_pads)
    if windows.is_plain:
        text = f"{function}({x}, {windows.settings()}"
        if any(windows.before) and not counts_pads:
            text += ", count_include_pad=False"
        return node.gives(f"{text})")
    if windows.is_padded:
        padded = node.sheet.line("padded", f"F.pad({x}, {windows.pads()})")
        text = f"{function}({padded}, {windows.settings(padding=False)})"
    else:
        text = f"{function}({x}, {windows.settings(padding=False)})"
    share = _share(windows, counts_pads)
    if (share == 1).all():
        return node.gives(text)
    return node.gives(f"{text} / {buffer(node, 'share', share, x.tensor.dtype)}")


def _share(windows: _Windows, counts_pads: bool) -> np.ndarray:
    """Return which share of each window is counted, of the shape of the output."""
    share = np.ones(())
    for i, n in enumerate(windows.sizes):
        low = -windows.before[i] if counts_pads else 0
        high = n + windows.after[i] if counts_pads else n
        starts = np.arange(windows.counts[i]) * windows.stride[i] - windows.before[i]
        places = starts[:, None] + np.arange(windows.kernel[i]) * (windows.dilation[i])
        counted = ((places >= low) & (places < high)).mean(1)
        share = share[..., None] * counted
    return share


def _dilated_average(
    node: Node, x: Symbol, windows: _Windows, counts_pads: bool
) -> Symbol:
    """Return an average over windows with gaps: a convolution of each channel."""
    rank, channels = len(windows.sizes), x.shape[1]
    share = _share(windows, counts_pads) * math.prod(windows.kernel)
    source = f"F.pad({x}, {windows.pads()})" if windows.is_padded else x.text
    ones = f"{x}.new_ones({channels}, 1, {', '.join(map(str, windows.kernel))})"
    settings = f"stride={windows.stride}, dilation={windows.dilation}"
    text = f"F.conv{rank}d({source}, {ones}, {settings}, groups={channels})"
    return node.gives(f"{text} / {buffer(node, 'count', share, x.tensor.dtype)}")


def _lp_pool(node: Node) -> Symbol:
    x = node.value(0)
    windows = _windows(node, x)
    rank, channels, power = len(windows.sizes), x.shape[1], node.attribute("p", 2)
    source = f"{x}.abs()"
    if windows.is_padded:
        source = f"F.pad({source}, {windows.pads()})"
    if all(d == 1 for d in windows.dilation):
        settings = windows.settings(padding=False)
        kernel, _, rest = settings.partition(", stride=")
        stride = f", stride={rest}" if rest else ""
        return node.gives(f"F.lp_pool{rank}d({source}, {power}, {kernel}{stride})")
    ones = f"{x}.new_ones({channels}, 1, {', '.join(map(str, windows.kernel))})"
    settings = f"stride={windows.stride}, dilation={windows.dilation}"
    text = f"F.conv{rank}d({source} ** {power}, {ones}, {settings}, groups={channels})"
    return node.gives(f"{text} ** (1 / {power})")


def _global(function: str, otherwise: str) -> Operator:
    """Return a pool over all that is behind the channels."""

    def operator(node: Node) -> Symbol:
        x = node.value(0)
        rank = len(x.shape) - 2
        if 1 <= rank <= _MAX_RANK:
            return node.gives(f"F.adaptive_{function}_pool{rank}d({x}, 1)")
        axes = tuple(range(2, rank + 2))
        return node.gives(f"{x}.{otherwise}(dim={axes}, keepdim=True)")

    return operator


def _global_lp_pool(node: Node) -> Symbol:
    x = node.value(0)
    axes = tuple(range(2, len(x.shape)))
    settings = f"ord={node.attribute('p', 2)}, dim={axes}, keepdim=True"
    return node.gives(f"torch.linalg.vector_norm({x}, {settings})")


POOLS: Mapping[str, Operator] = of_numbers(
    {
        "AveragePool": _average_pool,
        "GlobalAveragePool": _global("avg", "mean"),
        "GlobalLpPool": _global_lp_pool,
        "GlobalMaxPool": _global("max", "amax"),
        "LpPool": _lp_pool,
        "MaxPool": _max_pool,
    }
)
