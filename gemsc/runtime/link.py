"""Messages between devices: the transport, with the copies that a device needs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gemsc.runtime.streams import HostCopy, Streams
from gemsc.runtime.transport import Group, Request, Transport, wait_politely

__all__ = ["Incoming", "Link"]


class _Deferred:
    """An operation that starts once its data has come to where the library reads it."""

    __slots__ = ("_finish", "_link", "copy", "request", "start")

    def __init__(
        self,
        link: Link,
        copy: HostCopy,
        start: Callable[[], Request],
        finish: Callable[[], None] | None = None,
    ) -> None:
        self.copy = copy
        self.start = start
        self._link = link
        self._finish = finish
        self.request: Request | None = None

    def begin(self) -> None:
        self.request = self.start()

    def done(self) -> bool:
        self._link.advance()
        if self.request is None or not self.request.done():
            return False
        self.finish()
        return True

    def finish(self) -> None:
        """Do what comes after the operation, once."""
        if self._finish is not None:
            self._finish()
            self._finish = None


class _Begun:
    """True once nothing is deferred any more, or all that is waited for is done."""

    __slots__ = ("_link", "_requests")

    def __init__(self, link: Link, requests: Sequence[Request]) -> None:
        self._link = link
        self._requests = requests

    def done(self) -> bool:
        """Start what is ready, whatever is waited for: other ranks may need it."""
        self._link.progress()
        return not self._link._deferred or all(r.done() for r in self._requests)


class Incoming:
    """A message on its way to this rank."""

    __slots__ = ("_buffer", "_link", "_staged", "request")

    def __init__(
        self, link: Link, request: Request, buffer: Tensor, *, staged: bool
    ) -> None:
        self._link = link
        self.request = request
        self._buffer = buffer
        self._staged = staged

    def done(self) -> bool:
        """Give the library a turn; True once the message is here."""
        self._link.advance()
        return self.request.done()

    @property
    def buffer(self) -> Tensor:
        """The memory that the message comes into."""
        return self._buffer

    def take(self) -> Tensor:
        """Wait politely; return the tensor on the device. Call it once.

        On CUDA the tensor can be used at once on the current stream, which waits for
        the copy where it must.
        """
        self._link.wait(self)
        streams = self._link.streams
        if self._staged:
            return streams.to_device(self._buffer)
        return streams.use(self._buffer)


class Link:
    """What a rank sends and receives with: tensors of its device, on any transport.

    Where the library cannot read the device, or the device is not done with a tensor, a
    send is deferred: it starts at a later call of this link, in order.
    """

    def __init__(self, transport: Transport, streams: Streams) -> None:
        self.transport = transport
        self.streams = streams
        self._direct = streams.device.type == "cpu" or transport.cuda_aware
        self._deferred: deque[_Deferred] = deque()

    def send(self, tensor: Tensor, dest: int, tag: int) -> Request:
        """Start to send; the tensor must not change in place until that is done."""
        tensor = tensor.detach().contiguous()
        if self.streams.in_order:
            return self.transport.send(tensor, dest, tag)
        streams = self.streams
        copy = streams.in_place(tensor) if self._direct else streams.to_host(tensor)
        return self._defer(copy, lambda: self.transport.send(copy.buffer, dest, tag))

    def receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, source: int, tag: int
    ) -> Incoming:
        """Start to receive into a new buffer."""
        if self._direct:
            buffer = self.streams.device_buffer(shape, dtype)
        else:
            buffer = self.streams.host_buffer(shape, dtype)
        request = self.transport.receive(buffer, source, tag)
        return Incoming(self, request, buffer, staged=not self._direct)

    def all_reduce(self, group: Group, tensor: Tensor) -> Request:
        """Start the sum over a group, in place; on CUDA it goes through the host.

        On CUDA the sum is in the tensor for what is computed after `done()` was True.
        """
        if self.streams.in_order:
            return group.all_reduce(tensor)
        tensor = tensor.detach()
        copy = self.streams.to_host(tensor)
        return self._defer(
            copy,
            lambda: group.all_reduce(copy.buffer),
            lambda: self.streams.copy_back(copy.buffer, tensor),
        )

    def _defer(
        self,
        copy: HostCopy,
        start: Callable[[], Request],
        finish: Callable[[], None] | None = None,
    ) -> Request:
        deferred = _Deferred(self, copy, start, finish)
        self._deferred.append(deferred)
        self.advance()
        return deferred

    def advance(self) -> None:
        """Start what is ready. In order: messages and sums must not overtake."""
        while self._deferred and self._deferred[0].copy.ready():
            self._deferred.popleft().begin()

    def wait(self, *requests: Request) -> None:
        """Return when all are complete; what was deferred starts meanwhile."""
        if self._deferred:
            wait_politely([_Begun(self, requests)])
        self.transport.wait(*map(_plain, requests))
        for request in requests:
            if isinstance(request, _Deferred):
                request.finish()

    def progress(self) -> None:
        """Give the library one cheap turn, between two layers for instance."""
        self.advance()
        self.transport.progress()


def _plain(request: Request | None) -> Request:
    """Return the transport's own request, which has been started."""
    while isinstance(request, Incoming | _Deferred):
        request = request.request
    assert request is not None
    return request
