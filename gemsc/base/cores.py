"""The cores of a machine, and which of them each rank there uses.

Two sockets of four cores, three ranks, `--bind numa`:

    cores  0 1 2 3 | 4 5 6 7
    ranks  0 and 1 | 2           0 and 1 have two threads each, 2 has four

A core is what the system counts as one: with two threads in a core, each of them.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from math import floor
from pathlib import Path

from gemsc.errors import GemscError

Cores = frozenset[int]

SYSTEM = Path("/sys/devices/system")
BINDINGS = ("auto", "numa", "core", "none")


@dataclass(frozen=True)
class Topology:
    """Which cores have one memory (a NUMA domain), and which are threads of one core.

    Both in order; a core may be in none.
    """

    domains: tuple[Cores, ...] = ()
    siblings: tuple[Cores, ...] = ()

    @classmethod
    def read(cls, system: Path = SYSTEM) -> Topology:
        """Return what Linux tells in this folder, as far as it does."""
        domains = _lists(system.glob("node/node[0-9]*/cpulist"))
        siblings = _lists(system.glob("cpu/cpu[0-9]*/topology/thread_siblings_list"))
        return cls(domains, siblings)

    def domains_in(self, pool: Cores) -> list[Cores]:
        """Return the cores of a pool by domain; those in none are one more."""
        return _within(self.domains, pool)

    def units_in(self, pool: Cores) -> list[Cores]:
        """Return the threads of each core of a pool, one domain after the other."""
        units = []
        for domain in self.domains_in(pool):
            inside = [threads & domain for threads in self.siblings if threads & domain]
            alone = domain.difference(*inside)
            units += sorted((*inside, *(frozenset({core}) for core in alone)), key=min)
        return units


def parse_cores(text: str) -> Cores:
    """Read `0-3,8`, as Linux writes it."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def bind(allowed: Sequence[Cores], topology: Topology, how: str) -> list[Cores]:
    """Return the cores for each rank of a machine, which are `allowed` these now.

    "numa": those of a NUMA domain, or of several where there are fewer ranks; "core":
    a part of all cores, shared with no other rank; "none": those that it has. "auto" is
    "numa" where the launcher has bound no rank, and no rank would have fewer cores than
    an equal share of all.

    Raises:
        GemscError: there are fewer cores than ranks, for "core".
    """
    pool = frozenset(chain.from_iterable(allowed))
    domains = topology.domains_in(pool)
    if how == "auto":
        is_bound = len({*allowed}) > 1
        is_even = len({len(domain) for domain in domains}) == 1
        more, fewer = sorted((len(allowed), len(domains)), reverse=True)
        how = "numa" if not is_bound and is_even and more % fewer == 0 else "none"
    if how == "none":
        return [*allowed]
    number, units = len(allowed), domains
    if how == "core":
        check_binding(how, number, len(pool))
        units = topology.units_in(pool)
        if len(units) < number:
            units = [frozenset({core}) for unit in units for core in sorted(unit)]
    parts = []
    for rank in range(number):
        first, last = (place * len(units) // number for place in (rank, rank + 1))
        parts.append(frozenset().union(*units[first : max(first + 1, last)]))
    return parts


def check_binding(how: str, num_ranks: int, num_cores: int) -> None:
    """Make sure that each rank of a machine can have a core of its own, for "core".

    Raises:
        GemscError: it cannot.
    """
    if how == "core" and num_ranks > num_cores:
        cores = f"{num_cores} core{'s' * (num_cores > 1)}"
        raise GemscError(
            f"--bind core: {num_ranks} ranks on this machine, but only {cores}",
            help="leave out --bind: the ranks then share the cores",
        )


def share_of(rank: int, cores: Sequence[Cores]) -> int:
    """Return how many cores one of the ranks of a machine has, in shares; 0 if below 1.

    A core that three ranks use is a third for each.
    """
    users = Counter(chain.from_iterable(cores))
    return floor(sum(Fraction(1, users[core]) for core in cores[rank]))


def _lists(files: Iterable[Path]) -> tuple[Cores, ...]:
    """Return the lists of cores in files, each once."""
    lists = set()
    for file in files:
        with contextlib.suppress(OSError, ValueError):
            lists.add(parse_cores(file.read_text()))
    return tuple(sorted(filter(None, lists), key=min))  # memory may have no cores


def _within(groups: Iterable[Cores], pool: Cores) -> list[Cores]:
    inside = [group & pool for group in groups if group & pool]
    outside = pool.difference(*inside)
    return [*inside, outside] if outside else inside
