"""Keep what autograd saves in host memory from the forward to the backward.

    forward     with offloaded():            # in the generated text
                    ...                      each storage that is saved here is copied
                                             outward once, and let go on the device
    backward    begins                       the last such part is fetched
                needs a part                 the offloaded part before it is fetched

On CUDA the copies go to pinned memory and back on streams of their own, beside the
computation. On the CPU, where host and device are one, they go to a file without a
name: the system removes it when the process ends, however it ends.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from weakref import ReferenceType, finalize, ref

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import increment_version, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from gemsc.runtime.memory.meter import active_meter
from gemsc.runtime.tiles.saving import Decomposed, decomposed, is_freed
from gemsc.runtime.transport.streams import Arrival, Streams

_active = threading.local()  # the run of the stage that runs forward on this thread


@contextmanager
def offloaded() -> Iterator[None]:
    """Let what autograd saves meanwhile wait for the backward in host memory.

    Outside of a worker's forward, and in evaluation, it does nothing.
    """
    run: OffloadedRun | None = getattr(_active, "run", None)
    if run is None or not torch.is_grad_enabled():
        yield
        return
    part = run.begin_part()
    with saved_tensors_hooks(part.pack, _unpack):
        yield


@dataclass(frozen=True)
class Kept:
    """Bytes that wait somewhere else.

    `fetch` starts to copy them back to the device; after `free` their room is used
    again.
    """

    fetch: Callable[[], Arrival]
    free: Callable[[], None]


class PinnedStore:
    """Pinned memory of the host, for a CUDA device; freed room is used again.

    At once: what was there has been taken, so that the computation waits for its copy
    back, and the next copy outward for the computation. PyTorch would take more memory
    instead, the more the host is ahead of the device.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.device = streams.device
        self._free: dict[int, list[Tensor]] = defaultdict(list)

    def put(self, data: Tensor) -> Kept:
        """Start to copy a row of bytes, on the outward stream."""
        free = self._free[data.nbytes]
        copy = self._streams.to_host(data, free.pop() if free else None)
        fetch = partial(self._streams.fetch, copy)
        return Kept(fetch, partial(free.append, copy.tensor))


