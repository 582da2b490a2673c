"""The bytes of all tensors that are alive, counted from outside, on a CPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gemsc.runtime.training.trainer import Trainer

__all__ = ["PeakTensors", "peak_of_steps"]


class PeakTensors(TorchDispatchMode):
    """Counts the bytes of all storages alive, those at the start included.

    These are all that there are, or the `held` ones of a rank that is a thread. With a
    `cap`, what goes beyond it is refused as a GPU would do.
    """

    def __init__(
        self, cap: float = float("inf"), held: Iterable[Tensor] | None = None
    ) -> None:
        super().__init__()
        self._known: dict[int, weakref.ref[Any]] = {}
        self.peak = 0
        self._cap = cap
        if held is None:
            gc.collect()
        for item in gc.get_objects() if held is None else held:
            if issubclass(type(item), Tensor) and item.device.type == "cpu":
                self._see(item)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        made = {t.untyped_storage()._cdata: t for t in _tensors(result)}
        if made.keys() - self._known.keys():
            for tensor in _tensors((args, kwargs)):  # views are of somebody's memory
                made.pop(tensor.untyped_storage()._cdata, None)
            for tensor in made.values():
                self._see(tensor)
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = weakref.ref(storage, lambda _: self._known.pop(key, None))
        known = [reference() for reference in [*self._known.values()]]
        now = sum(block.nbytes() for block in known if block is not None)  # some change
        self.peak = max(self.peak, now)
        if now > self._cap:
            raise torch.OutOfMemoryError(f"{now} bytes, {self._cap:.0f} given")


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a value that take memory."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return [tensor for tensor in tensors if not tensor.is_meta]


def peak_of_steps(trainer: Trainer, inputs: Any, target: Any, steps: int = 2) -> int:
    """Return the most bytes that a rank holds in some steps, after a first one.

    The optimizer has its state by then. Of the batch, a micro-batch counts at a time,
    as on a device.
    """
    worker = trainer.worker
    take = worker.input

    def taken(name: str, m: int) -> Tensor:
        return take(name, m).clone()

    worker.input = taken  # type: ignore[method-assign]
    trainer.step(inputs, target)
    optimizer = worker.updates.optimizer
    states = optimizer.state_dict()["state"] if optimizer is not None else {}
    rows = worker.updates.parameters.values()
    held = [*worker.stages.own_tensors(), *rows, *_tensors(states)]
    with PeakTensors(held=held) as seen:
        for _ in range(steps):
            trainer.step(inputs, target)
    return seen.peak
