"""CPU seconds of a picture on two tiles, relative to one process.

python benchmarks/tile_cost.py [--quick] [--models "resnet20v2 512,unet 512"]

One picture in a step; two ranks with half of it each, one thread for each rank. Halos
are exchanged before every layer (`fuse off`), or one wide halo serves several layers:
as many as is predicted to be best (`auto`), or up to so many. The groups run in turn;
ratios are those of one round.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from contenders import Round, compile_job, contenders, quiet_rounds
from cpu_cost import ALONE, HEADER, rows

FUSED = ("off", "auto", "2", "4")


def measure(
    model: str, grid: str, options: argparse.Namespace
) -> tuple[list[Round], str]:
    """Return what each group took in each round, and a note on the rounds."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        jobs = {
            f"{grid}, fuse {fuse}": (
                "gemsc",
                compile_job(
                    model, 2, 1, "gpipe", Path(name) / fuse,
                    tiles=(grid,), fuse_halos=fuse,
                ),
            )
            for fuse in options.fuse.split(",")
        }  # fmt: skip
        alone = ("alone", next(job for _, job in jobs.values()))
        with contenders({ALONE: alone} | jobs) as started:

            def make() -> Round:
                return {group.name: group.run(options.steps) for group in started}

            return quiet_rounds(make, options.rounds, options.patience)


def main() -> None:
    """Compile, measure, print."""
    parser = argparse.ArgumentParser(description="CPU seconds of two tiles")
    parser.add_argument("--quick", action="store_true", help="tiny: does it run?")
    parser.add_argument("--models", default="resnet20v2 512,unet 512")
    parser.add_argument("--tiles", default="2x1")
    parser.add_argument("--fuse", default=",".join(FUSED))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="in each turn")
    parser.add_argument(
        "--patience", type=float, default=60, help="seconds to wait for quiet rounds"
    )
    options = parser.parse_args()
    if options.quick:
        options.models, options.fuse = "unet", "off"
        options.rounds, options.steps, options.patience = 2, 1, 0
    print(HEADER, flush=True)
    for model in options.models.split(","):
        found, note = measure(model, options.tiles, options)
        print(rows(1, found, options.steps, model), flush=True)
        print(f"{model:>18} {note}", flush=True)


if __name__ == "__main__":
    main()