class FileStore:
    """A file without a name, mapped into memory; freed room is used again."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="gemsc-offload-")  # noqa: SIM115
        self._free: dict[int, list[mmap.mmap]] = defaultdict(list)

    def put(self, data: Tensor) -> Kept:
        """Copy a row of bytes into the file."""
        size = max(1, -(-data.nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        free = self._free[size]
        room = free.pop() if free else self._grow(size)
        if data.nbytes:
            torch.frombuffer(room, dtype=torch.uint8, count=data.nbytes).copy_(data)
        fetch = partial(_read, room, data.nbytes)
        return Kept(fetch, partial(free.append, room))

    def _grow(self, size: int) -> mmap.mmap:
        descriptor = self._file.fileno()
        start = os.fstat(descriptor).st_size
        os.ftruncate(descriptor, start + size)
        return mmap.mmap(descriptor, size, offset=start)


def _read(room: mmap.mmap, num_bytes: int) -> Arrival:
    data = torch.empty(num_bytes, dtype=torch.uint8)
    if num_bytes:
        data.copy_(torch.frombuffer(room, dtype=torch.uint8, count=num_bytes))
    return Arrival(data)


Store = PinnedStore | FileStore


def store_for(streams: Streams) -> Store:
    """Return the store for the streams of a CPU or CUDA device."""
    return FileStore() if streams.in_order else PinnedStore(streams)


class _Moved:
    """A storage that waits in the store; it comes back once."""

    def __init__(self, storage: torch.UntypedStorage, store: Store) -> None:
        self.original = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self.device = storage.device
        data = torch.empty(0, dtype=torch.uint8, device=storage.device)
        self._kept = store.put(data.set_(storage))
        self._arrival: Arrival | None = None
        finalize(self, self._kept.free).atexit = False

    def fetch(self) -> None:
        """Start to bring it back, if that was not done."""
        if self._arrival is None:
            self._arrival = self._kept.fetch()

    def bytes(self) -> Tensor:
        """Return it as a row of bytes of the device, once it is fetched."""
        assert self._arrival is not None
        return self._arrival.take()


class _Packed:
    """What stands for a saved tensor: a view of a storage that has moved."""

    __slots__ = (
        *("dtype", "moved", "offset", "part", "size", "stride"),
        *("is_conjugate", "is_negative"),
    )

    def __init__(self, part: _OffloadedPart, moved: _Moved, tensor: Tensor) -> None:
        self.part = part
        self.moved = moved
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.is_conjugate = tensor.is_conj()  # lazily: the storage is not
        self.is_negative = tensor.is_neg()

    def view(self) -> Tensor:
        """Return the tensor, in the storage that has come back."""
        storage = self.moved.bytes().untyped_storage()
        tensor = torch.empty(0, dtype=self.dtype, device=self.moved.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        tensor = tensor.conj() if self.is_conjugate else tensor
        return torch._neg_view(tensor) if self.is_negative else tensor


@dataclass(frozen=True, slots=True)
class _PackedParts:
    """What stands for a redistributed value of a tile: the parts of it, packed."""

    apart: Decomposed
    parts: tuple[_Packed | Tensor, ...]

    def view(self) -> Tensor:
        """Return the value, put together of what has come back."""
        return self.apart.rebuild([_unpack(part) for part in self.parts])


def _unpack(packed: _Packed | _PackedParts | Tensor) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    if isinstance(packed, _Packed):
        packed.part.arrive()
    return packed.view()


class _OffloadedPart:
    """One `with offloaded():` of one run, and the part before it."""

    def __init__(self, run: OffloadedRun, before: _OffloadedPart | None) -> None:
        self._pack = run.pack
        self._meter = active_meter()
        self._before = before
        self._moved: list[ReferenceType[_Moved]] = []
        self._arrived = False

    def pack(self, tensor: Tensor) -> _Packed | _PackedParts | Tensor:
        """Move a tensor's storage, unless it stays; of a tile's halo what it is of."""
        apart = decomposed(tensor)
        if apart is not None:
            parts = tuple(self._moved_out(part) for part in apart.kept)
            return _PackedParts(replace(apart, kept=()), parts)
        return self._moved_out(tensor)

    def _moved_out(self, tensor: Tensor) -> _Packed | Tensor:
        if (packed := self._pack(tensor)) is None:
            return tensor.detach()
        moved, view = packed
        self._moved.append(ref(moved))
        return _Packed(self, moved, view)

    def fetch(self) -> None:
        """Start to bring all of it back."""
        alive = [moved for weakref in self._moved if (moved := weakref()) is not None]
        for moved in alive:
            moved.fetch()
        if self._meter is not None:
            self._meter.brings_back = True
            self._meter.follow(moved.bytes() for moved in alive)
            self._meter.sample()

    def arrive(self) -> None:
        """Bring all of it back, and start with the part before it."""
        if self._arrived:
            return
        self._arrived = True
        self.fetch()
        if self._before is not None:
            self._before.fetch()
            self._before = None


@dataclass(eq=False)
class OffloadedRun:
    """One forward of one stage: what has moved, each storage once.

    Parameters, buffers and the stage's inputs that stay until the backward do not move,
    nor what is on the host already: the seed of an attention kernel's dropout.
    """

    make_store: Callable[[], Store]
    stage: nn.Module
    staying: tuple[Tensor, ...] = ()
    _known: dict[tuple[int, int], tuple[ReferenceType[_Moved], Tensor]] = field(
        default_factory=dict
    )
    _last: _OffloadedPart | None = None

    def __enter__(self) -> OffloadedRun:
        """Let `offloaded()` find this run, in its forward."""
        _active.run = self
        return self

    def __exit__(self, *_: object) -> None:
        """The forward has ended."""
        _active.run = None
        self._known.clear()

    @cached_property
    def _store(self) -> Store:
        return self.make_store()

    @cached_property
    def _fixed(self) -> set[int]:
        """The storages that do not move."""
        stage = self.stage
        tensors = (*stage.parameters(), *stage.buffers(), *self.staying)
        return {tensor.untyped_storage()._cdata for tensor in tensors}

    def begin_part(self) -> _OffloadedPart:
        """Begin the next `with offloaded():`."""
        self._last = _OffloadedPart(self, self._last)
        return self._last

    def pack(self, tensor: Tensor) -> tuple[_Moved, Tensor] | None:
        """Return what has moved for a tensor, and its view there; None if it must stay.

        A storage that is saved twice moves once. What has been written in between, as
        the version tells, is another value. Tensors that share a storage and count
        their versions apart (`unsafe_chunk`, in a GRU) may have been written one after
        the other: after the first of them each moves alone.
        """
        storage = tensor.untyped_storage()
        if (
            storage._cdata in self._fixed
            or tensor.device.type != self._store.device.type
        ):
            return None
        key = (storage._cdata, tensor._version)
        if key in self._known:
            reference, counter = self._known[key]
            known = reference()
            if known is not None and not is_freed(known.original):
                if _counts_versions_of(counter, tensor):
                    return known, tensor
                alone = tensor.detach().clone()
                return _Moved(alone.untyped_storage(), self._store), alone
        moved = _Moved(storage, self._store)
        counter = tensor.detach()
        counter.data = tensor.new_empty(0)  # without the memory
        self._known[key] = ref(moved), counter
        return moved, tensor

    def prefetch(self) -> None:
        """Start to bring the last part back: the backward begins."""
        if self._last is not None:
            self._last.fetch()
            self._last = None


def _counts_versions_of(counter: Tensor, tensor: Tensor) -> bool:
    """Whether what is written to a tensor gives the other one a new version, too."""
    with _unsafe_preserve_version_counter(tensor):
        before = counter._version
        increment_version(tensor)
        return counter._version != before
