"""Train on two ranks: one process, gemsc and torch.distributed.pipelining, in turn.

python benchmarks/pipeline.py [--quick] [--models unet,...] [--micro-batches 1,4,8]
                              [--busy 1] [--hosts 2]

Both pipelines run the same generated stages, cut in the same place, on the same data,
in the same order of work, with one thread for each rank; only the runtime differs. A
fourth contender is gemsc with the schedule zb-h1, where weight gradients wait. With
`--busy` other processes compute all the time, as on a machine that is not one's own.
With `--hosts 2` (for root) the ranks are in two network namespaces, with a wire of
1 GB/s and, if the kernel has netem, 0.2 ms between them; gemsc starts them by ssh.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from cases import CASES
from contenders import (
    ADDRESSES,
    SPACE,
    Memory,
    Round,
    busy_processes,
    compile_job,
    contenders,
    quiet_rounds,
)
from host_pair import two_hosts
from jobs import Job

HEADER = (
    f"{'model':<10}{'M':>3}  {'runs on':<17}{'samples/s':>10}{'CPU ms/sample':>15}"
    f"{'tensors MiB':>13}{'resident MiB':>14}"
)


ALONE, OURS, THEIRS = "one process", "gemsc", "torch.pipelining"
SPLIT = "gemsc zb-h1"


@dataclass(frozen=True)
class Measured:
    """What was measured of one model and number of micro-batches."""

    job: Job
    steps: int
    rounds: list[Round]
    memory: dict[str, Memory]
    note: str


def measure(
    jobs: dict[str, tuple[str, Job]], rounds: int, steps: int, patience: float
) -> Measured:
    """Let the contenders train in turn."""
    with contenders(jobs) as started:

        def make() -> Round:
            return {group.name: group.run(steps) for group in started}

        kept, note = quiet_rounds(make, rounds, patience)
        memory = {group.name: group.memory() for group in started}
        _, job = next(iter(jobs.values()))
        return Measured(job, steps, kept, memory, note)


def lines(
    figures: Measured, ours: tuple[str, ...] = (OURS, SPLIT), theirs: str = THEIRS
) -> str:
    """Return the rows of one model and number of micro-batches."""
    job = figures.job
    samples = CASES[job.case].batch * figures.steps
    rows = []
    for name, memory in figures.memory.items():
        turns = [lap[name] for lap in figures.rounds]
        speed = statistics.median(samples / turn.seconds for turn in turns)
        cpu = statistics.median(turn.cpu_seconds / samples for turn in turns)
        rows.append(
            f"{job.case:<10}{job.micro_batches:>3}  {name:<17}{speed:10.1f}"
            f"{1e3 * cpu:15.2f}{memory.tensors / 2**20:13.1f}"
            f"{memory.resident / 2**20:14.0f}"
        )
    for name in ours:
        pairs = ((lap[theirs], lap[name]) for lap in figures.rounds)
        ratios = sorted(other.seconds / mine.seconds for other, mine in pairs)
        rows.append(
            f"{'':15}{name} / {theirs}, samples/s: "
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )
    rows.append(f"{'':15}{figures.note}; losses differ by {spread(figures.rounds):.0e}")
    return "\n".join(rows)


def spread(rounds: list[Round]) -> float:
    """Return the largest relative difference between the contenders' losses."""
    worst = 0.0
    for lap in rounds:
        for same in zip(*(turn.losses for turn in lap.values()), strict=True):
            worst = max(worst, (max(same) - min(same)) / max(same))
    return worst


def run_on_two_hosts() -> int:
    """Run this command on the first of two hosts; return its exit code."""
    with (
        tempfile.TemporaryDirectory(prefix="hosts-") as folder,
        two_hosts(Path(folder)) as pair,
    ):
        print("two hosts,", pair.slow_down("8gbit", "0.2ms"), flush=True)
        command, environment = pair.command(0, sys.executable, *sys.argv)
        environment |= {ADDRESSES: " ".join(pair.addresses), SPACE: pair.spaces[1]}
        return subprocess.run(command, env=environment).returncode


def main() -> None:
    """Compile, measure, print."""
    parser = argparse.ArgumentParser(description="gemsc against torch.pipelining")
    parser.add_argument("--quick", action="store_true", help="tiny: does it run?")
    parser.add_argument("--models", default="resnet50,unet,encoder")
    parser.add_argument("--micro-batches", default="1,4,8")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="in each turn")
    parser.add_argument(
        "--patience", type=float, default=120, help="seconds to wait for quiet rounds"
    )
    parser.add_argument("--busy", type=int, default=0, help="others that compute")
    parser.add_argument("--hosts", type=int, choices=(1, 2), default=1)
    options = parser.parse_args()
    if options.hosts == 2 and SPACE not in os.environ:
        try:
            sys.exit(run_on_two_hosts())
        except pytest.skip.Exception as why:
            sys.exit(str(why))
    if options.busy:
        options.patience = 0  # no round is quiet
    if options.quick:
        options.models, options.micro_batches = "mlp", "2"
        options.rounds, options.patience = 2, 0
    print(HEADER, flush=True)
    for model in options.models.split(","):
        for count in map(int, options.micro_batches.split(",")):
            # 1F1B of torch.distributed.pipelining takes two micro-batches or more
            schedule = "1f1b" if count > 1 else "gpipe"
            with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                places = Path(folder) / "whole", Path(folder) / "split"
                job = compile_job(model, 2, count, schedule, places[0])
                split = compile_job(model, 2, count, "zb-h1", places[1])
                jobs = {
                    ALONE: ("alone", job),
                    OURS: ("gemsc", job),
                    SPLIT: ("gemsc", split),
                    THEIRS: ("torch", job),
                }
                with busy_processes(options.busy):
                    figures = measure(
                        jobs, options.rounds, options.steps, options.patience
                    )
            print(lines(figures), flush=True)


if __name__ == "__main__":
    main()
