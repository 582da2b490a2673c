"""CPU seconds of a sample, summed over all ranks, relative to one process.

python benchmarks/cpu_cost.py [--quick] [--ranks 2,4] [--micro-batches 1,4]

The model is ResNet-20 v2 on pictures of 64 x 64 pixels, 8 in a batch; one process runs
the same micro-batches. One thread for each rank; the groups run in turn. A last row
shows what the machine itself adds when its cores share memory and caches: two
processes that have nothing to do with each other, at the same time.

gemsc starts ranks with large pages for malloc, which makes plain PyTorch quicker, too.
So there are two single processes to compare with: one as a user starts it, and one with
the same setting (`large pages`).
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path

from cases import CASES
from contenders import (
    Contender,
    Job,
    Round,
    Turn,
    compile_job,
    contenders,
    quiet_rounds,
)

MODEL = "resnet20v2"
PLAIN, ALONE, TWICE = "one process", "large pages", "two, unrelated"
HEADER = (
    f"{'runs on':<20}{'M':>3}{'samples/s':>11}{'CPU ms/sample':>15}"
    f"{'to one process':>16}   quartiles{'to large pages':>20}"
)


def measure(
    ranks: list[int], count: int, options: argparse.Namespace
) -> tuple[list[Round], str]:
    """Return what each group took in each round, and a note on the rounds."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        jobs = {
            f"{number} ranks": (
                "gemsc",
                compile_job(
                    MODEL, number, count, options.schedule, Path(name) / str(number)
                ),
            )
            for number in ranks
        }
        return compared(jobs, options)


def compared(
    jobs: dict[str, tuple[str, Job]], options: argparse.Namespace
) -> tuple[list[Round], str]:
    """Return what jobs and single processes took in each round, and a note on them."""
    job = next(job for _, job in jobs.values())
    single = {PLAIN: ("plain", job), ALONE: ("alone", job)}
    with contenders(single | jobs | {TWICE: ("alone", job)}) as started:

        def make() -> Round:
            *groups, second = started
            turns = {group.name: group.run(options.steps) for group in groups}
            return turns | {TWICE: _at_once(groups[1], second, options.steps)}

        return quiet_rounds(make, options.rounds, options.patience)


def _at_once(first: Contender, second: Contender, steps: int) -> Turn:
    """Return what one of two groups took, on average."""
    for group in (first, second):
        group.begin(steps)
    both = [group.finish() for group in (first, second)]
    share = both[1].cpu_seconds / both[1].seconds / (os.cpu_count() or 1)
    return Turn(
        seconds=max(turn.seconds for turn in both) / 2,
        cpu_seconds=statistics.mean(turn.cpu_seconds for turn in both),
        losses=both[0].losses,
        others=both[0].others - share,  # it takes the second for a disturbance
    )


def rows(count: int, rounds: list[Round], steps: int, model: str = MODEL) -> str:
    """Return a line for each group; ratios are those of the pairs of a round."""
    samples = CASES[model].batch * steps
    lines = []
    for name in rounds[0]:
        turns = [lap[name] for lap in rounds]
        speed = statistics.median(samples / turn.seconds for turn in turns)
        cpu = statistics.median(turn.cpu_seconds / samples for turn in turns)
        to_plain, to_alone = (
            [lap[name].cpu_seconds / lap[base].cpu_seconds for lap in rounds]
            for base in (PLAIN, ALONE)
        )
        low, middle, high = statistics.quantiles(to_plain, n=4)
        lines.append(
            f"{name:<20}{count:>3}{speed:11.1f}{1e3 * cpu:15.2f}{middle:16.3f}"
            f"   {low:.3f} to {high:.3f}{statistics.median(to_alone):15.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Compile, measure, print."""
    parser = argparse.ArgumentParser(description="CPU seconds relative to one process")
    parser.add_argument("--quick", action="store_true", help="tiny: does it run?")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--micro-batches", default="1,4")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=6, help="in each turn")
    parser.add_argument(
        "--patience", type=float, default=120, help="seconds to wait for quiet rounds"
    )
    options = parser.parse_args()
    if options.quick:
        options.ranks, options.micro_batches = "2", "4"
        options.rounds, options.steps, options.patience = 2, 1, 0
    ranks = [int(number) for number in options.ranks.split(",")]
    print(HEADER, flush=True)
    for count in map(int, options.micro_batches.split(",")):
        rounds, note = measure(ranks, count, options)
        print(rows(count, rounds, options.steps), flush=True)
        print(f"{'':23}{note}", flush=True)


if __name__ == "__main__":
    main()
