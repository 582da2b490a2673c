"""Need rules: the input interval that an output interval [a, b) reads, along one axis.

All are global indices of the untiled values. An interval may reach outside the input:
that is the padding. Boxes are products of intervals, since every operation here treats
its axes one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

from gemsc.base.boxes import Interval


def window(
    out: Interval, *, kernel: int, stride: int, dilation: int, before: int
) -> Interval:
    """Return the need of a convolution or a pooling with `before` rows of padding.

    first = a * stride - before
    last = (b - 1) * stride - before + dilation (kernel - 1)
    """
    start, stop = out
    reach = dilation * (kernel - 1) + 1
    return start * stride - before, (stop - 1) * stride - before + reach


@dataclass(frozen=True, slots=True)
class Transposed:
    """How a tile computes its part of a transposed convolution.

    It runs on `need`, crops `left` and `right` rows, and appends `extra` rows that
    hold nothing but the bias.
    """

    need: Interval
    left: int
    right: int
    extra: int


def transposed(
    out: Interval,
    *,
    size: int,
    kernel: int,
    stride: int,
    dilation: int,
    padding: int,
) -> Transposed:
    """Return the need of a transposed convolution of an input of `size` rows.

    Input row i reaches the output rows from i * stride - padding to dilation
    (kernel - 1) further. Where the kernel is shorter than the stride one row more is
    taken, so that the part begins no later than the output interval.
    """
    start, stop = out
    reach = dilation * (kernel - 1)
    first = -(-(start + padding - reach) // stride)
    first = min(first, (start + padding) // stride)
    first = min(max(first, 0), size - 1)
    last = min((stop - 1 + padding) // stride + 1, size)
    begin = first * stride - padding
    end = (last - 1) * stride - padding + reach + 1
    return Transposed(
        (first, last), start - begin, max(end - stop, 0), max(stop - end, 0)
    )


def adaptive_window(out: Interval, *, size: int, out_size: int) -> Interval:
    """Return the need of an adaptive pooling of `size` rows to `out_size`."""
    start, stop = out
    return start * size // out_size, -(-stop * size // out_size)


def strided(out: Interval, *, start: int, step: int) -> Interval:
    """Return the need of the slice `start::step`."""
    return start + out[0] * step, start + (out[1] - 1) * step + 1


def mirrored(out: Interval, *, size: int, before: int, mode: str) -> Interval:
    """Return the need of a padding that repeats the edge, or mirrors at it.

    Where the interval reaches beyond an edge, the need begins at that edge.
    """
    start, stop = out[0] - before, out[1] - before  # in rows of the input
    first, last = max(start, 0), min(stop, size)
    if start < 0:
        first = 0
        last = max(last, 1 if mode == "replicate" else min(1 - start, size))
    if stop > size:
        last = size
        beyond = stop - size
        first = min(first, size - 1 if mode == "replicate" else size - 1 - beyond)
    return max(first, 0), last


def support(
    out: Interval, *, size: int, factor: int, reach: tuple[int, int]
) -> Interval:
    """Return the need of an enlargement by a whole factor.

    Output o reads the inputs from floor(x) - reach[0] to floor(x) + reach[1], with
    x = (o + 0.5) / factor - 0.5, as far as there are such.
    """
    start, stop = out
    first = (2 * start + 1 - factor) // (2 * factor) - reach[0]
    last = (2 * (stop - 1) + 1 - factor) // (2 * factor) + reach[1] + 1
    return min(max(first, 0), size - 1), min(max(last, 1), size)
