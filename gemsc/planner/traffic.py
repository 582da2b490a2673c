"""What ranks send each other, between the tiles of a grid and from stage to stage.

Messages and bytes of a training step are exactly those that will be counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from operator import add

import torch
from torch import fx

from gemsc.base.boxes import everything, volume
from gemsc.costs.hardware import LinkSpeed
from gemsc.ir import meta
from gemsc.ir.flow import (
    exchange_of,
    exchanged,
    flow,
    grid_of,
    is_exchange,
    is_overlapped,
    is_ring,
    joins,
    source_of,
)
from gemsc.ir.opaque import opaques
from gemsc.ir.program import Program, Stage, Transfer
from gemsc.ir.segments import recomputed_nodes
from gemsc.messages.exchange import Exchange
from gemsc.messages.grid_message import GridMessage, TileValue
from gemsc.messages.message import Message, Value
from gemsc.schedules import Task

_Move = tuple[int, int, int]  # from, to, bytes


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
        return StepTraffic(*map(add, astuple(self), astuple(other)))

    def times(self, count: int) -> StepTraffic:
        """Return the same, so many times."""
        return StepTraffic(*(number * count for number in astuple(self)))


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
                sizes = [_size(message) for message in _messages(program, transfer)]
                total += StepTraffic(len(sizes), sum(sizes)).times(count)
    return total


def stage_traffic(tiles: Sequence[Program], index: int) -> StepTraffic:
    """Return what the ranks of a stage send each other for one micro-batch.

    `tiles` are as for `step_traffic`.
    """
    placement = tiles[0].require_placement()
    branches = placement.grid(index).branches  # each rank of a tile has its own
    ranks = len(placement.ranks[0][index])
    total = StepTraffic()
    for member, program in enumerate(tiles[:branches]):
        total += _sent_by(program, program.require_stages()[index], member, branches)
    if ranks > 1 and opaques(tiles[0].module):  # do they all lack a gradient?
        gives = len(flow(tiles[0], index, with_outputs=False).gives)
        size = torch.float32.itemsize * gives
        total += StepTraffic(sums=ranks, sum_bytes=ranks * size)
    return total


def _sent_by(program: Program, stage: Stage, member: int, branches: int) -> StepTraffic:
    """Return what every `branches`-th rank of a stage sends, from `member` on."""
    placement = program.require_placement()
    ranks = len(placement.ranks[0][stage.index]) // branches
    again = recomputed_nodes(program, stage)
    sizes: list[int] = []
    for node in exchanging(program, stage):
        pairs: Counter[tuple[int, int]] = Counter()  # one message for all their pieces
        for source, dest, size in _moves(exchange_of(node), exchanged(node)):
            if source != dest and source % branches == member:
                pairs[source, dest] += size
        sizes += [*pairs.values()] * traffic_of(node, again=node in again).trips
    sums = [
        ranks * summed.num_bytes
        for node in stage.nodes
        for summed in meta.facts(node).sums
        for _ in range(2 if node in again and not summed.backward else 1)
    ]
    return StepTraffic(len(sizes), sum(sizes), ranks * len(sums), sum(sums))


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
    placement = program.require_placement()
    row = placement.ranks[0]
    sources, dests = row[transfer.source], row[transfer.dest]
    if len(sources) == len(dests) == 1:
        specs = ((value, meta.spec(value)) for value in transfer.values)
        values = (
            Value(v.name, spec.shape, spec.dtype, meta.needs_gradient(v))
            for v, spec in specs
        )
        message = Message(0, sources[0], dests[0], tuple(values))
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


@dataclass(frozen=True, slots=True)
class Traffic:
    """One exchange between tiles: bytes of all, and of the tile that moves most.

    Its `gradient` travels back. In a block that is recomputed it comes `again`, and in
    the backward of a ring.
    """

    num_bytes: int
    most_bytes: int
    gradient: bool
    again: int = 0

    @property
    def trips(self) -> int:
        """How often it travels in a step, forward and backward."""
        return 1 + self.gradient + self.again


def ends(program: Program, transfer: Transfer, value: fx.Node) -> Exchange:
    """Return what the tiles at both ends of a transfer hold and want of a value."""
    placement = program.require_placement()
    for join in joins(program, transfer, value):
        return exchange_of(join)
    row = placement.ranks[0]
    layout = meta.layout(value)
    shape = layout.shape if layout is not None else meta.spec(value).shape
    whole = everything(shape)
    held = layout.boxes if layout is not None else (whole,) * len(row[transfer.source])
    if placement.grid(transfer.source) == placement.grid(transfer.dest):
        return Exchange(0, shape, held, held)
    return Exchange(0, shape, held, (whole,) * len(row[transfer.dest]))


def moved_bytes(program: Program, transfer: Transfer) -> int:
    """Return the bytes of a transfer's values that travel, from all tiles to all."""
    return sum(size for _, _, size in _transfer_moves(program, transfer))


