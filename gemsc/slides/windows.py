"""Windows over a picture or a volume, and their outputs put together again.

Along an axis of 10 pixels, windows of 6 that go on by 4, what is kept of them in
brackets:

    [. . . . .].
             .[. . . . .]      the last one is shifted inwards, to the edge

Either the middle of each is kept: a kept pixel has some of its window around it, or
the real edge of the picture. So a network that looks no further gives what it gives for
the whole picture. Or outputs are blended where windows overlap: `Case` does what
MONAI's `sliding_window_inference` does.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from gemsc.errors import GemscError

SIGMA = 0.125  # of a Gaussian weight, in lengths of the window
LEAST_WEIGHT = 1e-3


@dataclass(frozen=True)
class Picture:
    """What a model takes of each window: its size, its channels and their axis.

    `size` has two numbers for pictures, three for volumes.
    """

    size: tuple[int, ...]
    channels: int
    is_channels_first: bool

    @classmethod
    def of_shape(cls, shape: Sequence[int]) -> Picture | None:
        """Return that of an input, samples first; None if it is no picture.

        Many channels, as those of spectra, are told by a window that is a square.
        """
        if len(shape) not in (4, 5):
            return None
        _, *axes = shape
        if axes[0] <= axes[-1] or len({*axes[1:]}) == 1:
            return cls(tuple(axes[1:]), axes[0], True)
        return cls(tuple(axes[:-1]), axes[-1], False)

    def __str__(self) -> str:
        """Return `96 x 96 x 64 voxels`."""
        unit = "pixels" if len(self.size) == 2 else "voxels"
        return f"{' x '.join(map(str, self.size))} {unit}"

    def shape_of(self, input: Any) -> tuple[int, ...] | None:
        """Return the size of the picture in a batch of one; None if there is none."""
        dims = len(self.size)
        for leaf in pytree.tree_leaves(input):
            if isinstance(leaf, Tensor) and leaf.dim() == dims + 2:
                _, *axes = leaf.shape
                channels = axes.pop(0 if self.is_channels_first else -1)
                if channels == self.channels:
                    return tuple(axes)
        return None


@dataclass(frozen=True)
class WindowSpan:
    """A window along one axis: its first pixel, and the interval that it gives."""

    start: int
    kept: tuple[int, int]

    @property
    def inside(self) -> slice:
        """Where in the window the interval is."""
        return slice(self.kept[0] - self.start, self.kept[1] - self.start)


Place = tuple[WindowSpan, ...]  # of a window: along each axis


@dataclass(frozen=True)
class Windows:
    """The windows over a picture of `shape`, in row order.

    All have the same `size`, and go on by `steps`. A picture that is smaller is one
    window, filled up.
    """

    shape: tuple[int, ...]
    size: tuple[int, ...]
    steps: tuple[int, ...]

    def __len__(self) -> int:
        """How many there are."""
        return prod(len(axis) for axis in self.axes)

    def __iter__(self) -> Iterator[Place]:
        """Yield the place of each."""
        return itertools.product(*self.axes)

    @property
    def axes(self) -> list[list[WindowSpan]]:
        """The windows along each axis."""
        both = zip(self.shape, self.size, self.steps, strict=True)
        return [_spans(*axis) for axis in both]

    def batches(self, size: int) -> Iterator[tuple[list[Place], int]]:
        """Yield so many places at a time, and how many count.

        The last ones are filled up with the last place.
        """
        places = list(self)
        for first in range(0, len(places), size):
            batch = places[first : first + size]
            yield (batch + places[-1:] * size)[:size], len(batch)


def _spans(length: int, size: int, step: int) -> list[WindowSpan]:
    if length <= size:
        return [WindowSpan(0, (0, length))]
    starts = [*range(0, length - size, step), length - size]
    edges = [0, *(start + (size + step) // 2 for start in starts[:-1]), length]
    parts = zip(starts, edges[:-1], edges[1:], strict=True)
    return [WindowSpan(start, (first, last)) for start, first, last in parts]


@dataclass(frozen=True)
class SlidingWindows:
    """How windows overlap and are blended; names and defaults are MONAI's.

    overlap: the part of a window that the next one has, too; of each axis, or of all.
    mode: "constant", the mean of all windows, or "gaussian": their middle counts more.
    """

    overlap: float | Sequence[float] = 0.25
    mode: str = "constant"

    @classmethod
    def of(cls, given: Any) -> SlidingWindows:
        """Return what a user's dict says; its words are those of this class.

        Raises:
            GemscError: it is none, or has impossible values.
        """
        words = "overlap", "mode"
        if not isinstance(given, Mapping) or any(key not in words for key in given):
            said = list(given) if isinstance(given, Mapping) else type(given).__name__
            raise GemscError(
                f"eval_windows is {said}",
                help='write eval_windows = {"overlap": 0.25, "mode": "constant"}',
            )
        windows = cls(**given)
        overlaps = windows.overlap
        shares = overlaps if isinstance(overlaps, Sequence) else [overlaps]
        if not all(isinstance(n, int | float) and 0 <= n < 1 for n in shares):
            raise GemscError(
                f"eval_windows overlap by {overlaps!r}",
                help="give a fraction of the window from 0 to less than 1, or one for "
                "each axis",
            )
        if windows.mode not in ("constant", "gaussian"):
            raise GemscError(
                f"eval_windows has the mode {windows.mode!r}",
                help='use "constant" or "gaussian"',
            )
        return windows

    def steps(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """Return by how much windows of this size go on.

        Raises:
            GemscError: there are overlaps of other axes than the window has.
        """
        overlaps = self.overlap
        shares = overlaps if isinstance(overlaps, Sequence) else [overlaps] * len(size)
        if len(shares) != len(size):
            raise GemscError(
                f"eval_windows has {len(shares)} overlaps for windows of {len(size)} "
                "axes",
                help="give one number, or one for each axis",
            )
        both = zip(size, shares, strict=True)
        return tuple(max(int(n * (1 - part)), 1) for n, part in both)

    def weights(self, size: tuple[int, ...]) -> Tensor:
        """Return what each pixel of a window counts."""
        weights = torch.ones(size, dtype=torch.float32)
        if self.mode == "gaussian":
            for axis, n in enumerate(size):
                x = torch.arange(n, dtype=torch.float32) - (n - 1) / 2
                curve = torch.exp(x**2 / (-2 * (SIGMA * n) ** 2))
                weights *= curve.reshape(-1, *[1] * (len(size) - axis - 1))
        return weights.clamp_(min=LEAST_WEIGHT)


def image_axes(shape: Sequence[int], image: tuple[int, ...]) -> slice | None:
    """Return where an image's axes stand in a tensor that has them; None of others.

    They are its last ones, or stand in front of the channels.
    """
    for place in (slice(-len(image), None), slice(-len(image) - 1, -1)):
        if tuple(shape[place]) == image and len(shape) > len(image):
            return place
    return None


class Case:
    """A picture or a volume of any size: its windows go in, whole outputs come out.

    `input` is a batch of this one case, of `shape`: what has these axes is cut into
    windows of `size`, the rest is given to each. A case smaller than a window has zeros
    around it. It may be left out where no window is taken.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        size: tuple[int, ...],
        how: SlidingWindows,
        input: Any = (),
        steps: tuple[int, ...] | None = None,
    ) -> None:
        missing = [max(n - m, 0) for n, m in zip(size, shape, strict=True)]
        self._shape = shape
        self._before = [gap // 2 for gap in missing]
        self._after = [gap - gap // 2 for gap in missing]
        self.whole = tuple(map(max, shape, size))
        self.windows = Windows(self.whole, size, steps or how.steps(size))
        self._input = pytree.tree_map_only(Tensor, self._filled, input)
        self._how = how
        self._sums: Any = None

    def _filled(self, leaf: Tensor) -> Tensor:
        leaf = leaf.as_subclass(Tensor)  # not one of MONAI's, which copies its notes
        if (axes := image_axes(leaf.shape, self._shape)) is None:
            return leaf
        pads = [(0, 0)] * leaf.dim()
        pads[axes] = zip(self._before, self._after, strict=True)
        flat = [n for pair in reversed(pads) for n in pair]
        return F.pad(leaf, flat) if any(flat) else leaf

    def take(self, places: Sequence[Place]) -> Any:
        """Return the windows at these places as a batch."""

        def cut(leaf: Tensor) -> Tensor:
            axes = image_axes(leaf.shape, self.whole)
            if axes is None:
                return torch.cat([leaf] * len(places)) if leaf.dim() else leaf
            return torch.cat([leaf[self._at(leaf, axes, place)] for place in places])

        return pytree.tree_map_only(Tensor, cut, self._input)

    def _at(self, leaf: Tensor, axes: slice, place: Place) -> tuple[slice, ...]:
        index = [slice(None)] * leaf.dim()
        both = zip(place, self.windows.size, strict=True)
        index[axes] = [slice(span.start, span.start + size) for span, size in both]
        return tuple(index)

    def add(
        self, places: Sequence[Place], output: Any, dims: Sequence[int] = ()
    ) -> None:
        """Add what the model returned for the windows at these places.

        Samples count in `dims` of its tensors, or in the first dimension.

        Raises:
            GemscError: the outputs are no scores of each pixel of the windows.
        """
        size = self.windows.size
        leaves, spec = pytree.tree_flatten(output)
        dims = [max(dim, 0) for dim in [*dims, *[0] * len(leaves)][: len(leaves)]]
        if self._sums is None:
            self._sums = pytree.tree_unflatten([*map(self._empty, leaves, dims)], spec)
            dtypes = [leaf.dtype.to_real() for leaf in pytree.tree_leaves(self._sums)]
            dtype = functools.reduce(torch.promote_types, dtypes)
            self._weights = self._how.weights(size).to(dtype)
            self._counts = torch.zeros(self.whole, dtype=dtype)
        for number, place in enumerate(places):
            of_all = zip(pytree.tree_leaves(self._sums), leaves, dims, strict=True)
            for sums, leaf, dim in of_all:
                axes = image_axes(leaf.shape, size)
                assert axes is not None
                weights = self._weights.to(sums)
                weights = weights if axes.stop is None else weights[..., None]
                sums[self._at(sums, axes, place)] += weights * leaf.narrow(
                    dim, number, 1
                )
            spans = (
                slice(p.start, p.start + n) for p, n in zip(place, size, strict=True)
            )
            self._counts[tuple(spans)] += self._weights

    def _empty(self, leaf: Any, dim: int) -> Tensor:
        """Return room for the whole of an output."""
        size = self.windows.size
        axes = image_axes(leaf.shape, size) if isinstance(leaf, Tensor) else None
        if axes is None or not (leaf.is_floating_point() or leaf.is_complex()):
            what = type(leaf).__name__
            if isinstance(leaf, Tensor):
                what = f"{list(leaf.shape)} of {leaf.dtype}"
            raise GemscError(
                f"the model returns {what} for windows of "
                f"{' x '.join(map(str, size))}, but only scores for each pixel can be "
                "blended",
                help="let it return tensors of the windows' size in evaluation",
            )
        shape = [*leaf.shape]
        shape[dim], shape[axes] = 1, self.whole
        dtype = torch.promote_types(leaf.dtype, torch.float32)
        return torch.zeros(shape, dtype=dtype, device=leaf.device)

    def output(self) -> Any:
        """Return the model's output of the whole case, as a batch of one; None if none.

        Where windows overlap, it is their weighted mean.
        """

        def mean(sums: Tensor) -> Tensor:
            axes = image_axes(sums.shape, self.whole)
            assert axes is not None
            counts = self._counts.to(sums)
            sums /= counts if axes.stop is None else counts[..., None]
            index = [slice(None)] * sums.dim()
            both = zip(self._before, self._shape, strict=True)
            index[axes] = [slice(first, first + n) for first, n in both]
            return sums[tuple(index)]

        return pytree.tree_map(mean, self._sums) if self._sums is not None else None
