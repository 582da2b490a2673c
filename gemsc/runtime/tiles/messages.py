"""Messages between tiles: the pieces of one exchange for one tile travel together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from gemsc.errors import InternalError
from gemsc.messages.exchange import Exchange, Piece, View
from gemsc.runtime.transport.device_transport import DeviceTransport, Operation
from gemsc.runtime.transport.waiting import Request

__all__ = ["Flight", "TileMailbox", "tag_of"]

FIRST_TAG = 16384  # below are the transfers between stages
NUM_INDICES = 8192  # with two tags each: values, and their gradients

Shape = tuple[int, ...]


class Flight:
    """The messages of one exchange on their way."""

    def __init__(
        self, mailbox: TileMailbox, shapes: Mapping[int, Sequence[Shape]]
    ) -> None:
        self._mailbox = mailbox
        self._shapes = shapes  # of what comes from each tile
        self.incoming: dict[int, Operation] = {}
        self.outgoing: list[Request] = []

    def take(self, tile: int) -> list[Tensor]:
        """Wait for the tensors that come from a tile. Call it once."""
        together = self.incoming.pop(tile).take()
        shapes = self._shapes[tile]
        parts = torch.split(together, [prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def finish(self) -> None:
        """Wait until all is sent: the next exchange may begin."""
        self._mailbox.transport.wait(*self.outgoing)
        self._mailbox.flying = False


class TileMailbox:
    """What one tile exchanges its messages with.

    `ranks` are the transport's ranks of all tiles.
    """

    def __init__(self, transport: DeviceTransport, ranks: tuple[int, ...]) -> None:
        self.transport = transport
        self.ranks = ranks
        self.flying = False

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
        flight, link = Flight(self, receives), self.transport
        with link.together():
            for tile, shapes in receives.items():
                count, rank = sum(map(prod, shapes)), self.ranks[tile]
                flight.incoming[tile] = link.receive((count,), dtype, rank, tag)
            for tile, tensors in sends.items():
                request = link.send(_together(tensors), self.ranks[tile], tag)
                flight.outgoing.append(request)
        return flight


def tag_of(exchange: Exchange, *, back: bool) -> int:
    """Return the tag of an exchange's messages; `back` are those of its gradients."""
    return FIRST_TAG + 2 * (exchange.index % NUM_INDICES) + back


def _shapes(pieces: Mapping[int, tuple[Piece, ...]]) -> dict[int, list[Shape]]:
    return {tile: [piece.shape for piece in each] for tile, each in pieces.items()}


def _together(tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) == 1:
        return tensors[0].reshape(-1)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
