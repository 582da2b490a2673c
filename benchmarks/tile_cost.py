"""CPU seconds of a picture on two tiles, relative to one process.

python benchmarks/tile_cost.py [--quick] [--models "resnet20v2 512,unet 512"]

One picture in a step; two ranks with half of it each, one thread for each rank. Halos
are exchanged before every layer (0), or one wide halo serves up to so many. Their
convolutions wait for them (`off`), or begin meanwhile (`on`). The groups run in turn;
ratios are those of one round, to the two single processes of cpu_cost.py.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from contenders import Round, compile_job
from cpu_cost import HEADER, compared, rows

HALOS = ("0 on", "0 off", "2 on", "4 on")  # fuse, overlap


def measure(
    model: str, grid: str, options: argparse.Namespace
) -> tuple[list[Round], str]:
    """Return what each group took in each round, and a note on the rounds."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        jobs = {
            f"{grid}, {halos}": (
                "gemsc",
                compile_job(
                    model, 2, 1, "gpipe", Path(name) / halos.replace(" ", "-"),
                    tiles=(grid,), fuse_halos=int(fuse), overlap_halos=overlap == "on",
                ),
            )
            for halos in options.halos.split(",")
            for fuse, overlap in [halos.split()]
        }  # fmt: skip
        return compared(jobs, options)


def main() -> None:
    """Compile, measure, print."""
    parser = argparse.ArgumentParser(description="CPU seconds of two tiles")
    parser.add_argument("--quick", action="store_true", help="tiny: does it run?")
    parser.add_argument("--models", default="resnet20v2 512,unet 512")
    parser.add_argument("--tiles", default="2x1")
    parser.add_argument("--halos", default=",".join(HALOS), help="fuse overlap, ...")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="in each turn")
    parser.add_argument(
        "--patience", type=float, default=60, help="seconds to wait for quiet rounds"
    )
    options = parser.parse_args()
    if options.quick:
        options.models, options.halos = "unet", "0 on"
        options.rounds, options.steps, options.patience = 2, 1, 0
    print(HEADER, flush=True)
    for model in options.models.split(","):
        rounds, note = measure(model, options.tiles, options)
        print(rows(1, rounds, options.steps, model), flush=True)
        print(f"{model:>22} {note}", flush=True)


if __name__ == "__main__":
    main()
