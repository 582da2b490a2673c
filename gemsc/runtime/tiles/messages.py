"""Messages between tiles: the pieces of one exchange for one tile travel together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from gemsc.messages.exchange import Exchange
from gemsc.runtime.transport.device_transport import DeviceTransport, Operation
from gemsc.runtime.transport.waiting import Request

__all__ = ["Flight", "tag_of"]

FIRST_TAG = 16384  # below are the transfers between stages
NUM_INDICES = 8192  # with two tags each: values, and their gradients


@dataclass(eq=False)
class Flight:
    """The messages of one exchange on their way; `shapes` of what comes from a tile."""

    transport: DeviceTransport
    shapes: Mapping[int, Sequence[tuple[int, ...]]]
    incoming: dict[int, Operation] = field(default_factory=dict)
    outgoing: list[Request] = field(default_factory=list)
    is_over: bool = False

    def take(self, tile: int) -> list[Tensor]:
        """Wait for the tensors that come from a tile. Call it once."""
        together = self.incoming.pop(tile).take()
        shapes = self.shapes[tile]
        parts = torch.split(together, [prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def finish(self) -> None:
        """Wait until all is sent: the next exchange may begin."""
        self.transport.wait(*self.outgoing)
        self.is_over = True


def tag_of(exchange: Exchange, *, back: bool) -> int:
    """Return the tag of an exchange's messages; `back` are those of its gradients."""
    return FIRST_TAG + 2 * (exchange.index % NUM_INDICES) + back
