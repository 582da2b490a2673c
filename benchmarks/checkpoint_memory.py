"""What saving takes: memory of each rank beyond what it has anyway, and seconds.

python benchmarks/checkpoint_memory.py [--mib 1024] [--ranks 4]

The network is a chain of linear layers with Adam, three times its weights in a
checkpoint. A rank's peak of resident memory is reset before it saves, and read after.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import gemsc
from gemsc.launch.launch import launch

WIDTH, BATCH = 1024, 4
MIB = 2**20


def network(mib: int) -> nn.Module:
    """Return layers whose checkpoint has so many MiB."""
    count = max(4, mib * MIB // (3 * 4 * WIDTH * WIDTH))
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


def resident(field: str) -> int:
    """Return bytes of this process: VmRSS now, VmHWM at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def of_rank(folder: Path) -> None:
    """Train a step, save in both ways, and print what each has taken."""
    trainer = gemsc.load(
        folder / "program", optimizer=lambda named: torch.optim.Adam(named, 1e-4)
    )
    x = torch.randn(2 * BATCH, WIDTH)
    trainer.step(x, x)
    for background in (False, True):
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak
        before, start = resident("VmRSS"), time.perf_counter()
        trainer.save(folder / "saved", keep=1, background=background)
        called = time.perf_counter() - start
        trainer.finish_saving()
        took = time.perf_counter() - start
        rise = resident("VmHWM") - before
        path = folder / "saved/latest" / f"rank{trainer.transport.rank}.safetensors"
        print(
            f"rank {trainer.transport.rank}{' in the background' * background}: "
            f"{path.stat().st_size / MIB:.0f} MiB, {before / MIB:.0f} MiB before, "
            f"+{rise / MIB:.1f} MiB ({rise / before:.1%}), "
            f"{called:.2f} s of {took:.2f} s",
            flush=True,
        )


def main() -> None:
    """Compile, and start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        of_rank(options.folder)
        return
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        model, x = network(options.mib), torch.randn(BATCH, WIDTH)
        program = gemsc.compile(
            model,
            (x,),
            loss=nn.MSELoss(),
            example_target=x,
            ranks=options.ranks,
            micro_batches=2,
            check=False,
        )
        program.write(Path(name) / "program")
        words = [sys.executable, os.path.abspath(__file__), "--folder", name]
        code = launch(options.ranks, words, timeout=600)
        sys.exit(code)


if __name__ == "__main__":
    main()
