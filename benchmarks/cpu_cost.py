"""CPU seconds of a sample, summed over all ranks, relative to one process.

python benchmarks/cpu_cost.py [--quick] [--ranks 2,4] [--micro-batches 1,4]

The model is ResNet-20 v2 on pictures of 64 x 64 pixels, 8 in a batch; one process runs
the same micro-batches. One thread for each rank; the groups run in turn. A last row
shows what the machine itself adds when its cores share memory and caches: two
processes that have nothing to do with each other, at the same time.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from cases import CASES
from contenders import Contender, Turn, compile_job, contenders

MODEL = "resnet20v2"
ALONE, TWICE = "one process", "two, unrelated"
HEADER = (
    f"{'runs on':<16}{'M':>3}{'samples/s':>12}{'CPU ms/sample':>15}"
    f"{'relative CPU':>14}   quartiles"
)


def measure(
    ranks: list[int], count: int, schedule: str, rounds: int, steps: int
) -> dict[str, list[Turn]]:
    """Return what each group took in each round."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        jobs = {
            f"{number} ranks": (
                "gemsc",
                compile_job(MODEL, number, count, schedule, Path(name) / str(number)),
            )
            for number in ranks
        }
        alone = ("alone", next(job for _, job in jobs.values()))
        with contenders({ALONE: alone} | jobs | {TWICE: alone}) as started:
            return _in_turn(started, rounds, steps)


def _in_turn(
    started: list[Contender], rounds: int, steps: int
) -> dict[str, list[Turn]]:
    turns: dict[str, list[Turn]] = {group.name: [] for group in started}
    first, *others, last = started
    for _ in range(rounds):
        for group in (first, *others):
            turns[group.name].append(group.run(steps))
        for group in (first, last):
            group.begin(steps)
        both = [first.finish(), last.finish()]
        turns[TWICE].append(
            Turn(  # of one of them, on average
                max(turn.seconds for turn in both) / 2,
                statistics.mean(turn.cpu_seconds for turn in both),
                both[0].losses,
            )
        )
    return turns


def rows(count: int, turns: dict[str, list[Turn]], steps: int) -> str:
    """Return a line for each group; ratios are those of the pairs of a round."""
    samples = CASES[MODEL].batch * steps
    alone = turns[ALONE]
    lines = []
    for name, own in turns.items():
        speed = statistics.median(samples / turn.seconds for turn in own)
        cpu = statistics.median(turn.cpu_seconds / samples for turn in own)
        ratios = [
            turn.cpu_seconds / other.cpu_seconds
            for turn, other in zip(own, alone, strict=True)
        ]
        low, middle, high = statistics.quantiles(ratios, n=4)
        lines.append(
            f"{name:<16}{count:>3}{speed:12.1f}{1e3 * cpu:15.2f}{middle:14.3f}"
            f"   {low:.3f} to {high:.3f}"
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
    options = parser.parse_args()
    if options.quick:
        options.ranks, options.micro_batches = "2", "4"
        options.rounds, options.steps = 2, 1
    ranks = [int(number) for number in options.ranks.split(",")]
    print(HEADER, flush=True)
    for count in map(int, options.micro_batches.split(",")):
        turns = measure(ranks, count, options.schedule, options.rounds, options.steps)
        print(rows(count, turns, options.steps), flush=True)


if __name__ == "__main__":
    main()
