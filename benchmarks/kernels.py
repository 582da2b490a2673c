"""Train with other kernels: with channels last, through torch.compile.

python benchmarks/kernels.py [--quick] [--models resnet50,unet] [--micro-batches 2]

One process and gemsc on two ranks, each as the model is, with `--memory-format
channels_last` and with `--torch-compile`, in turn. A ratio is that of two turns of the
same round. `--kinds` are the kinds to compare, the first with the others.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from cases import CASES
from contenders import Round, compile_job, contenders, quiet_rounds
from jobs import Job

ALONE, OURS = "one process", "gemsc"
KINDS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "channels_last": {"memory_format": "channels_last"},
    "torch.compile": {"torch_compile": True},
}
HEADER = (
    f"{'model':<10}{'M':>3}  {'kernels':<28}{ALONE:>14}{OURS:>9}{'gain':>15}{'':7}"
    f"{'gemsc / one process':>22}"
)


def measure(
    jobs: dict[str, tuple[str, Job]], rounds: int, steps: int, patience: float
) -> tuple[list[Round], str]:
    """Let the contenders train in turn."""
    with contenders(jobs) as started:

        def make() -> Round:
            return {group.name: group.run(steps) for group in started}

        return quiet_rounds(make, rounds, patience)


def lines(rounds: list[Round], job: Job, kinds: list[str], steps: int) -> list[str]:
    """Return a row for each kind of kernels; gains are over the first kind."""
    samples = CASES[job.case].batch * steps

    def median(one: str, other: str) -> float:
        ratios = (lap[other].seconds / lap[one].seconds for lap in rounds)
        return statistics.median(ratios)

    def speed(name: str) -> float:
        return statistics.median(samples / lap[name].seconds for lap in rounds)

    rows = []
    for kind in kinds:
        names = [f"{who}, {kind}" for who in (ALONE, OURS)]
        firsts = [f"{who}, {kinds[0]}" for who in (ALONE, OURS)]
        gains = [median(n, first) for n, first in zip(names, firsts, strict=True)]
        rows.append(
            f"{job.case:<10}{job.micro_batches:>3}  {kind:<28}{speed(names[0]):14.1f}"
            f"{speed(names[1]):9.1f}{gains[0]:10.2f}{gains[1]:10.2f}"
            f"{median(names[1], names[0]):22.2f}"
        )
    return rows


def main() -> None:
    """Compile, measure, print."""
    parser = argparse.ArgumentParser(description="gemsc with other kernels")
    parser.add_argument("--quick", action="store_true", help="tiny: does it run?")
    parser.add_argument("--models", default="resnet50,unet")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="in each turn")
    parser.add_argument(
        "--patience", type=float, default=120, help="seconds to wait for quiet rounds"
    )
    parser.add_argument("--kinds", default=",".join(KINDS), help=", ".join(KINDS))
    options = parser.parse_args()
    if options.quick:
        options.models, options.rounds, options.patience = "resnet20v2", 2, 0
    kinds = {name: KINDS[name] for name in options.kinds.split(",")}
    print(HEADER, flush=True)
    for model in options.models.split(","):
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            jobs: dict[str, tuple[str, Job]] = {}
            for number, (kind, how) in enumerate(kinds.items()):
                place = Path(folder, str(number))
                args = model, 2, options.micro_batches, "1f1b", place
                job = compile_job(*args, **how)
                jobs[f"{ALONE}, {kind}"] = "alone", replace(job, ranks=1)
                jobs[f"{OURS}, {kind}"] = "gemsc", job
            laps, note = measure(jobs, options.rounds, options.steps, options.patience)
        print(*lines(laps, job, [*kinds], options.steps), sep="\n")
        print(f"{'':15}{note}", flush=True)


if __name__ == "__main__":
    main()