def most_bytes(program: Program, transfer: Transfer) -> int:
    """Return the bytes of the busiest end of a transfer."""
    return _most(_transfer_moves(program, transfer))


def _transfer_moves(program: Program, transfer: Transfer) -> Iterator[_Move]:
    for value in transfer.values:
        yield from _moves(ends(program, transfer, value), value)


def _moves(exchange: Exchange, value: fx.Node) -> Iterator[_Move]:
    size = meta.spec(value).dtype.itemsize
    for piece in exchange.pieces:
        yield piece.source, piece.dest, size * volume(piece.box)


def _most(moves: Iterable[_Move]) -> int:
    """Return the most bytes that anyone sends or receives."""
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    for source, dest, size in moves:
        sent[source] += size
        received[dest] += size
    return max([*sent.values(), *received.values()], default=0)


def exchanges(
    program: Program, stage: Stage, *, with_inputs: bool = True
) -> list[Traffic]:
    """Return what the tiles of a stage send each other in forward.

    What comes from another grid is not among it: that is a transfer.
    """
    again = recomputed_nodes(program, stage)
    all_traffic = [
        traffic_of(node, again=node in again)
        for node in exchanging(program, stage)
        if with_inputs or source_of(node).op != "placeholder"
    ]
    return [traffic for traffic in all_traffic if traffic.num_bytes]


def exchanging(program: Program, stage: Stage) -> Iterator[fx.Node]:
    """Yield the nodes in which the tiles of a stage send each other something."""
    inside = set(stage.nodes)
    for node in stage.nodes:
        if is_exchange(node):
            source = source_of(node)
            if source in inside or _same_grid(program, source, stage):
                yield node


def peak_tile(first: Program) -> int:
    """Return the tile that holds the most elements: of all values, and of others.

    What the first one runs says so of all of them.
    """
    held: Counter[int] = Counter({0: 0})
    for node in first.compute_nodes:
        layout = meta.layout(node)
        for tile, box in enumerate(layout.boxes if layout is not None else ()):
            held[tile] += volume(box)
        keeps_strips = is_exchange(node) and not is_ring(node)
        keeps_strips = keeps_strips and not exchange_of(node).adds
        for piece in exchange_of(node).pieces if keeps_strips else ():
            held[piece.dest] += volume(piece.box) if piece.source != piece.dest else 0
    return max(sorted(held), key=held.__getitem__)


def _same_grid(program: Program, source: fx.Node, stage: Stage) -> bool:
    placement = program.require_placement()
    for other in program.require_stages():
        if source in other.nodes:
            return placement.grid(other.index) == placement.grid(stage.index)
    return source.op == "placeholder"


def traffic_of(node: fx.Node, *, again: bool = False) -> Traffic:
    """Return what the tiles send each other in a node; `again` if it runs twice."""
    value = exchanged(node)
    all_moves = _moves(exchange_of(node), value)
    moves = [move for move in all_moves if move[0] != move[1]]
    total = sum(size for _, _, size in moves)
    learns = meta.needs_gradient(value)
    times = again + (is_ring(node) and learns)
    return Traffic(total, _most(moves), learns, times)


def inner_share(node: fx.Node) -> float:
    """Return the share of an exchange's wanted box that its tile holds itself."""
    view = exchange_of(node).seen_from(grid_of(node).tile)
    inner = sum(volume(piece.box) for piece in view.local)
    return inner / volume(view.wanted)


def waiting(node: fx.Node, link: LinkSpeed) -> tuple[float, float]:
    """Return the seconds that an exchange takes, forward and backward.

    The inner part of a layer that overlaps hides as much as it takes itself; in a ring,
    what is computed of all parts but the last.
    """
    traffic = traffic_of(node)
    seconds = link.seconds(traffic.most_bytes) if traffic.num_bytes else 0.0
    if not (is_ring(node) or is_overlapped(node)):
        return seconds, seconds
    share, facts = inner_share(node), meta.facts(node)
    hidden = 1 - share if is_ring(node) else share
    forward = max(0.0, seconds - hidden * facts.forward_seconds)
    backward = max(0.0, seconds - hidden * facts.backward_seconds)
    return forward, backward + (seconds if is_ring(node) else 0.0)
