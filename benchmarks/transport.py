"""Measure the MPI transport of this machine: latency, cost of waiting, overlap.

python benchmarks/transport.py [num_ranks]      starts itself under mpirun
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from gemsc.launch.launch import launch
from gemsc.runtime.transport.mpi import MpiTransport
from gemsc.runtime.transport.waiting import Request

SIZES = (4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20)
Wait = Callable[..., None]


def spin(*requests: Request) -> None:
    """Wait as a blocking MPI call does: poll without pause."""
    for request in requests:
        while not request.done():
            pass


def one_way_seconds(transport: MpiTransport, size: int, wait: Wait) -> float:
    """Return half the median time to rank 1 and back; ranks above 1 look on."""
    buffer = torch.ones(size, dtype=torch.uint8)
    times = []
    for _ in range(300 if size < 2**20 else 60):
        transport.barrier()
        started = time.perf_counter()
        if transport.rank == 0:
            wait(transport.send(buffer, 1, 1))
            wait(transport.receive(buffer, 1, 2))
        elif transport.rank == 1:
            wait(transport.receive(buffer, 0, 1))
            wait(transport.send(buffer, 0, 2))
        times.append((time.perf_counter() - started) / 2)
    return statistics.median(times[10:])


def sum_seconds(transport: MpiTransport, size: int) -> float:
    """Return the median time of a float32 sum over all ranks."""
    group = transport.group(tuple(range(transport.size)))
    tensor = torch.zeros(size // 4)
    times = []
    for _ in range(30):
        transport.barrier()
        started = time.perf_counter()
        transport.wait(group.all_reduce(tensor))
        times.append(time.perf_counter() - started)
    return statistics.median(times[5:])


def share_of_a_core(transport: MpiTransport, wait: Wait) -> float:
    """Return the CPU time of rank 0 in a second of waiting for rank 1."""
    buffer = torch.ones(1)
    transport.barrier()
    if transport.rank == 1:
        time.sleep(1)
        spin(transport.send(buffer, 0, 1))
    if transport.rank != 0:
        return 0.0
    cpu, wall = time.process_time(), time.perf_counter()
    wait(transport.receive(buffer, 1, 1))
    return (time.process_time() - cpu) / (time.perf_counter() - wall)


def late_by(transport: MpiTransport, after: float) -> float:
    """Return how long after its arrival rank 0 sees a small message it waits for."""
    buffer = torch.zeros(1, dtype=torch.float64)
    times = []
    for _ in range(20):
        transport.barrier()
        if transport.rank == 1:
            time.sleep(after)
            buffer[0] = time.monotonic()  # one clock for all ranks of a machine
            spin(transport.send(buffer, 0, 1))
        elif transport.rank == 0:
            transport.wait(transport.receive(buffer, 1, 1))
            times.append(time.monotonic() - buffer.item())
    return statistics.median(times or [0.0])


def left_after_computing(
    transport: MpiTransport, turns: int, matrix: Tensor
) -> tuple[float, float]:
    """Return the seconds rank 0 computes, and then waits for 16 MiB posted before."""
    buffer = torch.ones(16 * 2**20, dtype=torch.uint8)
    computed, waited = [], []
    for _ in range(20):
        transport.barrier()
        if transport.rank == 1:
            transport.wait(transport.send(buffer, 0, 1))
        elif transport.rank == 0:
            request = transport.receive(buffer, 1, 1)
            started = time.perf_counter()
            for number in range(20):
                torch.mm(matrix, matrix)
                if turns and number % (20 // turns) == 0:
                    transport.progress()
            middle = time.perf_counter()
            transport.wait(request)
            computed.append(middle - started)
            waited.append(time.perf_counter() - middle)
    return statistics.median(computed or [0.0]), statistics.median(waited or [0.0])


def main() -> None:
    """Measure on every rank; rank 0 prints."""
    torch.set_num_threads(1)
    transport = MpiTransport()
    lines = [f"{'size':>12}{'polite wait':>14}{'spinning':>14}{'sum':>14}   (us)"]
    for size in SIZES:
        figures = [
            one_way_seconds(transport, size, transport.wait),
            one_way_seconds(transport, size, spin),
            sum_seconds(transport, size),
        ]
        text = "".join(f"{1e6 * figure:14.0f}" for figure in figures)
        lines.append(f"{size // 1024:>8} KiB{text}")
    for name, wait in (("polite", transport.wait), ("spinning", spin)):
        share = share_of_a_core(transport, wait)
        lines.append(f"{name} wait of 1 s: {100 * share:.1f} % of a core")
    for after in (0.001, 0.005, 0.05):
        late = late_by(transport, after)
        lines.append(
            f"message after {1e3 * after:.0f} ms: seen {1e6 * late:.0f} us late"
        )
    started = time.perf_counter()
    for _ in range(10_000):
        transport.progress()
    turn = (time.perf_counter() - started) / 10_000
    lines.append(f"an idle turn: {1e6 * turn:.2f} us")
    matrix = torch.randn(512, 512)
    for turns in (0, 1, 2, 20):
        computed, waited = left_after_computing(transport, turns, matrix)
        lines.append(
            f"16 MiB posted, 20 matrix products, {turns:2} turns between: "
            f"{1e3 * computed:.1f} ms computing, then {1e3 * waited:.2f} ms waiting"
        )
    if transport.rank == 0:
        print("\n".join(lines), flush=True)
    transport.close()


if __name__ == "__main__":
    if "--rank" in sys.argv:
        main()
    else:
        num_ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
        sys.exit(launch(num_ranks, [sys.executable, __file__, "--rank"], timeout=300))
