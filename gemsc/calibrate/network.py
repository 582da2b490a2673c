"""Measure messages and sums between ranks, for the network part of a hardware file.

python -m gemsc.calibrate.network OUT.json    what `gemsc profile --network` starts
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gemsc.base.process import is_started_by_torch
from gemsc.calibrate.kernels import fit_seconds, rounded
from gemsc.costs.hardware import Allreduce, LinkSpeed, Network
from gemsc.errors import GemscError
from gemsc.runtime.process.failure import install_hooks, stop_all
from gemsc.runtime.transport.choose import start_transport
from gemsc.runtime.transport.transport import Transport

SIZES = (1024, 16 * 2**10, 256 * 2**10, 2**20, 4 * 2**20, 16 * 2**20)
# what launchers of Open MPI, MPICH and Slurm tell a process
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE")
Times = list[tuple[int, float]]


def measured_network(report: dict[str, Any], before: Network) -> Network:
    """Return the network with what was measured; the rest stays as it was.

    `report` is what `gemsc.calibrate.network` measures.
    """
    intra = fit_link(report["intra"]) if report["intra"] else before.intra
    inter = fit_link(report["inter"]) if report["inter"] else before.inter
    reduce_bandwidth = rounded(report["reduce_bandwidth"])
    ranks = int(report["ranks"])
    slowest = inter if report["inter"] else intra
    efficiency = sum_efficiency(report["sums"], ranks, slowest, reduce_bandwidth)
    several = int(report["nodes"]) > 1
    return replace(
        before,
        intra=intra,
        inter=inter,
        ranks_per_node=report["ranks_per_node"] if several else before.ranks_per_node,
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


def is_rank() -> bool:
    """Whether this process was started by mpirun or torchrun, with others."""
    names = ("WORLD_SIZE",) if is_started_by_torch() else SIZE_VARIABLES
    return any(int(os.environ.get(name, "1")) > 1 for name in names)


def main(path: Path | None = None) -> dict[str, object] | None:
    """Measure on this rank; rank 0 returns the result and writes it, if to a path."""
    transport = start_transport()
    install_hooks(transport)
    report = None
    try:
        torch.set_num_threads(1)
        result = measure_network(transport)
        if transport.rank == 0:
            report = result
            if path is not None:
                path.write_text(json.dumps(report))
        transport.close()
    except BaseException as error:
        stop_all(error, transport)
    return report


def measure_network(transport: Transport) -> dict[str, object]:
    """Return times of messages inside a machine and between two, and of sums over all.

    `intra` and `inter` are lists of (bytes, one-way seconds), empty if there are no two
    such ranks; `sums` of (bytes, seconds). `reduce_bandwidth` is bytes per second of
    adding a buffer to another on one rank.

    Raises:
        GemscError: there is only one rank.
    """
    if transport.size < 2:
        raise GemscError(
            "measuring a network needs two ranks", help="use mpirun -n 2, or --ranks 2"
        )
    hosts = transport.all_gather_object(platform.node())
    inside = [rank for rank, host in enumerate(hosts) if host == hosts[0]]
    outside = [rank for rank, host in enumerate(hosts) if host != hosts[0]]
    left, right = torch.ones(2**22), torch.ones(2**22)
    add = partial(left.add_, right)
    return {
        "ranks": transport.size,
        "ranks_per_node": len(inside),
        "nodes": len(set(map(str, hosts))),
        "intra": _messages(transport, inside[1]) if len(inside) > 1 else [],
        "inter": _messages(transport, outside[0]) if outside else [],
        "sums": _sums(transport),
        "reduce_bandwidth": left.nbytes / _median_seconds(add, 12, transport),
    }


def _messages(transport: Transport, peer: int) -> Times:
    """Return half the median times from rank 0 to the peer and back."""

    def there_and_back(buffer: torch.Tensor) -> None:
        if transport.rank == 0:
            transport.wait(transport.send(buffer, peer, 1))
            transport.wait(transport.receive(buffer, peer, 2))
        elif transport.rank == peer:
            transport.wait(transport.receive(buffer, 0, 1))
            transport.wait(transport.send(buffer, 0, 2))

    times = []
    for size in SIZES:
        run = partial(there_and_back, torch.ones(size, dtype=torch.uint8))
        rounds = 100 if size < 2**20 else 20
        times.append((size, _median_seconds(run, rounds, transport) / 2))
    return times


def _sums(transport: Transport) -> Times:
    """Return the median times of float32 sums over all ranks."""
    group = transport.group(tuple(range(transport.size)))

    def add(tensor: torch.Tensor) -> None:
        transport.wait(group.all_reduce(tensor))

    times = []
    for size in SIZES:
        run = partial(add, torch.zeros(size // 4))
        times.append((size, _median_seconds(run, 15, transport)))
    return times


def _median_seconds(
    run: Callable[[], object], rounds: int, transport: Transport
) -> float:
    """Return how long the ranks take that begin together; three rounds do not count."""
    times = []
    for _ in range(rounds):
        transport.barrier()
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times[3:])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
