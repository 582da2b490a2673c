"""What it gives that sums of gradients start inside the last backward: `--data 2`.

python benchmarks/early_sums.py [--rounds 15]      starts itself under mpirun

Steps with it and without it take turns in one job. "memory" is the transport of this
machine, whose copies and additions take the ranks' own cores. In the other lines the
sums also take a share of such a step on a link between machines, no core at work.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gemsc
from gemsc.launch.launch import launch
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.transport.mpi import MpiTransport
from gemsc.runtime.transport.waiting import Request
from gemsc.runtime.worker import updates

WIDTH, DEPTH, BATCH = 1024, 12, 128  # 4 MiB of gradients for each layer
TOTAL = 4 * DEPTH * WIDTH * (WIDTH + 1)  # bytes
SHARES = (0.0, 0.25, 0.5, 1.0)
EARLY = updates.leaving_early


@dataclass
class Slow:
    """A sum that is done once its bytes have gone over a link."""

    request: Request
    due: float

    def done(self) -> bool:
        """Give the library a turn."""
        return self.request.done() and time.perf_counter() >= self.due


class Link:
    """A group whose sums go over a link of so many bytes a second, one by one."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.speed = self.free = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def all_reduce(self, tensor: Tensor) -> Request:
        """Start a sum; with two ranks, as many bytes go each way as it has."""
        request = self.group.all_reduce(tensor)
        if not self.speed:
            return request
        self.free = max(self.free, time.perf_counter()) + tensor.nbytes / self.speed
        return Slow(request, self.free)


def compiled(folder: Path) -> None:
    """Write the program: a row of layers, all on each rank."""
    layers = [m for _ in range(DEPTH) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    x = torch.randn(BATCH, WIDTH)
    program = gemsc.compile(
        nn.Sequential(*layers),
        (x,),
        loss=nn.MSELoss(),
        example_target=x,
        ranks=2,
        data=2,
        micro_batches=1,
    )
    program.write(folder)


def measured(folder: Path, rounds: int) -> None:
    """Print one line for each link, on rank 0."""
    transport = MpiTransport()
    trainer = Trainer(
        folder, transport, optimizer=lambda named: torch.optim.SGD(named, lr=1e-3)
    )
    of_updates = trainer.worker.updates
    (key,) = of_updates._groups
    link = of_updates._groups[key] = Link(of_updates._groups[key])
    start = of_updates._sums.start
    of_updates._departures[key]._leave = lambda some: start(link, some)
    x, target = torch.randn(2 * BATCH, WIDTH), torch.randn(2 * BATCH, WIDTH)

    def seconds(early: Callable[..., Any]) -> float:
        updates.leaving_early = early  # type: ignore[assignment]
        transport.barrier()
        begin = time.perf_counter()
        trainer.step(x, target)
        return time.perf_counter() - begin

    typical = 0.0  # seconds of a step
    for share in SHARES:
        link.speed = TOTAL / (share * typical) if share else 0.0
        pairs = [
            (seconds(EARLY), seconds(lambda *_: nullcontext()))
            for _ in range(rounds + 1)
        ][1:]  # the first steps are slower
        early, late = zip(*pairs, strict=True)
        if not share:
            typical = transport.all_gather_object(statistics.median(late))[0]
        if transport.rank == 0:
            name = f"{share:.0%} of a step" if share else "memory"
            print(line(name, early, late), flush=True)
    transport.close()


def line(name: str, early: Sequence[float], late: Sequence[float]) -> str:
    """Return both times, and what the one is of the other, step by step."""
    ratios = sorted(b / a for a, b in zip(early, late, strict=True))
    quarter = len(ratios) // 4
    return (
        f"{name:<16}{1e3 * statistics.median(late):10.0f}"
        f"{1e3 * statistics.median(early):10.0f}{statistics.median(ratios):10.2f}"
        f"   ({ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f})"
    )


def main() -> None:
    """Compile; start two ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--program", type=Path)
    options = parser.parse_args()
    if options.program:
        measured(options.program, options.rounds)
        return
    print(
        f"{TOTAL / 2**20:.0f} MiB of gradients, two ranks; ms a step, medians of pairs"
    )
    print(f"{'link':<16}{'after':>10}{'within':>10}{'ratio':>10}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        compiled(Path(name))
        more = ["--rounds", str(options.rounds), "--program", name]
        sys.exit(launch(2, [sys.executable, __file__, *more]))


if __name__ == "__main__":
    main()
