"""What would fit, when nothing does: tried, with numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gemsc.base.units import show_bytes, show_enough_bytes
from gemsc.errors import GemscError
from gemsc.options import CompileOptions, typed
from gemsc.search.candidates import Candidate

FACTORS = (2, 4, 8)  # how many times more ranks are tried
SAVINGS = (("recompute",), ("offload",), ("recompute", "offload"))

Assess = Callable[[CompileOptions], Candidate]


def nothing_fits(candidates: Sequence[Candidate], assess: Assess) -> GemscError:
    """Return the error where no candidate fits; it names that with the lowest peak."""
    built = [candidate for candidate in candidates if not candidate.problem]
    if not built:
        return GemscError(
            f"no schedule can be built: {candidates[0].problem}",
            help="try another number of --ranks or --micro-batches",
        )
    lowest = min(built, key=lambda c: c.peak_bytes)
    cap = lowest.options.rank_memory or 0
    return GemscError(
        f"no schedule fits {show_bytes(cap)} on each rank: the lowest peak, of "
        f"{lowest.name}, is {show_enough_bytes(lowest.peak_bytes)}",
        help=what_fits(lowest, assess)
        or "more ranks or smaller micro-batches do not help: raise --device-memory",
    )


def what_fits(candidate: Candidate, assess: Assess) -> str:
    """Return what would make a candidate fit, each way with its peak; "" if nothing."""
    ways = [
        *_more_ranks(candidate, assess),
        *_savings(candidate, assess),
        *_shard_optimizer(candidate, assess),
        *_smaller_micro_batches(candidate, candidate.options.rank_memory or 0),
    ]
    return "; or ".join(ways)


def _more_ranks(lowest: Candidate, assess: Assess) -> list[str]:
    for factor in FACTORS:
        ranks = lowest.options.ranks * factor
        try:
            found = assess(replace(lowest.options, ranks=ranks))
        except GemscError:  # tiles and shards need another number of ranks
            continue
        if found.fits():
            return [
                f"use --ranks {ranks} ({found.name} needs "
                f"{show_bytes(found.peak_bytes)})"
            ]
    return []


def _savings(lowest: Candidate, assess: Assess) -> list[str]:
    """Activations that are computed again, or wait on the host, or both."""
    for names in SAVINGS:
        if all(getattr(lowest.options, name) == ("auto",) for name in names):
            continue
        auto: dict[str, Any] = dict.fromkeys(names, ("auto",))
        found = assess(replace(lowest.options, **auto))
        if found.fits():
            slower = found.seconds / lowest.seconds - 1 if lowest.seconds else 0.0
            return [
                f"add {' '.join(typed(name, 'auto') for name in names)} ({found.name} "
                f"then needs {show_bytes(found.peak_bytes)} and is {slower:.0%} slower)"
            ]
    return []


def _shard_optimizer(lowest: Candidate, assess: Assess) -> list[str]:
    if lowest.options.shard_optimizer:
        return []
    found = assess(replace(lowest.options, shard_optimizer=True))
    if not found.fits():
        return []
    return [f"add --shard-optimizer ({show_bytes(found.peak_bytes)} then)"]


def _smaller_micro_batches(lowest: Candidate, cap: int) -> list[str]:
    """Activations grow with the samples of a micro-batch, the rest does not."""
    resident = lowest.peak_bytes - lowest.activation_bytes
    size = lowest.micro_batch_size
    fitting = int(size * (cap - resident) / max(lowest.activation_bytes, 1))
    if not 0 < fitting < size:
        return []
    return [f"make example_inputs() {fitting} samples instead of {size}"]
