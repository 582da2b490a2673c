"""Train on two ranks: one process, gemsc and torch.distributed.pipelining, in turn.

python benchmarks/pipeline.py [--quick] [--models unet,...] [--micro-batches 1,4,8]

Both pipelines run the same generated stages, cut in the same place, on the same data,
in the same order of work, with one thread for each rank; only the runtime differs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from cases import CASES
from contenders import Job, Memory, Turn, compile_job, contenders

HEADER = (
    f"{'model':<11}{'M':>3}  {'runs on':<20}{'samples/s':>10}{'CPU ms/sample':>15}"
    f"{'tensors MiB':>13}{'resident MiB':>14}"
)


def measure(job: Job, rounds: int, steps: int) -> dict[str, tuple[list[Turn], Memory]]:
    """Return what each contender took in each round; the rounds are interleaved."""
    groups = {
        "one process": ("alone", job),
        "gemsc, 2 ranks": ("gemsc", job),
        "torch.pipelining, 2": ("torch", job),
    }
    with contenders(groups) as started:
        turns = {group.name: [] for group in started}
        for _ in range(rounds):
            for group in started:
                turns[group.name].append(group.run(steps))
        return {group.name: (turns[group.name], group.memory()) for group in started}


def lines(job: Job, found: dict[str, tuple[list[Turn], Memory]], steps: int) -> str:
    """Return the rows of one model and number of micro-batches."""
    samples = CASES[job.case].batch * steps
    rows = []
    for name, (turns, memory) in found.items():
        speed = statistics.median(samples / turn.seconds for turn in turns)
        cpu = statistics.median(turn.cpu_seconds / samples for turn in turns)
        rows.append(
            f"{job.case:<11}{job.micro_batches:>3}  {name:<20}{speed:10.1f}"
            f"{1e3 * cpu:15.2f}{memory.tensors / 2**20:13.1f}"
            f"{memory.resident / 2**20:14.0f}"
        )
    pairs = zip(
        found["gemsc, 2 ranks"][0], found["torch.pipelining, 2"][0], strict=True
    )
    ratios = sorted(theirs.seconds / ours.seconds for ours, theirs in pairs)
    first, middle, last = ratios[0], statistics.median(ratios), ratios[-1]
    rows.append(
        f"{'':16}gemsc is {middle:.2f} times as fast as torch.pipelining "
        f"({first:.2f} to {last:.2f} in {len(ratios)} pairs); "
        f"losses differ by {spread(found):.0e}"
    )
    return "\n".join(rows)


def spread(found: dict[str, tuple[list[Turn], Memory]]) -> float:
    """Return the largest relative difference between the contenders' losses."""
    losses = [
        [loss for turn in turns for loss in turn.losses] for turns, _ in found.values()
    ]
    return max(
        (max(same) - min(same)) / max(same) for same in zip(*losses, strict=True)
    )


def main() -> None:
    """Compile, measure, print."""
    parser = argparse.ArgumentParser(description="gemsc against torch.pipelining")
    parser.add_argument("--quick", action="store_true", help="tiny: does it run?")
    parser.add_argument("--models", default="resnet50,unet,encoder")
    parser.add_argument("--micro-batches", default="1,4,8")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="in each turn")
    options = parser.parse_args()
    if options.quick:
        options.models, options.micro_batches, options.rounds = "mlp", "2", 2
    print(HEADER, flush=True)
    for model in options.models.split(","):
        for count in map(int, options.micro_batches.split(",")):
            # 1F1B of torch.distributed.pipelining takes two micro-batches or more
            schedule = "1f1b" if count > 1 else "gpipe"
            with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                job = compile_job(model, 2, count, schedule, Path(folder))
                found = measure(job, options.rounds, options.steps)
            print(lines(job, found, options.steps), flush=True)


if __name__ == "__main__":
    main()
