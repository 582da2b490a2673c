"""Messages between devices: the transport, with the copies that a device needs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gemsc.runtime.transport.streams import Pending, Streams
from gemsc.runtime.transport.transport import Group, Transport
from gemsc.runtime.transport.waiting import Awaited, Request, wait

MOST_DEFERRED = 4  # how far the host may be ahead of the device
DEVICE_SLEEP = 200e-6  # seconds: what waits for the device starts about as late


@dataclass(slots=True, eq=False)
class _Deferred:
    """An operation that starts once its data has come to where the library reads it."""

    transport: DeviceTransport
    copy: Pending
    start: Callable[[], Request]
    then: Callable[[], None] | None = None  # once the operation is done
    request: Request | None = None

    def begin(self) -> None:
        self.request = self.start()

    def done(self) -> bool:
        self.transport.advance()
        if self.request is None or not self.request.done():
            return False
        self.finish()
        return True

    def finish(self) -> None:
        """Do what comes after the operation, once."""
        if self.then is not None:
            self.then()
            self.then = None


@dataclass(frozen=True, slots=True)
class _Until:
    """A condition on the device, to be waited for, and on operations in flight."""

    done: Callable[[], bool]
    requests: tuple[Request, ...] = ()
    longest_sleep = DEVICE_SLEEP

    @property
    def need(self) -> Awaited:
        """What the first operation takes that has been started."""
        for request in self.requests:
            found: Awaited | None = getattr(_plain(request), "need", None)
            if found is not None:
                return found
        return Awaited("the device", ())


@dataclass(slots=True, eq=False)
class Incoming:
    """A message on its way to this rank, perhaps through a buffer of the host."""

    transport: DeviceTransport
    request: Request
    room: Pending
    staged: Tensor | None = None

    def done(self) -> bool:
        """Give the library a turn; True once the message is here."""
        self.transport.advance()
        return self.request.done()

    @property
    def buffer(self) -> Tensor:
        """The memory that the message comes into."""
        return self.room.tensor

    def take(self) -> Tensor:
        """Wait politely; return the tensor on the device. Call it once.

        On CUDA the tensor can be used at once on the current stream, which waits for
        the copy where it must.
        """
        self.transport.wait(self)
        if self.staged is None:
            return self.room.tensor
        return self.transport.bring(self.staged, self.room)


class DeviceTransport:
    """What a rank sends and receives with: tensors of its device, on any transport.

    Where the library cannot read the device, or the device is not done with a tensor, a
    message is deferred: it starts at a later call, in order. All that is
    deferred holds memory, and so do messages that are copied to the device: with more
    than MOST_DEFERRED of either, the host waits for the device, and for nobody else.
    """

    def __init__(self, host: Transport, streams: Streams) -> None:
        self.host = host
        self.streams = streams
        self._direct = streams.in_order or host.cuda_aware
        self._deferred: deque[_Deferred] = deque()
        self._arriving: deque[Pending] = deque()  # in memory of the host

    def send(self, tensor: Tensor, dest: int, tag: int) -> Request:
        """Start to send; the tensor must not change in place until that is done."""
        # the memory of a lazy conjugate or negative is not its value
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if self.streams.in_order:
            return self.host.send(tensor, dest, tag)
        streams = self.streams
        copy = streams.in_place(tensor) if self._direct else streams.to_host(tensor)
        return self._defer(copy, lambda: self.host.send(copy.tensor, dest, tag))

    def receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, source: int, tag: int
    ) -> Incoming:
        """Start to receive into a new buffer."""
        room = self.streams.device_buffer(shape, dtype)
        if not self._direct:
            buffer = self.streams.host_buffer(shape, dtype)
            request = self.host.receive(buffer, source, tag)
            return Incoming(self, request, room, buffer)
        if self.streams.in_order:
            return Incoming(self, self.host.receive(room.tensor, source, tag), room)
        request = self._defer(room, lambda: self.host.receive(room.tensor, source, tag))
        return Incoming(self, request, room)

    def all_reduce(self, group: Group, tensor: Tensor) -> Request:
        """Start the sum over a group, in place; on CUDA it goes through the host.

        On CUDA the sum is in the tensor for what is computed after `done()` was True.
        """
        tensor = tensor.detach()
        if tensor.is_complex():  # the same memory, in a dtype that MPI can add
            tensor = torch.view_as_real(tensor)
        if self.streams.in_order:
            return group.all_reduce(tensor)
        copy = self.streams.to_host(tensor)
        return self._defer(
            copy,
            lambda: group.all_reduce(copy.tensor),
            lambda: self.streams.copy_back(copy.tensor, tensor),
        )

    def reduce_scatter(
        self, group: Group, tensor: Tensor, sizes: Sequence[int], result: Tensor
    ) -> Request:
        """Start the sum, of which each member gets its part: see `Group`."""
        return self._collect(group.reduce_scatter, tensor, sizes, result)

    def all_gather(
        self, group: Group, tensor: Tensor, sizes: Sequence[int], result: Tensor
    ) -> Request:
        """Start to bring all members' tensors together: see `Group`."""
        return self._collect(group.all_gather, tensor, sizes, result)

    def _collect(
        self,
        start: Callable[[Tensor, Sequence[int], Tensor], Request],
        tensor: Tensor,
        sizes: Sequence[int],
        result: Tensor,
    ) -> Request:
        """Start a collective operation; on CUDA it goes through the host.

        On CUDA the result is there for what is computed after `done()` was True.
        """
        tensor = tensor.detach()
        if self.streams.in_order:
            return start(tensor, sizes, result)
        copy = self.streams.to_host(tensor)
        room = self.streams.host_buffer(tuple(result.shape), result.dtype)
        return self._defer(
            copy,
            lambda: start(copy.tensor, sizes, room),
            lambda: self.streams.copy_back(room, result),
        )

    def _defer(
        self,
        copy: Pending,
        start: Callable[[], Request],
        finish: Callable[[], None] | None = None,
    ) -> Request:
        deferred = _Deferred(self, copy, start, finish)
        self._deferred.append(deferred)
        wait(_Until(lambda: self._at_most(MOST_DEFERRED)))
        return deferred

    def _at_most(self, most: int) -> bool:
        """Start what is ready, other ranks may need it; whether so few are left."""
        self.progress()
        return len(self._deferred) <= most

    def bring(self, staged: Tensor, room: Pending) -> Tensor:
        """Return a message that has come to the host, on the device."""
        tensor = self.streams.to_device(staged, room)
        self._arriving.append(self.streams.in_place(staged))
        wait(_Until(self._has_arrived))
        return tensor

    def _has_arrived(self) -> bool:
        """Start what is ready; whether the device has the oldest message."""
        self.progress()
        while self._arriving and self._arriving[0].ready():
            self._arriving.popleft()
        return len(self._arriving) <= MOST_DEFERRED

    def advance(self) -> None:
        """Start what is ready. In order: messages and sums must not overtake."""
        while self._deferred and self._deferred[0].copy.ready():
            self._deferred.popleft().begin()

    def wait(self, *requests: Request) -> None:
        """Return when all are complete; what was deferred starts meanwhile."""
        if self._deferred:
            wait(
                _Until(
                    lambda: self._at_most(0) or all(r.done() for r in requests),
                    requests,
                )
            )
        started = [_plain(request) for request in requests]
        self.host.wait(*(request for request in started if request is not None))
        for request in requests:
            if isinstance(request, _Deferred):
                request.finish()

    def progress(self) -> None:
        """Give the library one cheap turn, between two layers for instance."""
        self.advance()
        self.host.progress()


def _plain(request: Request | None) -> Request | None:
    """Return the transport's own request, if it has been started."""
    while isinstance(request, Incoming | _Deferred):
        request = request.request
    return request
