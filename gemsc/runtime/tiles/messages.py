"""Messages between tiles: small ones in memory that stays, by standing requests.

Exchanges come one after the other, the same ones in every step. So all that a stage
sends to one tile goes through one buffer, as large as the largest of them, and likewise
what comes from it; the library prepares each message once. Pieces of one exchange
for one tile travel together. Of a large message the copy
into such a buffer would take longer than a new request does: it travels as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from gemsc.errors import InternalError
from gemsc.messages.exchange import Exchange, Piece, View
from gemsc.runtime.transport.link import Incoming, Link
from gemsc.runtime.transport.transport import Request, Standing

__all__ = ["LARGEST_STANDING", "Flight", "TileMailbox", "tag_of"]

FIRST_TAG = 16384  # below are the transfers between stages
NUM_INDICES = 8192  # with two tags each: values, and their gradients
LARGEST_STANDING = 2**19  # bytes of a message in memory that stays

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Slot:
    """A message in a part of a buffer that stays."""

    memory: Tensor
    message: Standing


@dataclass(frozen=True, slots=True)
class _Route:
    """One direction of an exchange: the standing messages, by tile."""

    exchange: Exchange  # kept, so that its id stays its own
    sends: dict[int, _Slot]
    receives: dict[int, _Slot]

    @property
    def messages(self) -> list[Standing]:
        """The receives first."""
        return [
            slot.message for slot in (*self.receives.values(), *self.sends.values())
        ]


class Flight:
    """The messages of one exchange on their way."""

    def __init__(self, mailbox: TileMailbox) -> None:
        self._mailbox = mailbox
        self.shapes: Mapping[int, Sequence[Shape]] = {}
        self.slots: dict[int, _Slot] = {}
        self.incoming: dict[int, Incoming] = {}
        self.outgoing: list[Request] = []

    def take(self, tile: int, *, keep: bool) -> list[Tensor]:
        """Wait for the tensors that come from a tile.

        Unless they are to `keep`, it may be memory that the next exchange uses again.
        """
        if tile in self.incoming:
            together = self.incoming.pop(tile).take()
        else:
            slot = self.slots[tile]
            self._mailbox.link.wait(slot.message)
            together = slot.memory.clone() if keep else slot.memory
        shapes = self.shapes[tile]
        parts = torch.split(together, [prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def finish(self) -> None:
        """Wait until all is sent: the next exchange may begin."""
        self._mailbox.link.wait(*self.outgoing)
        self._mailbox.flying = False


class TileMailbox:
    """What one tile exchanges its messages with.

    `ranks` are the transport's ranks of all tiles. A standing request reads or writes
    memory as soon as it starts; on CUDA, where a message waits for its data, all are
    new, and so they are everywhere if none `stands`.
    """

    def __init__(self, link: Link, ranks: tuple[int, ...], *, stands: bool) -> None:
        self.link = link
        self.ranks = ranks
        self.flying = False
        self._largest = LARGEST_STANDING if stands and link.streams.in_order else 0
        self._buffers: dict[tuple[int, bool], Tensor] = {}
        self._routes: dict[tuple[int, bool, torch.dtype], _Route] = {}

    @property
    def buffers(self) -> list[Tensor]:
        """The memory that stays."""
        return list(self._buffers.values())

    def depart(self, exchange: Exchange, view: View, held: Tensor) -> Flight:
        """Start to send what other tiles want of the held box, and to receive."""
        sends = {
            tile: [held[piece.within(view.held)] for piece in pieces]
            for tile, pieces in view.sent.items()
        }
        receives = _shapes(view.received)
        return self.post(exchange, sends, receives, held.dtype, back=False)

    def depart_back(
        self,
        exchange: Exchange,
        view: View,
        gradients: Mapping[int, Sequence[Tensor]],
        dtype: torch.dtype,
    ) -> Flight:
        """Start to send home the gradients of what came from each tile."""
        return self.post(exchange, gradients, _shapes(view.sent), dtype, back=True)

    def post(
        self,
        exchange: Exchange,
        sends: Mapping[int, Sequence[Tensor]],
        receives: Mapping[int, Sequence[Shape]],
        dtype: torch.dtype,
        *,
        back: bool,
    ) -> Flight:
        """Start to send tensors to tiles, and to receive tensors of shapes from tiles.

        `back` says that these are gradients, which go against the exchange.
        """
        if self.flying:
            raise InternalError("an exchange begins before the last one ended")
        self.flying = True
        tag = tag_of(exchange, back=back)
        key = id(exchange), back, dtype
        if key not in self._routes:
            counts = {tile: sum(t.numel() for t in ts) for tile, ts in sends.items()}
            expected = {tile: _count(shapes) for tile, shapes in receives.items()}
            self._routes[key] = self._route(exchange, counts, expected, dtype, tag)
        route = self._routes[key]
        flight = Flight(self)
        flight.slots, flight.shapes = route.receives, receives
        for tile, shapes in receives.items():
            if tile not in route.receives:
                shape, rank = (_count(shapes),), self.ranks[tile]
                flight.incoming[tile] = self.link.receive(shape, dtype, rank, tag)
        for tile, tensors in sends.items():
            if tile in route.sends:
                _fill(route.sends[tile].memory, tensors)
            else:
                request = self.link.send(_together(tensors), self.ranks[tile], tag)
                flight.outgoing.append(request)
        if messages := route.messages:
            self.link.transport.start(messages)
            flight.outgoing += [slot.message for slot in route.sends.values()]
        return flight

    def _route(
        self,
        exchange: Exchange,
        sends: Mapping[int, int],
        receives: Mapping[int, int],
        dtype: torch.dtype,
        tag: int,
    ) -> _Route:
        """Prepare the standing messages of so many numbers to and from tiles."""
        transport = self.link.transport
        sizes = {
            (tile, is_send): count * dtype.itemsize
            for is_send, counts in ((True, sends), (False, receives))
            for tile, count in counts.items()
        }
        small = {key: size for key, size in sizes.items() if size <= self._largest}
        self._make_room(small)

        def slots(counts: Mapping[int, int], *, is_send: bool) -> dict[int, _Slot]:
            prepare = transport.standing_send if is_send else transport.standing_receive
            found = {}
            for tile in counts:
                if (tile, is_send) in small:
                    raw = self._buffers[tile, is_send][: small[tile, is_send]]
                    memory = raw.view(dtype)
                    message = prepare(memory, self.ranks[tile], tag)
                    found[tile] = _Slot(memory, message)
            return found

        return _Route(
            exchange, slots(sends, is_send=True), slots(receives, is_send=False)
        )

    def _make_room(self, sizes: dict[tuple[int, bool], int]) -> None:
        """Let every buffer be large enough; a larger one is bound to new requests."""
        known = {key: buffer.nbytes for key, buffer in self._buffers.items()}
        grown = {key: n for key, n in sizes.items() if n > known.get(key, 0)}
        if grown and any(key in known for key in grown):
            self.close()
        for key, num_bytes in grown.items():
            self._buffers[key] = torch.empty(num_bytes, dtype=torch.uint8)

    def close(self) -> None:
        """Give the library's requests back."""
        for route in self._routes.values():
            for message in route.messages:
                message.free()
        self._routes.clear()


def tag_of(exchange: Exchange, *, back: bool) -> int:
    """Return the tag of an exchange's messages; `back` are those of its gradients."""
    return FIRST_TAG + 2 * (exchange.index % NUM_INDICES) + back


def _shapes(pieces: Mapping[int, tuple[Piece, ...]]) -> dict[int, list[Shape]]:
    return {tile: [piece.shape for piece in each] for tile, each in pieces.items()}


def _count(shapes: Sequence[Shape]) -> int:
    return sum(map(prod, shapes))


def _together(tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) == 1:
        return tensors[0].reshape(-1)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _fill(memory: Tensor, tensors: Sequence[Tensor]) -> None:
    """Put tensors one after the other."""
    begin = 0
    for tensor in tensors:
        end = begin + tensor.numel()
        memory[begin:end].view(tensor.shape).copy_(tensor)
        begin = end
