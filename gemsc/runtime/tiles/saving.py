"""What autograd keeps of a redistributed value: its source and the strips received.

A convolution saves its input for backward: here a copy of a value with its halo. The
value itself is mostly kept already, by the layer that made it. So of the copy only the
source, without a copy, and what other tiles sent are kept, and it is put together again
when backward wants it.

    relu --> y (kept by relu) --> redistribute --> y with halo --> conv keeps y + strips

A block that is recomputed or offloaded has hooks of its own for what autograd saves:
`decomposed` says of what a tensor there consists.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = [
    "Decomposed",
    "decomposed",
    "forget",
    "is_freed",
    "remember",
    "saved_parts",
]

# A source larger than this many times its part would keep more alive than it saves. So
# would strips that are half of the value or more, as of one that is gathered: a stage's
# forward holds the value beside them until it returns.
_LARGEST_SOURCE = 1.5
_MOST_STRIPS = 0.5


@dataclass(frozen=True, slots=True)
class _Origin:
    """How a redistributed value is put together: its source, strips, and the way."""

    storage: StorageWeakRef  # of the redistributed value, while it lives
    dtype: torch.dtype  # of that value, and of what is put together
    kept: tuple[Tensor, ...]
    assemble: Callable[..., Tensor]


class _Known(threading.local):
    """What this thread, which is one rank in tests, has redistributed."""

    def __init__(self) -> None:
        self.origins: dict[int, _Origin] = {}


_known = _Known()


def remember(
    result: Tensor, kept: tuple[Tensor, ...], assemble: Callable[..., Tensor]
) -> None:
    """Say that `result` is `assemble(*kept)`; `kept[0]` is its source.

    Of a source that was redistributed itself, its own source and strips are kept.
    """
    kept, assemble = _from_the_first(kept, assemble)
    source, *strips = (tensor.nbytes for tensor in kept)
    if source > _LARGEST_SOURCE * result.nbytes:
        return
    if sum(strips) >= _MOST_STRIPS * result.nbytes:
        return
    forget()
    storage = result.untyped_storage()
    reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
    parts = tuple(tensor.detach() for tensor in kept)
    _known.origins[storage._cdata] = _Origin(reference, result.dtype, parts, assemble)


def _from_the_first(
    kept: tuple[Tensor, ...], assemble: Callable[..., Tensor]
) -> tuple[tuple[Tensor, ...], Callable[..., Tensor]]:
    source, *strips = kept
    origin = _origin(source)
    if origin is None:
        return kept, assemble
    first = origin.assemble
    count = len(origin.kept)
    size, stride, offset = source.size(), source.stride(), source.storage_offset()

    def both(*parts: Tensor) -> Tensor:
        value = first(*parts[:count]).as_strided(size, stride, int(offset))
        return assemble(value, *parts[count:])

    return (*origin.kept, *strips), both


def forget() -> None:
    """Drop what is known of values that are gone, and so their sources."""
    for key, origin in list(_known.origins.items()):
        if is_freed(origin.storage):
            _known.origins.pop(key, None)


def is_freed(storage: StorageWeakRef) -> bool:
    """Whether nobody holds a storage any more."""
    return bool(storage.expired())  # type: ignore[no-untyped-call]


def _origin(tensor: Tensor) -> _Origin | None:
    if tensor.layout is not torch.strided:
        return None
    if tensor.is_conj() or tensor.is_neg():  # lazily: the storage is not
        return None
    origin = _known.origins.get(tensor.untyped_storage()._cdata)
    if origin is None or is_freed(origin.storage):
        return None
    # view_as_complex, `.imag`: of the same bytes, with strides of another unit
    return origin if tensor.dtype == origin.dtype else None


def saved_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors whose memory is kept if autograd saves this one."""
    origin = _origin(tensor)
    return (tensor,) if origin is None else origin.kept


@dataclass(frozen=True, slots=True)
class Decomposed:
    """A view of a redistributed value, as the tensors of which it is put together."""

    kept: tuple[Tensor, ...]
    assemble: Callable[..., Tensor]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def rebuild(self, kept: Sequence[Tensor]) -> Tensor:
        """Return it, put together of `kept` or copies of that."""
        whole = self.assemble(*kept)
        return whole.as_strided(self.size, self.stride, self.offset)


def decomposed(tensor: Tensor) -> Decomposed | None:
    """Return the parts of a redistributed value, None for others."""
    origin = _origin(tensor)
    if origin is None:
        return None
    return Decomposed(
        origin.kept,
        origin.assemble,
        tuple(tensor.size()),
        tensor.stride(),
        int(tensor.storage_offset()),
    )
