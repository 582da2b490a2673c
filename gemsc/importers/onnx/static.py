"""A tensor of an ONNX graph that is known when the file is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx
import torch

from gemsc.errors import InternalError
from gemsc.importers.sheet import Symbol
from gemsc.importers.weight import Array, Weight, constant


@dataclass(frozen=True, eq=False)
class Static:
    """A tensor that is known when the file is read.

    `weight` says which elements of the file it has. What was computed from them, or is
    no initializer, has a weight without sources. A `trained` one is a parameter where
    it becomes a value of forward, another one a buffer, or a literal if it is small.
    What depends on the shape of a value is `sized`: its batch is that of the example.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    weight: Weight
    read: Callable[[str], Array]
    trained: bool = False
    sized: bool = False

    @cached_property
    def array(self) -> Array:
        """Its numbers."""
        return self.weight.made(self.read).astype(self.dtype, copy=False)


# what a name of the graph stands for
Value = Symbol | Static


def computed(name: str, array: Array, *, sized: bool = False) -> Static:
    """Return numbers that the file does not hold as they are."""
    array = np.asarray(array)

    def read(source: str) -> Array:
        raise InternalError(f"'{name}' is not made of '{source}'")

    return Static(name, array.shape, array.dtype, constant(array), read, sized=sized)


def torch_type(kind: np.dtype[Any]) -> torch.dtype:
    """Return PyTorch's type for NumPy's."""
    if kind.name == "bfloat16":
        return torch.bfloat16
    return torch.from_numpy(np.empty(0, kind)).dtype


def numpy_type(kind: torch.dtype) -> np.dtype[Any]:
    """Return NumPy's type for PyTorch's."""
    if kind is torch.bfloat16:
        return onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.BFLOAT16)
    found: np.dtype[Any] = torch.empty(0, dtype=kind, device="cpu").numpy().dtype
    return found
