"""Compare the gradients of a whole model in little memory: they wait in a file."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from gemsc.errors import GemscError

_TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2**-7}
_HALF_TOLERANCE = 1e-3  # a last bit of float16; above, one of bfloat16
CHUNK = 2**20  # elements that are looked at at once


@dataclass(frozen=True)
class _Place:
    """Where a gradient is in the file."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass
class Gradients:
    """The gradients of one backward, by the parameters' names.

    Each goes to an unnamed file in the folder for temporary files as soon as it is
    computed, and its memory is free again. Sparse ones stay in memory.
    """

    _file: Any = field(
        default_factory=partial(tempfile.TemporaryFile, prefix="gemsc-check-"),
        repr=False,
    )
    _places: dict[str, _Place] = field(default_factory=dict)
    _sparse: dict[str, Tensor] = field(default_factory=dict)

    def watch(self, name: str, parameter: nn.Parameter) -> None:
        """Take a parameter's gradient from now on, whenever there is one."""

        def take(leaf: Tensor) -> None:
            gradient, leaf.grad = leaf.grad, None
            if gradient is not None:
                self._add(name, gradient.detach())

        if parameter.requires_grad:
            hooked: Any = parameter
            hooked.register_post_accumulate_grad_hook(take)

    def __contains__(self, name: str) -> bool:
        """Whether the parameter has got a gradient."""
        return name in self._places or name in self._sparse

    def __iter__(self) -> Iterator[str]:
        """Yield the parameters that have got one."""
        yield from (*self._places, *self._sparse)

    def kind(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return dtype and shape of a gradient."""
        held = self._places[name] if name in self._places else self._sparse[name]
        return held.dtype, tuple(held.shape)

    def largest(self, name: str) -> float:
        """Return the largest magnitude in a gradient; NaN if there is one."""
        maxima = [chunk.abs().max() for chunk in self.chunks(name)]
        return float(torch.stack(maxima).max()) if maxima else 0.0

    def chunks(self, name: str) -> Iterator[Tensor]:
        """Yield a gradient, flattened, piece by piece."""
        if name in self._sparse:
            yield from chunks_of(self._sparse[name])
            return
        place = self._places[name]
        for start in range(0, prod(place.shape), CHUNK):
            count = min(CHUNK, prod(place.shape) - start)
            chunk = torch.empty(count, dtype=place.dtype)
            self._file.seek(place.offset + start * place.dtype.itemsize)
            self._file.readinto(chunk.view(torch.uint8).numpy().data)
            yield chunk

    def _add(self, name: str, gradient: Tensor) -> None:
        if name in self:  # a backward inside of the backward gave a part of it
            gradient = gradient + self._whole(name)
        if gradient.layout is not torch.strided:
            self._sparse[name] = gradient
            return
        try:
            offset = self._file.seek(0, os.SEEK_END)
            for chunk in chunks_of(gradient):
                self._file.write(chunk.cpu().view(torch.uint8).numpy().data)
        except OSError as error:
            raise GemscError(
                f"the check cannot keep gradients in {tempfile.gettempdir()}: {error}",
                help="set TMPDIR to a folder with space, or compile with --no-check",
            ) from error
        self._places[name] = _Place(offset, gradient.dtype, tuple(gradient.shape))

    def _whole(self, name: str) -> Tensor:
        if name in self._sparse:
            return self._sparse.pop(name)
        pieces = list(self.chunks(name))
        return torch.cat(pieces).view(self._places[name].shape)


def chunks_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor, flattened, piece by piece; a sparse one made dense."""
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    plain = dense.detach().resolve_conj().resolve_neg()
    flat = plain.contiguous().view(-1)
    for start in range(0, flat.numel(), CHUNK):
        yield flat[start : start + CHUNK]


_Kind = tuple[torch.dtype, tuple[int, ...]]
_Chunks = Callable[[], Iterator[torch.Tensor]]


def difference_of(
    have: torch.Tensor | None, want: torch.Tensor, least: float
) -> str | None:
    """Return how a tensor differs, by more than `least` and what its dtype rounds."""
    if have is None:
        return "is missing instead of there"
    kinds = ((tensor.dtype, tuple(tensor.shape)) for tensor in (have, want))
    return _other_kind(*kinds) or _other_numbers(
        lambda: chunks_of(have), lambda: chunks_of(want), want.dtype, least
    )


def gradients_differ(
    have: Gradients,
    want: Gradients,
    name: str,
    least: float,
    floor: Callable[[], float],
) -> str | None:
    """Return how a gradient differs; one below `floor()` is noise."""
    if name not in have or name not in want:
        words = [("missing", "there")[name in side] for side in (have, want)]
        return None if words[0] == words[1] else f"is {words[0]} instead of {words[1]}"
    return _other_kind(have.kind(name), want.kind(name)) or _other_numbers(
        lambda: have.chunks(name),
        lambda: want.chunks(name),
        want.kind(name)[0],
        least,
        floor,
    )


def gradient_distance(have: Gradients, want: Gradients, name: str) -> float:
    """Return how far a gradient is off, relative to its largest element."""
    if name not in have or name not in want:
        return 0.0
    pairs = zip(have.chunks(name), want.chunks(name), strict=True)
    furthest = max((float((a - b).abs().max()) for a, b in pairs), default=0.0)
    return furthest / (want.largest(name) or math.inf)


def _other_kind(have: _Kind, want: _Kind) -> str | None:
    if have == want:
        return None
    return f"is {have[0]} {list(have[1])} instead of {want[0]} {list(want[1])}"


def _other_numbers(
    have: _Chunks,
    want: _Chunks,
    dtype: torch.dtype,
    least: float,
    floor: Callable[[], float] = lambda: 0.0,
) -> str | None:
    """Compare the numbers, chunk by chunk; say by how much they differ."""
    if all(map(torch.equal, have(), want())):
        return None
    if not (dtype.is_floating_point or dtype.is_complex):
        return "differs"
    is_equal, are_finite, scale, largest = True, True, -math.inf, 0.0
    for mine, theirs in zip(have(), want(), strict=True):
        finite = theirs.isfinite()
        is_equal &= torch.allclose(mine, theirs, rtol=0.0, atol=0.0, equal_nan=True)
        are_finite &= torch.equal(finite, mine.isfinite())
        if finite.any():
            scale = max(scale, float(theirs[finite].abs().max()))
            largest = max(largest, float((mine - theirs)[finite].abs().max()))
    if is_equal:
        return None
    if not are_finite or scale < 0:
        return "is finite in one and not in the other"
    tolerance = max(least, _TOLERANCES.get(dtype, _HALF_TOLERANCE))
    if largest <= tolerance * max(scale, floor()):
        return None
    relative = largest / scale if scale else math.inf
    return f"differs by {relative:.1e} of its largest element"
