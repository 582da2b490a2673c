"""Which edges of a DAG skip something, and what of it is side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

Edges = Iterable[tuple[int, int]]


def skipping(edges: Edges) -> set[tuple[int, int]]:
    """Return the edges beside which a longer path leads to the same end.

    An edge is (source, dest); only those with source < dest count. What a tower sends
    to its join skips nothing, whatever stands between them in the row.
    """
    sources = _sources(edges)
    before = _before(sources)
    return {
        (source, dest)
        for dest, several in sources.items()
        for source in several
        if any(before[other] >> source & 1 for other in several)
    }


def beside(stage: int, num_stages: int, edges: Edges) -> list[int]:
    """Return the stages that neither wait for a stage nor let it wait."""
    before = _before(_sources(edges))
    return [
        other
        for other in range(num_stages)
        if not (before[stage] >> other & 1 or before[other] >> stage & 1)
        and other != stage
    ]


def _sources(edges: Edges) -> dict[int, set[int]]:
    sources: dict[int, set[int]] = {}
    for source, dest in edges:
        if source < dest:
            sources.setdefault(dest, set()).add(source)
    return sources


def _before(sources: dict[int, set[int]]) -> defaultdict[int, int]:
    """Return, as bits, from where each end can be reached."""
    before: defaultdict[int, int] = defaultdict(int)
    for dest in sorted(sources):
        for source in sources[dest]:
            before[dest] |= before[source] | 1 << source
    return before
