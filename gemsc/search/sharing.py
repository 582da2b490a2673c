"""How many replicas share a device: `--per-device auto`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gemsc.costs.sharing import SharedDevice
from gemsc.errors import GemscError
from gemsc.options import CompileOptions
from gemsc.search.auto import Stage
from gemsc.search.candidates import Candidate

__all__ = ["choose_sharing", "sharing_note"]

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

    Raises:
        GemscError: not even one fits.
    """

    def order(count: int) -> tuple[float, int]:
        return -round(shared.gain(count, sums=True), 2), count

    for count in sorted(COUNTS, key=order):
        if count > 1 and shared.gain(count, sums=True) < LEAST_GAIN:
            continue
        wanted = replace(options, per_device=count, data=options.data * count)
        try:
            candidates, found = settle(wanted)
            if not candidates:
                stage(found)
        except GemscError:
            if count == 1:
                raise
        else:
            return candidates, found
    raise AssertionError("one replica fits, or that is said")


def sharing_note(shared: SharedDevice, count: int) -> str:
    """Return what is predicted of so many replicas on each device."""
    gains = shared.gain(count), shared.gain(count, sums=True)
    return (
        f"{count} ranks share each device: predicted {gains[0]:+.0%} samples a second "
        f"over one, {gains[1]:+.0%} with their sums in host memory; the predicted step "
        "has a device for each rank"
    )
