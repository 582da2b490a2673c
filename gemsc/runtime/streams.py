"""Copies between a device and the host, beside the computation.

On CUDA each direction has a stream of its own, so that neither waits for the other:

    compute   ...forward 3.......|..forward 4......|........
                       event |                        ^ waits for this copy only
    outward                  `-> copy to pinned memory -> MPI send once it is there
    inward              MPI receive into pinned memory -> copy to the device

Nothing ever synchronizes the device. On the CPU there is nothing to do: NullStreams.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = [
    "Arrival",
    "CudaStreams",
    "HostCopy",
    "NullStreams",
    "Streams",
    "streams_for",
]


_cuda: Any = torch.cuda  # its streams and events have no types


class Event(Protocol):
    """A point of a stream."""

    def query(self) -> bool:
        """Whether the stream has come there."""
        ...


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A tensor that the library may read once it is ready."""

    buffer: Tensor
    event: Event | None = None

    def ready(self) -> bool:
        """Whether the data is there; never blocks."""
        return self.event is None or self.event.query()


@dataclass(frozen=True, slots=True)
class Arrival:
    """A tensor that is on its way to the device."""

    tensor: Tensor
    event: Any = None

    def take(self) -> Tensor:
        """Return it; what is computed next waits for it."""
        if self.event is not None:
            stream = torch.cuda.current_stream(self.tensor.device)
            stream.wait_event(self.event)
            self.tensor.record_stream(stream)
        return self.tensor


class Streams(Protocol):
    """How tensors of one device get to the message library and back."""

    @property
    def device(self) -> torch.device:
        """Where the computation is."""
        ...

    @property
    def in_order(self) -> bool:
        """Whether every tensor is ready as soon as Python has it."""
        ...

    def to_host(self, tensor: Tensor) -> HostCopy:
        """Start to copy a tensor of the device to the host."""
        ...

    def in_place(self, tensor: Tensor) -> HostCopy:
        """Return the tensor itself, ready once its computation is."""
        ...

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory that `to_device` copies quickly from."""
        ...

    def device_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory of the device that no computation uses: free at once."""
        ...

    def to_device(self, buffer: Tensor) -> Tensor:
        """Start to copy to the device; what is computed next waits for it."""
        ...

    def fetch(self, copy: HostCopy) -> Arrival:
        """Start to copy back what `to_host` copied; nothing waits for it yet."""
        ...

    def use(self, tensor: Tensor) -> Tensor:
        """Return a device buffer that has been filled, known to the computation."""
        ...

    def copy_back(self, buffer: Tensor, tensor: Tensor) -> None:
        """Start to copy a host buffer into a tensor of the device."""
        ...


class NullStreams:
    """The CPU: host and device are one."""

    device = torch.device("cpu")
    in_order = True

    def to_host(self, tensor: Tensor) -> HostCopy:
        """Return the tensor itself."""
        return HostCopy(tensor)

    def in_place(self, tensor: Tensor) -> HostCopy:
        """Return the tensor itself."""
        return HostCopy(tensor)

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return plain memory."""
        return torch.empty(shape, dtype=dtype)

    def device_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return plain memory."""
        return torch.empty(shape, dtype=dtype)

    def to_device(self, buffer: Tensor) -> Tensor:
        """Return the buffer itself."""
        return buffer

    def fetch(self, copy: HostCopy) -> Arrival:
        """Return the tensor itself."""
        return Arrival(copy.buffer)

    def use(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself."""
        return tensor

    def copy_back(self, buffer: Tensor, tensor: Tensor) -> None:
        """Copy, unless they are one."""
        if buffer is not tensor:
            tensor.copy_(buffer)


class CudaStreams:
    """One CUDA device. The compute stream is the one that is current at each call.

    Memory is safe without synchronization because PyTorch's allocators are told who
    uses it: `record_stream` for device memory on another stream than its own, and the
    pinned allocator keeps a buffer until the copies from or to it are done.
    """

    in_order = False

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", device.index or 0)
        self._outward = _cuda.Stream(self.device)
        self._inward = _cuda.Stream(self.device)

    def to_host(self, tensor: Tensor) -> HostCopy:
        """Copy to pinned memory on the outward stream, after the computation so far."""
        buffer = self.host_buffer(tuple(tensor.shape), tensor.dtype)
        self._outward.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._outward):
            buffer.copy_(tensor, non_blocking=True)
            event = _cuda.Event()
            event.record(self._outward)
        tensor.record_stream(self._outward)
        return HostCopy(buffer, event)

    def in_place(self, tensor: Tensor) -> HostCopy:
        """Mark the end of the computation so far."""
        event = _cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return HostCopy(tensor, event)

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return pinned memory; PyTorch keeps what is freed for the next time."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def device_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate on a stream where nothing runs, and so without what is to come.

        Memory of the compute stream may be in use by work that is queued there.
        """
        with torch.cuda.stream(self._inward):
            return torch.empty(shape, dtype=dtype, device=self.device)

    def to_device(self, buffer: Tensor) -> Tensor:
        """Copy on the inward stream; the compute stream waits for this copy alone."""
        with torch.cuda.stream(self._inward):
            tensor = buffer.to(self.device, non_blocking=True)
        torch.cuda.current_stream(self.device).wait_stream(self._inward)
        return self.use(tensor)

    def fetch(self, copy: HostCopy) -> Arrival:
        """Copy on the inward stream, once the copy outward is done."""
        with torch.cuda.stream(self._inward):
            if copy.event is not None:
                self._inward.wait_event(copy.event)
            tensor = copy.buffer.to(self.device, non_blocking=True)
            event = _cuda.Event()
            event.record(self._inward)
        return Arrival(tensor, event)

    def use(self, tensor: Tensor) -> Tensor:
        """Keep the memory from its own stream until the compute stream is done."""
        tensor.record_stream(torch.cuda.current_stream(self.device))
        return tensor

    def copy_back(self, buffer: Tensor, tensor: Tensor) -> None:
        """Copy on the compute stream, where the next user of the tensor comes after."""
        tensor.copy_(buffer, non_blocking=True)


def streams_for(device: torch.device) -> Streams:
    """Return the streams of a CPU or CUDA device."""
    return CudaStreams(device) if device.type == "cuda" else NullStreams()
