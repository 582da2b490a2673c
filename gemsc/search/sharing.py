"""How many replicas share a device: `--per-device auto`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gemsc.costs.sharing import SharedDevice
from gemsc.errors import GemscError
from gemsc.options import CompileOptions
from gemsc.search.auto import Stage
from gemsc.search.candidates import Candidate

COUNTS = (1, 2, 4, 8)
LEAST_GAIN = 0.05  # what is less is not worth a daemon

Settled = tuple[tuple[Candidate, ...], CompileOptions]


def choose_sharing(
    options: CompileOptions,
    shared: SharedDevice,
    settle: Callable[[CompileOptions], Settled],
    stage: Stage,
) -> Settled:
    """Settle the rest for the number of replicas that gains most, of those that fit.

    It divides `options.data`. Where gains were measured, others do not count.

    Raises:
        GemscError: not even one fits.
    """
    known = shared.known_gains(COUNTS)
    gains = {n: gain for n, gain in known.items() if options.data % n == 0}

    def order(count: int) -> tuple[float, int]:
        return -round(gains[count], 2), count

    for count in sorted(gains, key=order):
        if count > 1 and gains[count] < LEAST_GAIN:
            continue
        try:
            candidates, settled = settle(replace(options, per_device=count))
            if not candidates:
                stage(settled)
        except GemscError:
            if count == 1:
                raise
        else:
            return candidates, settled
    raise AssertionError("one replica fits, or that is said")


def sharing_note(shared: SharedDevice, count: int) -> str:
    """Return what was measured and is predicted of so many replicas on each device."""
    gains = shared.gain(count), shared.gain(count, sums=True)
    gain = shared.measured.get(count)
    measured = "" if gain is None else f"measured {gain:+z.0%}, "
    return (
        f"{count} ranks share each device: {measured}predicted {gains[0]:+z.0%} "
        f"samples a second over one, {gains[1]:+z.0%} with their sums in host memory; "
        "the predicted step has a device for each rank"
    )
