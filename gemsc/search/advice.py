"""What would fit, when nothing does: with numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from gemsc.base.units import show_bytes, show_enough_bytes
from gemsc.errors import GemscError
from gemsc.options import CompileOptions
from gemsc.search.candidates import Candidate

__all__ = ["nothing_fits"]

FACTORS = (2, 4, 8)  # how many times more ranks are tried

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
    ways = [
        *_more_ranks(lowest, assess),
        *_recompute(lowest, assess),
        *_smaller_micro_batches(lowest, cap),
    ]
    return GemscError(
        f"no schedule fits {show_bytes(cap)} on each rank: the lowest peak, of "
        f"{lowest.name}, is {show_enough_bytes(lowest.peak_bytes)}",
        help="; or ".join(ways)
        or "more ranks or smaller micro-batches do not help: raise --device-memory",
    )


def _more_ranks(lowest: Candidate, assess: Assess) -> list[str]:
    for factor in FACTORS:
        ranks = lowest.options.ranks * factor
        try:
            found = assess(replace(lowest.options, ranks=ranks))
        except GemscError:  # tiles and shards need another number of ranks
            continue
        if found.fits():
            return [
                f"use --ranks {found.options.all_ranks} ({found.name} needs "
                f"{show_bytes(found.peak_bytes)})"
            ]
    return []


def _recompute(lowest: Candidate, assess: Assess) -> list[str]:
    if lowest.options.recompute:
        return []
    found = assess(replace(lowest.options, recompute=("auto",)))
    if not found.fits():
        return []
    slower = found.seconds / lowest.seconds - 1 if lowest.seconds else 0.0
    return [
        f"add --recompute auto ({found.name} then needs "
        f"{show_bytes(found.peak_bytes)} and is {slower:.0%} slower)"
    ]


def _smaller_micro_batches(lowest: Candidate, cap: int) -> list[str]:
    """Activations grow with the samples of a micro-batch, the rest does not."""
    resident = lowest.peak_bytes - lowest.activation_bytes
    size = lowest.micro_batch_size
    fitting = int(size * (cap - resident) / max(lowest.activation_bytes, 1))
    if not 0 < fitting < size:
        return []
    return [f"make example_inputs() {fitting} samples instead of {size}"]
