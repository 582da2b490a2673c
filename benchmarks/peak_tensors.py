"""The bytes of all tensors that are alive, counted from outside, on a CPU."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["PeakTensors"]


class PeakTensors(TorchDispatchMode):
    """Counts the bytes of all storages alive, those at the start included.

    With a `cap`, what goes beyond it is refused as a GPU would do.
    """

    def __init__(self, cap: float = float("inf")) -> None:
        super().__init__()
        self._known: dict[int, weakref.ref[Any]] = {}
        self._bytes = self.peak = 0
        self._cap = cap
        gc.collect()
        for item in gc.get_objects():
            if issubclass(type(item), Tensor) and item.device.type == "cpu":
                self._see(item)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def forget(reference: Any) -> None:
            del self._known[key]
            self._bytes -= size

        self._known[key] = weakref.ref(storage, forget)
        self._bytes += size
        self.peak = max(self.peak, self._bytes)
        if self._bytes > self._cap:
            raise torch.OutOfMemoryError(f"{self._bytes} bytes, {self._cap:.0f} given")
