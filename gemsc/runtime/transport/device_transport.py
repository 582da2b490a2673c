"""Messages between devices: the transport, with the copies that a device needs.

Where the library cannot read the device, or the device is not done with a tensor, an
operation waits for the device before it starts:

    send        device -- copy --> host -- start --> other rank
    receive     other rank --> host; take() -- copy --> device
    all-reduce  device -- copy --> host -- start --> sum on the host -- copy --> device
                or, where the library `sums_on_device`: device -- start --> sum on it

On the CPU there is nothing to copy or to wait for: the transport's own requests are all
that there is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from gemsc.runtime.transport.streams import Pending, Streams
from gemsc.runtime.transport.transport import Group, LaneTransport, Transport
from gemsc.runtime.transport.waiting import Awaited, Request, wait

MOST_DEFERRED = 4  # how far the host may be ahead of the device
DEVICE_SLEEP = 200e-6  # seconds: what waits for the device starts about as late


@dataclass(slots=True, eq=False)
class Operation:
    """A message or a sum, on its way once the device is done with its `memory`.

    memory: what the library reads or writes.
    room: of a message that comes in, its place on the device: perhaps that memory.
    then: what follows once the operation is done.
    """

    transport: DeviceTransport
    memory: Pending
    start: Callable[[], Request]
    then: Callable[[], None] | None = None
    room: Pending | None = None
    request: Request | None = None  # the library's, once it has been started

    def begin(self) -> None:
        """Start it."""
        self.request = self.start()

    def done(self) -> bool:
        """Give the library a turn; True once complete, and from then on."""
        self.transport.advance()
        if self.request is None or not self.request.done():
            return False
        self.finish()
        return True

    def finish(self) -> None:
        """Do what follows, once."""
        if self.then is not None:
            self.then()
            self.then = None

    @property
    def buffer(self) -> Tensor:
        """The memory on the device that a message comes into."""
        assert self.room is not None
        return self.room.tensor

    def take(self) -> Tensor:
        """Wait politely; return a message that comes in, on the device. Call it once.

        On CUDA the tensor can be used at once on the current stream, which waits for
        the copy where it must.
        """
        self.transport.wait(self)
        if self.room is None or self.room is self.memory:
            return self.memory.tensor
        return self.transport.bring(self.memory.tensor, self.room)


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
            need: Awaited | None = getattr(_plain(request), "need", None)
            if need is not None:
                return need
        return Awaited("the device", ())


class DeviceTransport:
    """What a rank sends and receives with: tensors of its device, on any transport.

    What waits for the device is deferred: it starts at a later call, in order. All that
    is deferred holds memory, and so do messages that are copied to the device: with
    more than MOST_DEFERRED of either, the host waits for the device, and for nobody
    else.
    """

    def __init__(self, host: Transport, streams: Streams) -> None:
        self.host = host
        self.streams = streams
        self.has_lanes = getattr(host, "has_lanes", False)
        self._direct = streams.in_order or host.cuda_aware
        self._deferred: deque[Operation] = deque()
        self._arriving: deque[Pending] = deque()  # in memory of the host

    def send(self, tensor: Tensor, dest: int, tag: int) -> Request:
        """Start to send; the tensor must not change in place until that is done."""
        # the memory of a lazy conjugate or negative is not its value
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
        streams = self.streams
        if streams.in_order:
            return self.host.send(tensor, dest, tag)
        memory = streams.in_place(tensor) if self._direct else streams.to_host(tensor)
        return self._defer(
            Operation(self, memory, lambda: self.host.send(memory.tensor, dest, tag))
        )

    def receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, source: int, tag: int
    ) -> Operation:
        """Start to receive into a new buffer."""
        memory = room = self.streams.device_buffer(shape, dtype)
        if not self._direct:
            memory = Pending(self.streams.host_buffer(shape, dtype))
        incoming = Operation(
            self,
            memory,
            lambda: self.host.receive(memory.tensor, source, tag),
            room=room,
        )
        if memory.event is not None or (self.has_lanes and self._deferred):
            return self._defer(incoming)
        incoming.begin()  # nothing else uses the memory
        return incoming

    def group(self, ranks: tuple[int, ...], key: str = "") -> Group:
        """Return the group of these ranks, for sums of the device's tensors.

        All of them ask for it; that may take until they have, so what is deferred
        starts before: one of them may wait for it.
        """
        wait(_Until(lambda: self._at_most(0)))
        group = self.host.group(ranks, key)
        group.connect()
        return group

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """Let messages that are started meanwhile travel in any order.

        That is so anyway where they have tags; elsewhere they are one operation: see
        `LaneTransport`.
        """
        if not self.has_lanes:
            yield
            return
        wait(_Until(lambda: self._at_most(0)))
        with cast("LaneTransport", self.host).as_one():
            yield
            wait(_Until(lambda: self._at_most(0)))

    def all_reduce(self, group: Group, tensor: Tensor) -> Request:
        """Start the sum over a group, in place."""
        tensor = tensor.detach()
        if tensor.is_complex():  # the same memory, in a dtype that MPI can add
            tensor = torch.view_as_real(tensor)
        return self._collect(lambda sent, _: group.all_reduce(sent), tensor)

    def reduce_scatter(
        self, group: Group, tensor: Tensor, sizes: Sequence[int], result: Tensor
    ) -> Request:
        """Start the sum, of which each member gets its part: see `Group`."""
        return self._collect(
            lambda sent, room: group.reduce_scatter(sent, sizes, room), tensor, result
        )

    def all_gather(
        self, group: Group, tensor: Tensor, sizes: Sequence[int], result: Tensor
    ) -> Request:
        """Start to bring all members' tensors together: see `Group`."""
        return self._collect(
            lambda sent, room: group.all_gather(sent, sizes, room), tensor, result
        )

    def _collect(
        self,
        start: Callable[[Tensor, Tensor], Request],
        tensor: Tensor,
        result: Tensor | None = None,
    ) -> Request:
        """Start a collective operation, in place without a `result`.

        On CUDA it goes through the host, or the library does it there, and the result
        is there for what is computed after `done()` was True.
        """
        tensor, streams = tensor.detach(), self.streams
        target = tensor if result is None else result
        if streams.in_order:
            return start(tensor, target)
        if self.host.sums_on_device:
            memory = streams.in_place(tensor)
            return self._defer(Operation(self, memory, lambda: start(tensor, target)))
        copy = streams.to_host(tensor)
        room = copy.tensor
        if result is not None:
            room = streams.host_buffer(tuple(result.shape), result.dtype)
        return self._defer(
            Operation(
                self,
                copy,
                lambda: start(copy.tensor, room),
                lambda: streams.copy_back(room, target),
            )
        )

    def _defer(self, operation: Operation) -> Operation:
        self._deferred.append(operation)
        wait(_Until(lambda: self._at_most(MOST_DEFERRED)))
        return operation

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
        while self._deferred and self._deferred[0].memory.ready():
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
            if isinstance(request, Operation):
                request.finish()

    def progress(self) -> None:
        """Give the library one cheap turn, between two layers for instance."""
        self.advance()
        self.host.progress()


def _plain(request: Request) -> Request | None:
    """Return the transport's own request, if it has been started."""
    return request.request if isinstance(request, Operation) else request
