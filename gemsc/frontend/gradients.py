"""Gradients of a whole model in little memory: they wait in a file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from gemsc.errors import GemscError

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

    _file: Any = field(default_factory=lambda: _unnamed_file(), repr=False)
    _places: dict[str, _Place] = field(default_factory=dict)
    _sparse: dict[str, Tensor] = field(default_factory=dict)

    def watch(self, name: str, parameter: nn.Parameter) -> None:
        """Take a parameter's gradient from now on, whenever there is one."""

        def take(found: Tensor) -> None:
            gradient, found.grad = found.grad, None
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
        found = [chunk.abs().max() for chunk in self.chunks(name)]
        return float(torch.stack(found).max()) if found else 0.0

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
                help="let TMPDIR name a folder with space, or compile with --no-check",
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


def _unnamed_file() -> Any:
    return tempfile.TemporaryFile(prefix="gemsc-check-")
