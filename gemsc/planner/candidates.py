"""Which schedules and placements `auto` tries, and how the best one is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gemsc.errors import GemscError
from gemsc.options import CompileOptions
from gemsc.units import show_bytes

__all__ = ["Candidate", "alternatives", "best", "is_open"]

PAIRS = (
    ("basic", "linear"),
    ("gpipe", "linear"),
    ("1f1b", "linear"),
    ("1f1b", "folded"),
    ("interleaved", "looped"),
    ("master", "mirrored"),
    ("bidirectional", "mirrored"),
    ("chimera", "mirrored"),
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule on a placement, with what is predicted for one step.

    `peak_bytes` is that of the fullest rank; `sent_bytes` counts values, gradients and
    sums of gradients of one copy of the model. `problem` says why it cannot be.
    """

    options: CompileOptions
    seconds: float = 0.0
    peak_bytes: int = 0
    bubble: float = 0.0
    sent_bytes: int = 0
    problem: str = ""

    @property
    def name(self) -> str:
        """For example `1f1b, folded`."""
        return f"{self.options.schedule}, {self.options.placement}"

    def fits(self) -> bool:
        """Whether it can be built and stays below the memory cap."""
        cap = self.options.device_memory
        return not self.problem and (cap is None or self.peak_bytes <= cap)


def is_open(options: CompileOptions) -> bool:
    """Whether schedule or placement are left to the compiler."""
    return "auto" in (options.schedule, options.placement)


def alternatives(options: CompileOptions) -> list[CompileOptions]:
    """Return what to try: every pair that agrees with what the user has fixed.

    Raises:
        GemscError: no pair does.
    """
    found = [
        replace(options, schedule=schedule, placement=placement)
        for schedule, placement in PAIRS
        if options.schedule in ("auto", schedule)
        and options.placement in ("auto", "natural", placement)
    ]
    if not found:
        raise GemscError(
            f"nothing to choose for --schedule {options.schedule} "
            f"--placement {options.placement}",
            help="give one of them only",
        )
    return found


def best(candidates: Sequence[Candidate]) -> Candidate:
    """Return the fastest that fits.

    Raises:
        GemscError: none fits; says how much the leanest needs.
    """
    fitting = [candidate for candidate in candidates if candidate.fits()]
    if fitting:
        return min(fitting, key=lambda c: (c.seconds, c.peak_bytes))
    built = [candidate for candidate in candidates if not candidate.problem]
    if not built:
        raise GemscError(
            f"no schedule can be built: {candidates[0].problem}",
            help="try another number of --ranks or --micro-batches",
        )
    leanest = min(built, key=lambda c: c.peak_bytes)
    cap = leanest.options.device_memory or 0
    raise GemscError(
        f"no schedule fits {show_bytes(cap)} on each rank: the leanest, "
        f"{leanest.name}, needs {show_bytes(leanest.peak_bytes)}",
        help="use more --ranks, or smaller micro-batches in example_inputs()",
    )
