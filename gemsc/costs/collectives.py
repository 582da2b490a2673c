"""How long sums over ranks take: rounds of messages over nodes that share their links.

An algorithm is written down as its rounds: who sends which share of the buffer to whom.
Each round takes as long as its slowest message. On links that are all alike this gives
the published formulas; p ranks, n bytes, latency a, seconds per byte b, seconds per
byte added g:

    ring              2 (p - 1) a      + 2 (p - 1)/p n b  + (p - 1)/p n g
    tree              2 ceil(lg p) (a + n b)              + ceil(lg p) n g
    halving-doubling  2 lg p a         + 2 (p - 1)/p n b  + (p - 1)/p n g
    exchange          (p - 1) a        + (p - 1)/p n b    + (p - 1)/p n g

The last one gives each rank the sum of a part, n/p bytes.

Sources: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of
workstations, 2009 (ring); Thakur, Rabenseifner and Gropp, Optimization of collective
communication operations in MPICH, 2005 (binomial tree: reduce, then broadcast;
Rabenseifner's vector halving with distance doubling, and back).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

from gemsc.costs.hardware import Interface, Network

BUCKET_BYTES = 8 * 2**20  # the most that the runtime sums at once
MOST_EXCHANGES = 16  # rounds of an exchange that are looked at


@dataclass(frozen=True, slots=True)
class Round:
    """Messages of one moment: each pair is (sender, receiver) among a group's members.

    Each carries `share` of the buffer; what arrives is added up if `adds`. The same
    happens `repeats` times.
    """

    pairs: tuple[tuple[int, int], ...]
    share: float
    adds: bool
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class Sum:
    """How long one group's sum takes, and by which algorithm.

    Where `updaters` members share the update that follows, each gets the sum for its
    part only, and it takes `gather` seconds to bring together what they updated.
    """

    seconds: float
    algorithm: str
    updaters: int = 1
    gather: float = 0.0


@cache
def ring(size: int) -> tuple[Round, ...]:
    """Pass parts around a ring: once to add them up, once to hand them out."""
    pairs = tuple((member, (member + 1) % size) for member in range(size))
    return tuple(Round(pairs, 1 / size, adds, size - 1) for adds in (True, False))


@cache
def tree(size: int) -> tuple[Round, ...]:
    """Add up along a binomial tree, then send the sum back down."""
    up = []
    step = 1
    while step < size:
        senders = range(step, size, 2 * step)
        up.append(Round(tuple((s, s - step) for s in senders), 1.0, adds=True))
        step *= 2
    down = [
        Round(tuple((parent, child) for child, parent in turn.pairs), 1.0, adds=False)
        for turn in reversed(up)
    ]
    return (*up, *down)


@cache
def halving_doubling(size: int) -> tuple[Round, ...]:
    """Swap halves, quarters, ... with ever more distant members, then back.

    Where the size is no power of two, the members beyond the largest one hand their
    buffers to others first and get the sum at the end.
    """
    power = 1 << (size.bit_length() - 1)
    extra = tuple((member, member - power) for member in range(power, size))
    inner = []
    step, share = 1, 0.5
    while step < power:
        pairs = tuple((member, member ^ step) for member in range(power))
        inner.append(Round(pairs, share, adds=True))
        step, share = 2 * step, share / 2
    back = [Round(turn.pairs, turn.share, adds=False) for turn in reversed(inner)]
    if not extra:
        return (*inner, *back)
    returned = tuple((parent, member) for member, parent in extra)
    first, last = Round(extra, 1.0, adds=True), Round(returned, 1.0, adds=False)
    return (first, *inner, *back, last)


@cache
def exchange(size: int, *, adds: bool) -> tuple[Round, ...]:
    """Let each member send each other one its part: the next, the one after it, ...

    Of many rounds a few stand for those about them.
    """
    step = -(-(size - 1) // MOST_EXCHANGES)
    rounds = []
    for first in range(1, size, step):
        count = min(step, size - first)
        distance = first + count // 2
        pairs = tuple((member, (member + distance) % size) for member in range(size))
        rounds.append(Round(pairs, 1 / size, adds, count))
    return tuple(rounds)


ROUNDS = {"ring": ring, "tree": tree, "halving-doubling": halving_doubling}


def allreduce(
    network: Network, groups: Sequence[Sequence[int]], num_bytes: Sequence[int]
) -> list[Sum]:
    """Return what the sums of some groups take that all go on at once.

    `groups` holds the ranks of each group, which fill the nodes in order; `num_bytes`
    what each sums up. Buffers travel in buckets, one after the other. A network
    interface is shared by all messages that pass it in one round of any group.
    """
    wanted = network.allreduce.algorithm
    names = list(ROUNDS) if wanted == "auto" else [wanted]
    ways = [
        [Sum(time, name) for time in _seconds(network, groups, ROUNDS[name], num_bytes)]
        for name in names
    ]
    return [min(sums, key=lambda s: s.seconds) for sums in zip(*ways, strict=True)]


def reduce_scatter(
    network: Network, groups: Sequence[Sequence[int]], num_bytes: Sequence[int]
) -> list[Sum]:
    """Return what sums take of which each member gets a part, and what follows them.

    See `allreduce`. Members send each other their terms and add them up; after the
    update they send each other what they have updated.
    """
    scatter, gather = (
        _seconds(network, groups, partial(exchange, adds=adds), num_bytes)
        for adds in (True, False)
    )
    return [
        Sum(seconds, "exchange", len(group), gathering)
        for group, seconds, gathering in zip(groups, scatter, gather, strict=True)
    ]


def sum_seconds(network: Network, ranks: Sequence[int], num_bytes: int) -> float:
    """Return what a sum takes in the midst of a stage, of a few numbers or of many.

    A few numbers take ceil(lg p) messages with all of them (recursive doubling).
    """
    rounds = (len(ranks) - 1).bit_length()
    sending = network.link(ranks[0], ranks[-1]).seconds(num_bytes)
    doubling = rounds * (sending + num_bytes / network.allreduce.reduce_bandwidth)
    return min(doubling, allreduce(network, [ranks], [num_bytes])[0].seconds)


def _seconds(
    network: Network,
    groups: Sequence[Sequence[int]],
    rounds_of: Callable[[int], tuple[Round, ...]],
    num_bytes: Sequence[int],
) -> list[float]:
    """Return the seconds of each group's sum by one algorithm, if all go on at once."""
    rounds = [rounds_of(len(group)) for group in groups]
    crowds: list[Counter[Interface]] = [
        Counter() for _ in range(max(map(len, rounds), default=0))
    ]  # for each round, the messages that pass each network interface
    for ranks, of_group in zip(groups, rounds, strict=True):
        for crowd, of_round in zip(crowds, of_group, strict=False):
            for sender, receiver in of_round.pairs:
                crowd.update(network.interfaces(ranks[sender], ranks[receiver]))
    return [
        _in_buckets(network, group, of_group, crowds, size)
        for group, of_group, size in zip(groups, rounds, num_bytes, strict=True)
    ]


