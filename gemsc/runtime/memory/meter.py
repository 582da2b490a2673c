"""Count the memory that is really alive on a rank: predicted against measured."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gemsc.base.nests import dense_leaves
from gemsc.runtime.tiles.saving import (
    Decomposed,
    decomposed,
    forget,
    is_freed,
    saved_parts,
)

_active = threading.local()  # the meter of the stage that runs forward on this thread


def active_meter() -> ActivationMeter | None:
    """Return the meter that follows the forward that is running, if any."""
    return getattr(_active, "meter", None)


@dataclass(eq=False)
class ActivationMeter:
    """Follows every storage that a backward will need, each counted once.

    Counted are what autograd saves and what a stage has received with a gradient, from
    the forward to the end of the backward; not the parameters, `persistent`. Storages
    are held weakly, so that the meter changes nothing. Their peak is taken after each
    forward and backward, whenever a backward takes what was saved, and when a block has
    been recomputed or brought back. The buffer of a receive posted ahead counts once a
    stage has taken it.

    `others` gives whatever else should count towards `peak_total_bytes`: parameters,
    gradients, optimizer state, buffers.
    """

    persistent: Callable[[], Iterable[Tensor]]
    others: Callable[[], Iterable[Tensor]] = tuple
    brings_back: bool = False  # whether blocks are recomputed or offloaded
    closely: bool = True  # at each tensor that a backward takes
    peak_bytes: int = 0
    peak_total_bytes: int = 0
    _alive: dict[int, tuple[StorageWeakRef, int]] = field(default_factory=dict)
    _persistent: set[int] = field(default_factory=set)
    _constant: set[int] = field(default_factory=set)

    @contextmanager
    def forward(self, inputs: Iterable[Tensor]) -> Iterator[None]:
        """Follow what a stage's forward receives and saves."""
        self._persistent = {t.untyped_storage()._cdata for t in self.persistent()}
        self.follow(tensor for tensor in inputs if tensor.requires_grad)
        _active.meter = self
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._save, self._take):
                yield
        finally:
            _active.meter = None
        self.sample()

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Do not count these: they stay whether or not a backward needs them."""
        self._constant |= {t.untyped_storage()._cdata for t in tensors}

    def follow(self, tensors: Iterable[Tensor], besides: Iterable[Tensor] = ()) -> None:
        """Count these from now on, for as long as they live, `besides` left out.

        Sparse ones are not counted.
        """
        left_out = self._persistent | self._constant
        left_out |= {t.untyped_storage()._cdata for t in besides}
        for tensor in dense_leaves(list(tensors)):
            storage = tensor.untyped_storage()
            known = self._alive.get(storage._cdata)
            if known is not None and not is_freed(known[0]):
                continue
            if storage._cdata not in left_out:
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._alive[storage._cdata] = reference, storage.nbytes()

    def sample(self) -> None:
        """Take the peak of what is alive now."""
        activations = self.alive_bytes()
        self.peak_bytes = max(self.peak_bytes, activations)
        others = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
            for tensor in self.others()
        }
        total = activations + sum(others.values())
        self.peak_total_bytes = max(self.peak_total_bytes, total)

    def alive_bytes(self) -> int:
        """Return the bytes of activations that are alive now."""
        for key in [key for key, (known, _) in self._alive.items() if is_freed(known)]:
            del self._alive[key]
        return sum(size for _, size in self._alive.values())

    def _save(self, tensor: Tensor) -> Tensor:
        self.follow([tensor])
        return tensor.detach()  # the tensor itself may hold what holds it

    def take(self) -> None:
        """Take the peak when a backward takes what was saved."""
        if self.closely:
            self.sample()

    def _take(self, tensor: Tensor) -> Tensor:
        self.take()
        return tensor


@contextmanager
def saved_in_parts(meter: ActivationMeter | None) -> Iterator[None]:
    """Let what runs inside keep redistributed values in parts, which a meter counts."""

    def pack(tensor: Tensor) -> Decomposed | Tensor:
        apart = decomposed(tensor)
        if meter is None:
            return apart or tensor
        meter.follow(saved_parts(tensor))
        return apart or tensor.detach()

    def unpack(packed: Decomposed | Tensor) -> Tensor:
        if meter is not None:
            meter.take()
        return packed.rebuild(packed.kept) if isinstance(packed, Decomposed) else packed

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
    forget()
