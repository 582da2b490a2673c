"""Count the memory of activations that is really alive: predicted against measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["ActivationMeter"]


class ActivationMeter:
    """Follows every storage that a backward will need, each counted once.

    Counted are what autograd saves and what a stage has received with a gradient, from
    the forward to the end of the backward; not the parameters, `persistent`. Storages
    are held weakly, so that the meter changes nothing; their peak is taken after each
    forward. The buffer of a receive posted ahead counts once a stage has taken it.
    """

    def __init__(self, persistent: Callable[[], Iterable[Tensor]]) -> None:
        self._persistent = persistent
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    @contextmanager
    def forward(self, inputs: Iterable[Tensor]) -> Iterator[None]:
        """Follow what a stage's forward receives and saves."""
        self._own = {t.untyped_storage()._cdata for t in self._persistent()}
        for tensor in inputs:
            if tensor.requires_grad:
                self.follow(tensor)
        with torch.autograd.graph.saved_tensors_hooks(self._save, lambda t: t):
            yield
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes())

    def alive_bytes(self) -> int:
        """Return the bytes that are alive now."""
        for key in [key for key, (known, _) in self._alive.items() if _gone(known)]:
            del self._alive[key]
        return sum(size for _, size in self._alive.values())

    def _save(self, tensor: Tensor) -> Tensor:
        self.follow(tensor)
        return tensor.detach()  # the tensor itself may hold what holds it

    def follow(self, tensor: Tensor) -> None:
        """Count a tensor's memory as long as it lives."""
        storage = tensor.untyped_storage()
        known = self._alive.get(storage._cdata)
        if known is not None and not _gone(known[0]):
            return
        if storage._cdata not in self._own:
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._alive[storage._cdata] = reference, storage.nbytes()


def _gone(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]
