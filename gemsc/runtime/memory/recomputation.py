"""Recompute a block in the backward instead of keeping what autograd saves in it.

    forward            block(x) runs, its saved tensors are dropped, x stays
    backward           the first gradient that needs one of them runs block(x) again

The second run is the first one bit for bit: it draws the same random numbers and
normalises by the same batch. It has no effect: running statistics advance in the first
run alone (torch.utils.checkpoint would advance them twice).

On tiles a block exchanges halos and sums, so that all tiles must run it again at the
same point of the backward, and run all of it: before its first gradient, as a hook on
its results tells. Elsewhere the second run ends with the last tensor that is missed.

torch.utils.checkpoint does not do: it refuses a backward that reads `ctx.saved_tensors`
twice, cannot begin before the first gradient, and keeps a halo beside what it is of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn, TypeVar
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves

from gemsc.base.dtypes import autocasting, current_autocast
from gemsc.base.rng import are_draws_same, fork_torch, torch_state
from gemsc.errors import InternalError
from gemsc.runtime.memory.meter import active_meter
from gemsc.runtime.tiles.saving import Decomposed, decomposed, forget, saved_parts

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
        run = _Run(block, inputs, known[name])
        stack.enter_context(saved_tensors_hooks(run.pack, _unpack))
        results = block(*inputs)
    if run.is_on_tiles:
        run.begin_with(results)
    return results


class _EndOfBlockError(Exception):
    """All that was saved is there again; the rest of the block is not needed."""


class _Saved:
    """What autograd keeps for a tensor, which it has once the block has run again."""

    __slots__ = ("__weakref__", "run", "value")

    def __init__(self, run: _Run) -> None:
        self.run = run
        self.value: Tensor | Decomposed | None = None


def _unpack(saved: _Saved) -> Tensor:
    if saved.value is None:
        saved.run.again()
    value = saved.value
    assert value is not None
    return value.rebuild(value.kept) if isinstance(value, Decomposed) else value


class _Run:
    """One run of a block, which can be run again.

    It lives, with the inputs, as long as anything is saved; on tiles as long as the
    whole graph, but without the inputs once it has run again.
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
        devices = [t.device for t in inputs] or [torch.device("cpu")]
        self._autocast = current_autocast(devices[0])
        self._devices = {t.device for t in inputs if t.device.type == "cuda"}
        self._random = self._random_state()
        stage: Any = block.__self__  # type: ignore[attr-defined]
        self.is_on_tiles = hasattr(stage, "grid")
        # what draws may save what it has not written yet, as rrelu does its noise
        self._runs_on = self.is_on_tiles or hasattr(stage, "draws_random_numbers")
        self._saved: list[ReferenceType[_Saved]] = []
        self._is_done = False
        self._meter = active_meter()
        if self._meter is not None:
            self._meter.brings_back = True
            self._meter.follow(inputs)

    def pack(self, tensor: Tensor) -> _Saved:
        """Drop a tensor; return what stands for it."""
        saved = _Saved(self)
        self._saved.append(ref(saved))
        return saved

    def begin_with(self, results: object) -> None:
        """Let the block run again before the first gradient of its own results."""
        for tensor in tree_leaves(results):
            if not isinstance(tensor, Tensor) or tensor.grad_fn is None:
                continue
            if all(tensor is not mine for mine in self._inputs):
                tensor.register_hook(self._begin)  # type: ignore[no-untyped-call]

    def _begin(self, gradient: Tensor) -> None:
        if not self._is_done:
            self.again()
            self._inputs = ()

    def again(self) -> None:
        """Run the block again; give what was saved to those that stand for it."""
        if self._is_done:
            raise InternalError(f"{self._block.__name__} runs a third time")
        self._is_done = True
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in self._inputs]
        values: list[Tensor | Decomposed] = []
        kept: list[Tensor] = []

        def collect(tensor: Tensor) -> None:
            values.append(decomposed(tensor) or tensor.detach())
            kept.extend(part.detach() for part in saved_parts(tensor))
            if len(values) == len(self._saved) and not self._runs_on:
                raise _EndOfBlockError

        try:
            with (
                torch.enable_grad(),
                self._same_random_numbers(),
                autocasting(self._autocast),
                _copied_statistics(self._norms) as copies,
                saved_tensors_hooks(collect, _never),
            ):
                self._block(*inputs)
        except _EndOfBlockError:
            pass
        if len(values) != len(self._saved):
            raise InternalError(
                f"{self._block.__name__} saved {len(self._saved)} tensors, and "
                f"{len(values)} when it ran again"
            )
        for reference, value in zip(self._saved, values, strict=True):
            if (saved := reference()) is not None:
                saved.value = value
        if self._meter is not None:
            self._meter.follow(kept, besides=copies)
        values.clear()
        kept.clear()
        forget()
        if self._meter is not None:
            self._meter.sample()

    def _random_state(self) -> list[Tensor]:
        """Return the generators' states, the CPU's first; none if none matters.

        In `same_draws` none does: another thread may be about to draw with its own.
        """
        stage = self._block.__self__  # type: ignore[attr-defined]
        if are_draws_same() or not getattr(stage, "draws_random_numbers", False):
            return []
        states = [torch.cuda.get_rng_state(device) for device in self._devices]
        return [torch_state(), *states]

    @contextmanager
    def _same_random_numbers(self) -> Iterator[None]:
        if not self._random:
            yield
            return
        with fork_torch(self._devices):
            torch.set_rng_state(self._random[0])
            for device, state in zip(self._devices, self._random[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            yield


def _never(packed: object) -> NoReturn:
    raise InternalError("a recomputed block has no backward of its own")


@contextmanager
def _norms_that_run(stage: nn.Module) -> Iterator[list[_NormBase]]:
    """Find the layers with running statistics that run meanwhile.

    They are called, or, by the grid on tiles, only written.
    """
    ran: set[_NormBase] = set()

    def note(layer: nn.Module, inputs: object) -> None:
        assert isinstance(layer, _NormBase)
        ran.add(layer)

    layers = [
        layer
        for layer in stage.modules()
        if isinstance(layer, _NormBase) and layer.running_mean is not None
    ]
    handles = [layer.register_forward_pre_hook(note) for layer in layers]
    before = [_versions(layer) for layer in layers]
    result: list[_NormBase] = []
    try:
        yield result
    finally:
        for handle in handles:
            handle.remove()
    pairs = zip(layers, before, strict=True)
    ran |= {layer for layer, versions in pairs if _versions(layer) != versions}
    result += [layer for layer in layers if layer in ran]


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