def _in_buckets(
    network: Network,
    ranks: Sequence[int],
    rounds: tuple[Round, ...],
    crowds: list[Counter[Interface]],
    num_bytes: int,
) -> float:
    """Return the seconds of one group's sum."""
    whole, remainder = divmod(num_bytes, BUCKET_BYTES)
    total = 0.0
    for count, size in ((whole, BUCKET_BYTES), (1, remainder)):
        if count and size:
            seconds = sum(
                of_round.repeats * _round_seconds(network, ranks, of_round, crowd, size)
                for of_round, crowd in zip(rounds, crowds, strict=False)
            )
            total += count * seconds
    return total


def _round_seconds(
    network: Network,
    ranks: Sequence[int],
    of_round: Round,
    crowd: Counter[Interface],
    num_bytes: int,
) -> float:
    """Return the seconds of one round: those of its slowest message."""
    size = of_round.share * num_bytes
    slowest = 0.0
    for sender, receiver in of_round.pairs:
        source, dest = ranks[sender], ranks[receiver]
        link = network.link(source, dest)
        interfaces = network.interfaces(source, dest)
        sharing = max((crowd[interface] for interface in interfaces), default=1)
        bandwidth = network.allreduce.efficiency * link.bandwidth / sharing
        slowest = max(slowest, link.latency + size / bandwidth)
    if of_round.adds:
        slowest += size / network.allreduce.reduce_bandwidth
    return slowest
