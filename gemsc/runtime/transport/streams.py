"""Copies between a device and the host, beside the computation.

On CUDA each direction has a stream of its own, so that neither waits for the other:

    compute   ...forward 3.......|..forward 4......|........
                       event |                        ^ waits for this copy only
    outward                  `-> copy to pinned memory -> MPI send once it is there
    inward              MPI receive into pinned memory -> copy to the device

Nothing ever synchronizes the device during a step. On the CPU there is nothing to do.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

MOST_LEAVING = 2  # tensors on their way to the host before the computation waits

# tells, in nanoseconds of time.perf_counter_ns, when the device came to some point;
# the host waits until it has
Moment = Callable[[], int]


class StreamEvent(Protocol):
    """A point of a stream."""

    def query(self) -> bool:
        """Whether the stream has come there."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A tensor that the library may read, or write, once it is ready."""

    tensor: Tensor
    event: StreamEvent | None = None

    def ready(self) -> bool:
        """Whether the device is done with it; never blocks."""
        return self.event is None or self.event.query()


@dataclass(frozen=True, slots=True)
class Arrival:
    """A tensor that is on its way to the device."""

    tensor: Tensor
    wait: Callable[[], None] | None = None

    def take(self) -> Tensor:
        """Return it; what is computed next waits for it."""
        if self.wait is not None:
            self.wait()
        return self.tensor


class Streams:
    """How tensors of one device get to the message library and back: here, on the CPU.

    Host and device are one, and every tensor is ready as soon as Python has it
    (`in_order`).
    """

    device = torch.device("cpu")
    in_order = True

    def to_host(self, tensor: Tensor, buffer: Tensor | None = None) -> Pending:
        """Start to copy a tensor of the device to the host, to a buffer if given."""
        return Pending(tensor)

    def in_place(self, tensor: Tensor) -> Pending:
        """Return the tensor itself, ready once the computation so far is done."""
        return Pending(tensor)

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory that `to_device` copies quickly from."""
        return torch.empty(shape, dtype=dtype)

    def device_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Pending:
        """Return memory of the device, ready once nothing that was there is in use."""
        return Pending(torch.empty(shape, dtype=dtype))

    def to_device(self, buffer: Tensor, room: Pending) -> Tensor:
        """Start to copy into a device buffer; what is computed next waits for it."""
        return buffer

    def upload(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the host on the device; the host does not wait."""
        return tensor

    def fetch(self, copy: Pending) -> Arrival:
        """Start to copy back what `to_host` copied; nothing waits for it yet."""
        return Arrival(copy.tensor)

    def copy_back(self, buffer: Tensor, tensor: Tensor) -> None:
        """Start to copy a host buffer into a tensor of the device."""
        if buffer is not tensor:
            tensor.copy_(buffer)

    def start_clock(self) -> None:
        """Wait until the device is idle; `moment` needs it, once before each step."""

    def moment(self) -> Moment:
        """Return what tells when the computation so far was done; does not wait."""
        now = time.perf_counter_ns()
        return lambda: now


class CudaStreams(Streams):
    """One CUDA device. The compute stream is the one that is current at each call.

    All device memory belongs to the compute stream: what Python drops is used again
    there, in order, and so the peak does not depend on how far the host is ahead.
    Others who use such memory follow two rules:

        before   they wait until the compute stream has come to where it was allotted
        after    the tensor is kept until the compute stream waits for their copy

    Of copies outward, MOST_LEAVING are kept: the next one lets the compute stream wait
    for the oldest. Copies inward are kept until they, or later ones, are taken.
    """

    in_order = False

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        """Use a device, with the streams and events of `cuda`."""
        self.device = device
        self._cuda = cuda
        self._outward = cuda.Stream(device)
        self._inward = cuda.Stream(device)
        self._leaving: deque[tuple[Tensor, StreamEvent]] = deque()
        self._coming: deque[tuple[Tensor, StreamEvent]] = deque()

    def to_host(self, tensor: Tensor, buffer: Tensor | None = None) -> Pending:
        """Copy to pinned memory on the outward stream, after the computation so far."""
        if buffer is None:
            buffer = self.host_buffer(tuple(tensor.shape), tensor.dtype)
        self._outward.wait_event(self.in_place(tensor).event)
        with self._cuda.stream(self._outward):
            buffer.copy_(tensor, non_blocking=True)
        event = self._mark(self._outward)
        self._leaving.append((tensor, event))
        if len(self._leaving) > MOST_LEAVING:
            _, oldest = self._leaving.popleft()
            self._compute.wait_event(oldest)
        return Pending(buffer, event)

    def in_place(self, tensor: Tensor) -> Pending:
        """Mark the end of the computation so far."""
        return Pending(tensor, self._mark(self._compute))

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return pinned memory; PyTorch keeps what is freed for the next time."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def device_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Pending:
        """Return memory that work which is queued on the compute stream may still use.

        It is ready once that is done.
        """
        return self.in_place(torch.empty(shape, dtype=dtype, device=self.device))

    def to_device(self, buffer: Tensor, room: Pending) -> Tensor:
        """Copy on the inward stream; the compute stream waits for this copy alone."""
        return self._bring(buffer, room).take()

    def upload(self, tensor: Tensor) -> Tensor:
        """Copy on the compute stream, from pinned memory."""
        if tensor.device == self.device:
            return tensor
        if not tensor.is_pinned():  # the host would wait for all that is queued
            tensor = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
        room = torch.empty_like(tensor, device=self.device)
        return room.copy_(tensor, non_blocking=True)

    def fetch(self, copy: Pending) -> Arrival:
        """Copy on the inward stream, once the copy outward is done."""
        room = self.device_buffer(tuple(copy.tensor.shape), copy.tensor.dtype)
        self._inward.wait_event(copy.event)
        return self._bring(copy.tensor, room)

    def copy_back(self, buffer: Tensor, tensor: Tensor) -> None:
        """Copy on the compute stream, where the next user of the tensor comes after."""
        tensor.copy_(buffer, non_blocking=True)

    def start_clock(self) -> None:
        """Mark a point of the compute stream, and when the host sees it done."""
        start = self._mark(self._compute, timed=True)
        start.synchronize()
        self._clock = start, time.perf_counter_ns()

    def moment(self) -> Moment:
        """Mark the end of the computation so far, with the time of the device."""
        start, zero = self._clock
        event = self._mark(self._compute, timed=True)

        def read() -> int:
            event.synchronize()
            milliseconds: float = start.elapsed_time(event)
            return zero + round(1e6 * milliseconds)

        return read

    @property
    def _compute(self) -> Any:
        return self._cuda.current_stream(self.device)

    def _mark(self, stream: Any, *, timed: bool = False) -> Any:
        event = self._cuda.Event(enable_timing=timed)
        event.record(stream)
        return event

    def _bring(self, buffer: Tensor, room: Pending) -> Arrival:
        self._inward.wait_event(room.event)
        with self._cuda.stream(self._inward):
            room.tensor.copy_(buffer, non_blocking=True)
        event = self._mark(self._inward)
        self._coming.append((room.tensor, event))
        return Arrival(room.tensor, partial(self._take, event))

    def _take(self, event: StreamEvent) -> None:
        """Let what is computed next wait for a copy, and so for those before it."""
        if all(event is not other for _, other in self._coming):
            return  # it has waited for this one, or for a later one
        self._compute.wait_event(event)
        while self._coming.popleft()[1] is not event:
            pass


def streams_for(device: torch.device) -> Streams:
    """Return the streams of a CPU or CUDA device."""
    return CudaStreams(device) if device.type == "cuda" else Streams()
