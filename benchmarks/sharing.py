"""Two cores: one rank with two threads against two ranks with one thread each.

python benchmarks/sharing.py [--quick] [--models encoder,...]

The batch is the same: two data-parallel replicas have half of it each. Both contenders
run gemsc's own programs, in turn; a third one is a rank with one thread.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from cases import CASES
from contenders import Round, compile_job, contenders, quiet_rounds

ONE, THREADS, RANKS = "1 rank, 1 thread", "1 rank, 2 threads", "2 ranks, 1 thread"
HEADER = f"{'model':<12}{ONE:>18}{THREADS:>19}{RANKS:>19}   ranks / threads"


def measure(
    model: str, options: argparse.Namespace, folder: Path
) -> tuple[list[Round], str]:
    """Return what each contender took in each round, and a note on the rounds."""
    one = compile_job(model, 1, 1, "1f1b", folder / "one")
    two = compile_job(model, 2, 1, "1f1b", folder / "two", data=2)
    jobs = {
        ONE: ("gemsc", one),
        THREADS: ("gemsc", replace(one, threads=2)),
        RANKS: ("gemsc", two),
    }
    with contenders(jobs) as started:

        def make() -> Round:
            return {group.name: group.run(options.steps) for group in started}

        return quiet_rounds(make, options.rounds, options.patience)


def row(model: str, rounds: list[Round], steps: int) -> str:
    """Return samples a second of each, and the ratio of the last two in each round."""
    samples = CASES[model].batch * steps
    rates = [
        statistics.median(samples / lap[name].seconds for lap in rounds)
        for name in (ONE, THREADS, RANKS)
    ]
    ratios = sorted(lap[THREADS].seconds / lap[RANKS].seconds for lap in rounds)
    return (
        f"{model:<12}{rates[0]:18.1f}{rates[1]:19.1f}{rates[2]:19.1f}   "
        f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )


def main() -> None:
    """Compile, measure, print."""
    parser = argparse.ArgumentParser(description="ranks against threads")
    parser.add_argument("--quick", action="store_true", help="tiny: does it run?")
    parser.add_argument("--models", default="mlp,encoder,resnet20v2,resnet50,unet")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="in each turn")
    parser.add_argument(
        "--patience", type=float, default=60, help="seconds to wait for quiet rounds"
    )
    options = parser.parse_args()
    if options.quick:
        options.models, options.rounds, options.patience = "mlp", 2, 0
    print(HEADER)
    for model in options.models.split(","):
        with tempfile.TemporaryDirectory(prefix="bench-") as name:
            rounds, note = measure(model, options, Path(name))
        print(row(model, rounds, options.steps))
        print(f"{'':12}{note}", flush=True)


if __name__ == "__main__":
    main()
