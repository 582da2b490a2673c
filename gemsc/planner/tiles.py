"""What travels between the tiles of a grid, and from grid to grid: boxes and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import fx

from gemsc.base.boxes import everything, volume
from gemsc.costs.hardware import LinkSpeed
from gemsc.ir import meta
from gemsc.ir.flow import (
    exchange_of,
    exchanged,
    grid_of,
    is_exchange,
    is_overlapped,
    joins,
    source_of,
)
from gemsc.ir.program import Program, Stage, Transfer
from gemsc.ir.segments import recomputed_nodes
from gemsc.messages.exchange import Exchange


@dataclass(frozen=True, slots=True)
class Traffic:
    """One exchange between tiles: bytes of all, and of the tile that moves most.

    Its `gradient` travels back; in a block that is recomputed it comes `again`.
    """

    num_bytes: int
    most_bytes: int
    gradient: bool
    again: bool = False

    @property
    def trips(self) -> int:
        """How often it travels in a step, forward and backward."""
        return 1 + self.gradient + self.again


def ends(program: Program, transfer: Transfer, value: fx.Node) -> Exchange:
    """Return what the tiles at both ends of a transfer hold and want of a value."""
    placement = program.placement
    assert placement is not None
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
    return sum(size for _, _, size in _moves(program, transfer))


def most_bytes(program: Program, transfer: Transfer) -> int:
    """Return the bytes of the busiest end of a transfer."""
    return _most(_moves(program, transfer))


def _most(moves: Iterable[tuple[int, int, int]]) -> int:
    """Return the most bytes that anyone sends or receives; moves are (from, to, n)."""
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    for source, dest, size in moves:
        sent[source] += size
        received[dest] += size
    return max([*sent.values(), *received.values()], default=0)


def _moves(program: Program, transfer: Transfer) -> Iterator[tuple[int, int, int]]:
    for value in transfer.values:
        size = meta.spec(value).dtype.itemsize
        for piece in ends(program, transfer, value).pieces:
            yield piece.source, piece.dest, size * volume(piece.box)


def exchanges(
    program: Program, stage: Stage, *, with_inputs: bool = True
) -> list[Traffic]:
    """Return what the tiles of a stage send each other in forward.

    What comes from another grid is not among it: that is a transfer.
    """
    again = recomputed_nodes(program, stage)
    found = [
        traffic_of(node, again=node in again)
        for node in exchanging(program, stage)
        if with_inputs or source_of(node).op != "placeholder"
    ]
    return [traffic for traffic in found if traffic.num_bytes]


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
        for piece in exchange_of(node).pieces if _keeps_strips(node) else ():
            held[piece.dest] += volume(piece.box) if piece.source != piece.dest else 0
    return max(sorted(held), key=held.__getitem__)


def _keeps_strips(node: fx.Node) -> bool:
    """Whether tiles keep what they received; addends are added up."""
    return is_exchange(node) and not exchange_of(node).adds


def _same_grid(program: Program, source: fx.Node, stage: Stage) -> bool:
    placement = program.placement
    assert placement is not None
    for other in program.require_stages():
        if source in other.nodes:
            return placement.grid(other.index) == placement.grid(stage.index)
    return source.op == "placeholder"


def traffic_of(node: fx.Node, *, again: bool = False) -> Traffic:
    """Return what the tiles send each other in a node; `again` if it runs twice."""
    exchange = exchange_of(node)
    value = exchanged(node)
    size = meta.spec(value).dtype.itemsize
    moves = [
        (piece.source, piece.dest, size * volume(piece.box))
        for piece in exchange.pieces
        if piece.source != piece.dest
    ]
    total = sum(count for _, _, count in moves)
    return Traffic(total, _most(moves), meta.needs_gradient(value), again)


def inner_share(node: fx.Node) -> float:
    """Return the share of an exchange's wanted box that its tile holds itself."""
    view = exchange_of(node).seen_from(grid_of(node).tile)
    own = sum(volume(piece.box) for piece in view.own)
    return own / volume(view.wanted)


def waiting(node: fx.Node, link: LinkSpeed) -> tuple[float, float]:
    """Return the seconds that an exchange takes, forward and backward.

    The inner part of a layer that overlaps hides as much as it takes itself.
    """
    traffic = traffic_of(node)
    seconds = link.seconds(traffic.most_bytes) if traffic.num_bytes else 0.0
    if not is_overlapped(node):
        return seconds, seconds
    share, facts = inner_share(node), meta.facts(node)
    return (
        max(0.0, seconds - share * facts.forward_seconds),
        max(0.0, seconds - share * facts.backward_seconds),
    )
