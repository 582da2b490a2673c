"""What one kernel has to do, as numbers that a machine turns into seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel: what kind, in which dtype, and how much of everything.

    Features, all 0 or more, all growing with the size of the tensors:

    calls: 1
    flops: operations, for kinds that multiply
    read, written: bytes of the arguments, of the results
    far: bytes moved beyond those that a core's own cache holds
    fresh: bytes of results that are so large that their memory is new each time
    strided: bytes of arguments whose neighbours in memory are no neighbours in rows

    Each kind has its own: see gemsc.costs.operators.
    """

    kind: str
    dtype: str
    features: dict[str, float]
