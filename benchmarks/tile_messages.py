"""Standing messages between tiles against new ones: seconds of one step on two ranks.

mpirun -n 2 python benchmarks/tile_messages.py [--quick] [--sizes 64,256] [--rounds 9]

Convolutions on pictures that are split in two. The same program trains with small
messages in memory that stays, by requests that the library prepared once, and with a
new request and new memory for each. Steps of both take turns; the table shows the
medians of the ranks' CPU seconds together and of wall seconds, and their ratios.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn

import gemsc
from gemsc.runtime.tiles import messages as tile_messages
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.transport.mpi import MpiTransport

LAYERS = 12
CHANNELS = 8
MICRO_BATCHES = 2


def network() -> nn.Module:
    """Return 3 x 3 convolutions in a row: one exchange each."""
    layers: list[nn.Module] = [nn.Conv2d(3, CHANNELS, 3, padding=1)]
    for _ in range(LAYERS - 1):
        layers += [nn.ReLU(), nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)]
    return nn.Sequential(*layers)


def write(folder: str, size: int) -> None:
    """Compile the network for two tiles."""
    shape = (1, CHANNELS, size, size)
    gemsc.compile(
        network(),
        (torch.randn(1, 3, size, size),),
        loss=F.mse_loss,
        example_target=torch.randn(shape),
        ranks=2,
        tiles=("2x1",),
        micro_batches=MICRO_BATCHES,
        fuse_halos="off",
    ).write(folder)


def trainer(folder: Path, transport: MpiTransport, *, largest: int) -> Trainer:
    """Return a trainer whose messages of up to `largest` bytes stand."""
    usual = tile_messages.LARGEST_STANDING
    tile_messages.LARGEST_STANDING = largest
    try:
        return Trainer(folder, transport, device=torch.device("cpu"))
    finally:
        tile_messages.LARGEST_STANDING = usual


def measure(size: int, rounds: int, transport: MpiTransport) -> str:
    """Return the row of one size."""
    folder = tempfile.TemporaryDirectory(prefix="bench-")
    name = str(transport.broadcast_object(folder.name))
    if transport.rank == 0:
        write(name, size)
    transport.barrier()
    both = [trainer(Path(name), transport, largest=n) for n in (0, 2**30)]
    inputs = torch.randn(MICRO_BATCHES, 3, size, size)
    target = torch.randn(MICRO_BATCHES, CHANNELS, size, size)
    cpu: list[list[float]] = [[], []]
    wall: list[list[float]] = [[], []]
    steps = max(2, 2**14 // size**2)
    for round_ in range(rounds + 1):
        for which, each in enumerate(both):
            transport.barrier()
            begin = time.process_time(), time.perf_counter()
            for _ in range(steps):
                each.step(inputs, target)
            transport.barrier()
            if round_:
                cpu[which].append((time.process_time() - begin[0]) / steps)
                wall[which].append((time.perf_counter() - begin[1]) / steps)
    every = [transport.all_gather_object(values) for values in cpu]
    sums = [median(map(sum, zip(*values, strict=True))) for values in every]
    walls = [median(values) for values in wall]
    transport.barrier()
    folder.cleanup()
    text = f"{size:>6}{CHANNELS * size * 4 / 1024:>9.0f}"
    for new, standing in (sums, walls):
        text += f"{1e3 * new:>10.2f}{1e3 * standing:>10.2f}{standing / new:>8.3f}"
    return text


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", default="32,64,128,256")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="tiny: does it run?")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    transport = MpiTransport()
    sizes = [32] if chosen.quick else list(map(int, chosen.sizes.split(",")))
    if transport.rank == 0:
        print(f"{'size':>6}{'KiB':>9}{'CPU: new':>10}{'stands':>10}{'ratio':>8}"
              f"{'wall: new':>10}{'stands':>10}{'ratio':>8}")  # fmt: skip
    for size in sizes:
        row = measure(size, 2 if chosen.quick else chosen.rounds, transport)
        if transport.rank == 0:
            print(row, flush=True)
    transport.close()


if __name__ == "__main__":
    main()
