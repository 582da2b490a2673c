"""From measured messages and sums to the network part of a hardware file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gemsc.calibrate.fit import fit_seconds
from gemsc.calibrate.kernels import rounded
from gemsc.costs.hardware import Allreduce, LinkSpeed, Network

Times = Sequence[tuple[int, float]]


def measured_network(found: dict[str, Any], before: Network) -> Network:
    """Return the network with what was measured; the rest stays as it was.

    `found` is what `gemsc.calibrate.network_rank` measures.
    """
    intra = fit_link(found["intra"]) if found["intra"] else before.intra
    inter = fit_link(found["inter"]) if found["inter"] else before.inter
    reduce_bandwidth = rounded(found["reduce_bandwidth"])
    ranks = int(found["ranks"])
    slowest = inter if found["inter"] else intra
    efficiency = sum_efficiency(found["sums"], ranks, slowest, reduce_bandwidth)
    several = int(found["nodes"]) > 1
    return replace(
        before,
        intra=intra,
        inter=inter,
        ranks_per_node=found["ranks_per_node"] if several else before.ranks_per_node,
        allreduce=Allreduce(
            algorithm=before.allreduce.algorithm,
            reduce_bandwidth=reduce_bandwidth,
            efficiency=efficiency,
        ),
    )


def fit_link(times: Times) -> LinkSpeed:
    """Return latency and bandwidth: seconds = latency + bytes / bandwidth."""
    rows = [{"messages": 1.0, "bytes": float(size)} for size, _ in times]
    fitted = fit_seconds(rows, [seconds for _, seconds in times])
    fastest = max(size / seconds for size, seconds in times)
    per_byte = fitted.get("bytes", 1.0 / fastest)
    latency = fitted.get("messages", 0.0)
    return LinkSpeed(latency=latency, bandwidth=rounded(1.0 / per_byte))


def sum_efficiency(
    times: Times, ranks: int, link: LinkSpeed, reduce_bandwidth: float
) -> float:
    """Return the share of the link's bandwidth that the largest sum reached.

    A sum of n bytes over p ranks sends 2 (p - 1) / p x n bytes from each rank and adds
    half of that (Rabenseifner 2004); the rest of the time is what the share explains.
    """
    size, seconds = max(times)
    part = size * (ranks - 1) / ranks
    left = seconds - part / reduce_bandwidth
    ideal = 2.0 * part / link.bandwidth
    return rounded(max(0.05, min(1.0, ideal / left))) if left > 0 else 1.0
