"""Recompute a block in the backward instead of keeping what autograd saves in it.

    forward            block(x) runs, its saved tensors are dropped, x stays
    backward           the first gradient that needs one of them runs block(x) again

The second run is the first one bit for bit: it draws the same random numbers and
normalises by the same batch. It has no effect: running statistics advance in the first
run alone (torch.utils.checkpoint would advance them twice).

On tiles a block exchanges halos and sums, so that all tiles must run it again at the
same point of the backward, and run all of it: before its first gradient, as a hook on
its results tells. Elsewhere the second run ends with the last tensor that is missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves

from gemsc.errors import InternalError
from gemsc.runtime.memory import active_meter
from gemsc.runtime.tile_saving import Apart, forget, kept_of, taken_apart

__all__ = ["recompute"]

T = TypeVar("T")

# For each stage and method: the layers with running statistics that it runs.
_norms: WeakKeyDictionary[nn.Module, dict[str, list[_NormBase]]] = WeakKeyDictionary()


def recompute(block: Callable[..., T], *inputs: Tensor) -> T:
    """Return `block(*inputs)`; `block` is a method of a stage.

    Without gradients (in evaluation) it is nothing but that call.
    """
    stage: nn.Module = block.__self__  # type: ignore[attr-defined]
    if not torch.is_grad_enabled():
        return block(*inputs)
    known = _norms.setdefault(stage, {})
    name = block.__name__
    with ExitStack() as stack:
        if name not in known:
            known[name] = stack.enter_context(_norms_that_run(stage))
        saved = _Saved(block, inputs, known[name])
        stack.enter_context(saved_tensors_hooks(saved.pack, saved.unpack))
        results = block(*inputs)
    if saved.is_on_tiles:
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(saved.begin)  # type: ignore[no-untyped-call]
    return results


class _EndOfBlockError(Exception):
    """All that was saved is there again; the rest of the block is not needed."""


class _Saved:
    """What autograd saves in one run of a block: numbers that stand for tensors.

    It lives as long as any of its tensors may be asked for; so do the inputs.
    """

    def __init__(
        self,
        block: Callable[..., object],
        inputs: tuple[Tensor, ...],
        norms: list[_NormBase],
    ) -> None:
        self._block = block
        self._inputs = inputs
        self._norms = norms
        self._devices = {t.device for t in inputs if t.device.type == "cuda"}
        self._random = self._random_state()
        self.is_on_tiles = hasattr(block.__self__, "grid")  # type: ignore[attr-defined]
        self._count = 0
        self._values: dict[int, Tensor | Apart] = {}
        self._has_run_again = False
        self._meter = active_meter()
        if self._meter is not None:
            self._meter.brings_back = True
            self._meter.follow(inputs)

    def pack(self, tensor: Tensor) -> int:
        """Drop a tensor; return its number."""
        self._count += 1
        return self._count - 1

    def unpack(self, number: int) -> Tensor:
        """Return a tensor, which is not kept any longer."""
        if number not in self._values:
            self._run_again()
        value = self._values.pop(number)
        return value.together(value.kept) if isinstance(value, Apart) else value

    def begin(self, gradient: Tensor) -> None:
        """Run the block again before its backward begins."""
        if not self._has_run_again:
            self._run_again()
            self._inputs = ()  # this hook lives as long as the whole graph

    def _run_again(self) -> None:
        self._has_run_again = True
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in self._inputs]
        values: list[Tensor | Apart] = []
        kept: list[Tensor] = []

        def collect(tensor: Tensor) -> None:
            values.append(taken_apart(tensor) or tensor.detach())
            kept.extend(part.detach() for part in kept_of(tensor))
            if len(values) == self._count and not self.is_on_tiles:
                raise _EndOfBlockError

        try:
            with (
                torch.enable_grad(),
                self._same_random_numbers(),
                _copied_statistics(self._norms) as copies,
                saved_tensors_hooks(collect, _never),
            ):
                self._block(*inputs)
        except _EndOfBlockError:
            pass
        if len(values) != self._count:
            raise InternalError(
                f"{self._block.__name__} saved {self._count} tensors, and "
                f"{len(values)} when it ran again"
            )
        self._values = dict(enumerate(values))
        forget()
        if self._meter is not None:
            self._meter.follow(kept, besides=copies)
            self._meter.sample()

    def _random_state(self) -> list[Tensor]:
        """Return the generators' states, the CPU's first; none if nothing is drawn."""
        stage = self._block.__self__  # type: ignore[attr-defined]
        if not getattr(stage, "draws_random_numbers", False):
            return []
        states = [torch.cuda.get_rng_state(device) for device in self._devices]
        return [torch.get_rng_state(), *states]

    @contextmanager
    def _same_random_numbers(self) -> Iterator[None]:
        if not self._random:
            yield
            return
        with torch.random.fork_rng(list(self._devices)):
            torch.set_rng_state(self._random[0])
            for device, state in zip(self._devices, self._random[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            yield


def _never(packed: object) -> NoReturn:
    raise InternalError("a recomputed block has no backward of its own")


@contextmanager
def _norms_that_run(stage: nn.Module) -> Iterator[list[_NormBase]]:
    """Find the layers whose running statistics are written meanwhile."""
    layers = [
        layer
        for layer in stage.modules()
        if isinstance(layer, _NormBase) and layer.running_mean is not None
    ]
    before = [_versions(layer) for layer in layers]
    result: list[_NormBase] = []
    yield result
    result += [
        layer
        for layer, versions in zip(layers, before, strict=True)
        if _versions(layer) != versions
    ]


def _versions(layer: nn.Module) -> list[int]:
    """Return how often each buffer has been written."""
    return [tensor._version for tensor in layer.buffers(recurse=False)]


@contextmanager
def _copied_statistics(layers: list[_NormBase]) -> Iterator[list[Tensor]]:
    """Let layers update copies of their running statistics, which are yielded.

    The statistics themselves are not even written: graphs in flight hold them.
    """
    originals = [dict(layer._buffers) for layer in layers]
    copies: list[Tensor] = []
    for layer in layers:
        for name, tensor in layer._buffers.items():
            if tensor is not None:
                copies.append(tensor.clone())
                layer._buffers[name] = copies[-1]
    try:
        yield copies
    finally:
        for layer, buffers in zip(layers, originals, strict=True):
            layer._buffers.update(buffers)
