"""Where a parameter's elements come from in the file, and so where they go back to.

A weight is made of the file's tensors by moving elements alone: transposing, slicing,
concatenating. So the same function that is given numbers for the import is given the
places of the numbers for the export, and says which element goes where.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]


@dataclass(frozen=True)
class Weight:
    """A tensor of the network: `move` of these tensors of the file.

    `move` takes one array for each source, of any dtype; it may move and leave out
    elements, and put zeros between them, but not compute. Without sources it is a
    constant, which is not written back.
    """

    sources: tuple[str, ...]
    move: Callable[..., Array]

    def made(self, read: Callable[[str], Array]) -> Array:
        """Return the tensor, with the sources that `read` gives."""
        return self.move(*map(read, self.sources))

    def then(self, move: Callable[[Array], Array]) -> Weight:
        """Return the weight with its elements moved once more."""
        return Weight(self.sources, lambda *arrays: move(self.move(*arrays)))

    def places(self, shapes: Mapping[str, Sequence[int]]) -> tuple[Array, ...]:
        """Return where in the result the elements of each source are.

        An array for each source, of its shape: flat positions in the result, -1 for
        elements that are not in it.
        """
        if not self.sources:
            return ()
        sizes = [prod(shapes[source]) for source in self.sources]
        dtype = np.int32 if sum(sizes) < 2**31 - 1 else np.int64
        arrays, start = [], 1  # 0 is what a move puts between
        for source, size in zip(self.sources, sizes, strict=True):
            numbers = np.arange(start, start + size, dtype=dtype)
            arrays.append(numbers.reshape(shapes[source]))
            start += size
        moved = self.move(*arrays).reshape(-1).astype(np.int64)  # zeros may be floats
        where = np.full(start, -1, dtype=np.int64)
        where[moved] = np.arange(moved.size)
        return tuple(where[numbers] for numbers in arrays)


def same(source: str) -> Weight:
    """Return the weight that is a tensor of the file as it is."""
    return Weight((source,), lambda array: array)


def constant(array: Array) -> Weight:
    """Return a weight that the file does not hold."""
    return Weight((), lambda: array)


def to_torch(array: Array) -> Tensor:
    """Return an array as a tensor of its own, bfloat16 and float8 of ml_dtypes too."""
    array = np.array(array, array.dtype.newbyteorder("="), order="C")
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(array)
    bits = array.view(f"i{array.dtype.itemsize}")
    dtype: torch.dtype = getattr(torch, array.dtype.name)
    return torch.from_numpy(bits).view(dtype)


def to_numpy(tensor: Tensor, dtype: np.dtype[Any]) -> Array:
    """Return a tensor as an array of this dtype."""
    if tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        tensor = tensor.to(torch.float32)  # which holds each of their numbers
    array: Array = tensor.detach().cpu().numpy().astype(dtype)
    return array


@dataclass(frozen=True)
class FileTensor:
    """What is known of a tensor of a file."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class FileTensors(Protocol):
    """The tensors of a Keras archive or an ONNX file, read one at a time."""

    @property
    def table(self) -> Mapping[str, FileTensor]:
        """All tensors by name."""

    @property
    def files(self) -> Sequence[str]:
        """Further files that belong to it, from its folder: ONNX' external data."""

    def read(self, name: str) -> Array:
        """Return a tensor.

        Raises:
            GemscError: the file is damaged.
        """

    def write_copy(self, path: Any, changed: Callable[[str], Array | None]) -> None:
        """Write the file once more, with new numbers in some of its tensors.

        `changed` is called once for each tensor, in turn: None leaves it as it is, an
        array has its shape and dtype. The file is written beside and renamed.
        """
