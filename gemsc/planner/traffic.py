"""How many messages and bytes a training step takes: exactly what will be counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import fx

from gemsc.ir import meta
from gemsc.ir.flow import exchange_of, exchanged, flow
from gemsc.ir.opaque import opaques
from gemsc.ir.program import Program, Stage, Transfer
from gemsc.ir.segments import recomputed_nodes
from gemsc.messages.grid_message import GridMessage, TileValue
from gemsc.messages.message import Message, Value
from gemsc.planner.tiles import ends, exchanging, traffic_of
from gemsc.schedules import Task


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """Messages between the ranks of one copy of the model in one training step.

    `messages` carry values and gradients, from stage to stage and from tile to tile.
    `sums` are those that tiles need forward and backward; each tile's call counts, with
    the bytes that it brings. Sums over copies, of gradients and of the loss, are not
    among them.
    """

    messages: int = 0
    message_bytes: int = 0
    sums: int = 0
    sum_bytes: int = 0

    def __add__(self, other: StepTraffic) -> StepTraffic:
        """Return both together."""
        return StepTraffic(
            self.messages + other.messages,
            self.message_bytes + other.message_bytes,
            self.sums + other.sums,
            self.sum_bytes + other.sum_bytes,
        )

    def times(self, count: int) -> StepTraffic:
        """Return the same, so many times."""
        return StepTraffic(
            self.messages * count,
            self.message_bytes * count,
            self.sums * count,
            self.sum_bytes * count,
        )


def step_traffic(tiles: Sequence[Program], task: Task) -> StepTraffic:
    """Return what one copy of the model sends in a step.

    `tiles` are what the tiles of the largest grid run. The first one knows what all
    hold, but for what is inside of branches of others.
    """
    program, total = tiles[0], StepTraffic()
    for replica, count in enumerate(task.micro_batches):
        row = task.placement[replica]
        for stage in range(len(row)):
            total += stage_traffic(tiles, stage).times(count)
        for transfer in program.transfers or ():
            if row[transfer.source] != row[transfer.dest]:
                total += _between(program, transfer).times(count)
    return total


def stage_traffic(tiles: Sequence[Program], index: int) -> StepTraffic:
    """Return what the ranks of a stage send each other for one micro-batch.

    `tiles` are as for `step_traffic`.
    """
    placement = tiles[0].placement
    assert placement is not None
    branches = placement.grid(index).branches  # each rank of a tile has its own
    ranks = len(placement.ranks[0][index])
    found = StepTraffic()
    for member, program in enumerate(tiles[:branches]):
        found += _sent_by(program, program.require_stages()[index], member, branches)
    if ranks > 1 and opaques(tiles[0].module):  # do they all lack a gradient?
        gives = len(flow(tiles[0], index, with_outputs=False).gives)
        size = torch.float32.itemsize * gives
        found += StepTraffic(sums=ranks, sum_bytes=ranks * size)
    return found


def _sent_by(program: Program, stage: Stage, member: int, branches: int) -> StepTraffic:
    """Return what every `branches`-th rank of a stage sends, from `member` on."""
    placement = program.placement
    assert placement is not None
    ranks = len(placement.ranks[0][stage.index]) // branches
    again = recomputed_nodes(program, stage)
    sizes: list[int] = []
    for node in exchanging(program, stage):
        value = exchanged(node)
        item = meta.spec(value).dtype.itemsize
        pairs: Counter[tuple[int, int]] = Counter()  # one message for all their pieces
        for piece in exchange_of(node).pieces:
            if piece.source != piece.dest and piece.source % branches == member:
                pairs[piece.source, piece.dest] += item * prod(piece.shape)
        sizes += [*pairs.values()] * traffic_of(node, again=node in again).trips
    sums = [
        ranks * each.num_bytes
        for node in stage.nodes
        for each in meta.facts(node).sums
        for _ in range(2 if node in again and not each.backward else 1)
    ]
    return StepTraffic(len(sizes), sum(sizes), ranks * len(sums), sum(sums))


def _between(program: Program, transfer: Transfer) -> StepTraffic:
    """Return what one stage sends another for one micro-batch, and gets back."""
    sizes = [_size(message) for message in _messages(program, transfer)]
    return StepTraffic(len(sizes), sum(sizes))


def received_bytes(program: Program, transfer: Transfer) -> tuple[int, int]:
    """Return what the peak-memory rank receives: of values, and back of gradients."""
    received: Counter[tuple[bool, int]] = Counter()
    for message in _messages(program, transfer):
        received[message.is_gradient, message.dest] += _size(message)
    values, gradients = (
        max((n for (back, _), n in received.items() if back is way), default=0)
        for way in (False, True)
    )
    return values, gradients


def _messages(program: Program, transfer: Transfer) -> Iterator[Message]:
    placement = program.placement
    assert placement is not None
    row = placement.ranks[0]
    sources, dests = row[transfer.source], row[transfer.dest]
    if len(sources) == len(dests) == 1:
        values = tuple(_value(value) for value in transfer.values)
        message = Message(0, sources[0], dests[0], values)
        yield message
        if message.gradient.values:
            yield message.gradient
        return
    values_of_tiles = tuple(
        _tile_value(program, transfer, value) for value in transfer.values
    )
    whole = GridMessage(0, sources, dests, values_of_tiles)
    for part in (*whole.parts, *whole.gradient.parts):
        yield part.message


def _value(value: fx.Node) -> Value:
    spec = meta.spec(value)
    return Value(value.name, spec.shape, spec.dtype, meta.needs_gradient(value))


def _tile_value(program: Program, transfer: Transfer, value: fx.Node) -> TileValue:
    exchange = ends(program, transfer, value)
    return TileValue(
        value.name,
        exchange.shape,
        meta.spec(value).dtype,
        exchange.held,
        exchange.wanted,
        meta.needs_gradient(value),
        owned=exchange.owned,
    )


def _size(message: Message) -> int:
    shape, dtype = message.buffer(tuple(value.dtype for value in message.values))
    return torch.Size(shape).numel() * dtype.itemsize
