"""Every wait of the device's code is needed: without it, a check on a device fails.

pytest tests/runtime/test_cuda_mutants.py --nightly    one test each; by day a few

As a script, with PYTHONPATH=tests/support, it prints each mutant, and what fails.
"""

from __future__ import annotations

import sys

import pytest
from device_checks import CHECKS, ends
from mutants import Mutant, mutants_of

from gemsc.runtime.memory import offload
from gemsc.runtime.transport import device_transport, streams

# test_offload.py has what else there is to be offloaded
MOVES = ("PinnedStore", "_Moved", "Part.arrive", "Run.prefetch")
ONLY_SAVES_TIME = (
    "DeviceTransport.wait: self._deferred is True",
    "_OffloadedPart.arrive: self._arrived is False",
    "DeviceTransport._has_arrived: without self.progress()",  # the device goes on alone
)
NEVER_ENDS = "CudaStreams._take: self._coming.popleft()[1] is not event is True"
MUTANTS = [
    *mutants_of(streams, leave=("Streams", "streams_for")),
    *mutants_of(device_transport),
    *(m for m in mutants_of(offload) if any(text in m.name for text in MOVES)),
]
MUTANTS = [m for m in MUTANTS if not m.name.endswith((*ONLY_SAVES_TIME, NEVER_ENDS))]
QUICK = 11  # checks: the others take long, and run in test_cuda_streams.py at night
BY_DAY = ("CudaStreams._bring: without", "CudaStreams.to_host: without")


def what_fails(mutant: Mutant) -> str:
    """Return the first check that a mutant fails, and how; "" if it passes all."""
    with ends():
        for name, check in CHECKS.items():
            try:
                with mutant:
                    check()
            except Exception as error:
                return f"{name}: {type(error).__name__}"
    return ""


@pytest.mark.parametrize("name", [*CHECKS][:QUICK])
def test_without_a_mutant_a_check_passes(name: str) -> None:
    """One that fails anyway would find every mutant."""
    with ends():
        CHECKS[name]()


def cases() -> list[object]:
    return [
        pytest.param(
            mutant,
            id=mutant.name,
            marks=[] if any(t in mutant.name for t in BY_DAY) else pytest.mark.nightly,
        )
        for mutant in MUTANTS
    ]


@pytest.mark.by_day(2)
@pytest.mark.parametrize("mutant", cases())
def test_without_it_a_check_fails(mutant: Mutant) -> None:
    assert what_fails(mutant)


if __name__ == "__main__":
    for mutant in MUTANTS:
        if all(word in mutant.name for word in sys.argv[1:]):
            failing = what_fails(mutant) or "NOTHING FAILS"
            sys.stdout.write(f"{mutant.name} -> {failing}\n")
            sys.stdout.flush()
