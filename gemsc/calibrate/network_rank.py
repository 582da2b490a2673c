"""Measure messages and sums between ranks; runs on every rank under mpirun.

python -m gemsc.calibrate.network_rank OUT.json    what `gemsc profile --network` starts
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import torch

from gemsc.errors import GemscError
from gemsc.runtime.process.failure import install_hooks, stop_all
from gemsc.runtime.process.status import Status
from gemsc.runtime.transport.mpi import MpiTransport
from gemsc.runtime.transport.transport import Transport

SIZES = (1024, 16 * 2**10, 256 * 2**10, 2**20, 4 * 2**20, 16 * 2**20)
# what launchers of Open MPI, MPICH and Slurm tell a process
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE")
Times = list[tuple[int, float]]


def is_rank() -> bool:
    """Whether this process was started by mpirun, with others."""
    return any(int(os.environ.get(name, "1")) > 1 for name in SIZE_VARIABLES)


def main(path: Path | None = None) -> dict[str, object] | None:
    """Measure on this rank; rank 0 returns the result and writes it, if to a path."""
    transport = MpiTransport()
    install_hooks(transport)
    found = None
    try:
        torch.set_num_threads(1)
        result = measure_network(transport)
        if transport.rank == 0:
            found = result
            if path is not None:
                path.write_text(json.dumps(found))
        transport.close()
    except BaseException as error:
        stop_all(error, transport, Status.current)
    return found


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
            "a network needs two ranks", help="use mpirun -n 2, or --ranks 2"
        )
    hosts = transport.all_gather_object(platform.node())
    inside = [rank for rank, host in enumerate(hosts) if host == hosts[0]]
    outside = [rank for rank, host in enumerate(hosts) if host != hosts[0]]
    return {
        "ranks": transport.size,
        "ranks_per_node": len(inside),
        "nodes": len(set(map(str, hosts))),
        "intra": _messages(transport, inside[1]) if len(inside) > 1 else [],
        "inter": _messages(transport, outside[0]) if outside else [],
        "sums": _sums(transport),
        "reduce_bandwidth": _reduce_bandwidth(),
    }


def _messages(transport: Transport, peer: int) -> Times:
    """Return half the median times from rank 0 to the peer and back."""
    return [(size, _one_way(transport, peer, size)) for size in SIZES]


def _one_way(transport: Transport, peer: int, size: int) -> float:
    buffer = torch.ones(size, dtype=torch.uint8)
    times = []
    for _ in range(100 if size < 2**20 else 20):
        transport.barrier()
        started = time.perf_counter()
        if transport.rank == 0:
            transport.wait(transport.send(buffer, peer, 1))
            transport.wait(transport.receive(buffer, peer, 2))
        elif transport.rank == peer:
            transport.wait(transport.receive(buffer, 0, 1))
            transport.wait(transport.send(buffer, 0, 2))
        times.append((time.perf_counter() - started) / 2)
    return statistics.median(times[3:])


def _sums(transport: Transport) -> Times:
    """Return the median times of float32 sums over all ranks."""
    group = transport.group(tuple(range(transport.size)))
    found = []
    for size in SIZES:
        tensor = torch.zeros(size // 4)
        times = []
        for _ in range(15):
            transport.barrier()
            started = time.perf_counter()
            transport.wait(group.all_reduce(tensor))
            times.append(time.perf_counter() - started)
        found.append((size, statistics.median(times[3:])))
    return found


def _reduce_bandwidth() -> float:
    left, right = torch.ones(2**22), torch.ones(2**22)
    times = []
    for _ in range(9):
        started = time.perf_counter()
        left.add_(right)
        times.append(time.perf_counter() - started)
    return left.nbytes / statistics.median(times)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
