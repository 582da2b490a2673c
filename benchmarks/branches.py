"""Parallel branches on several ranks, against one process and against the formula.

python benchmarks/branches.py towers [--quick] [--micro-batches 1,2,4] [--rounds 7]
python benchmarks/branches.py inside [--quick] [--micro-batches 1,2,4] [--rounds 7]

`towers`: the two towers of a CLIP, a stage each, and what joins them: on three ranks,
and on two, where the join is on the first tower's. `3 in a row` are three stages that
cut the towers instead, of about equal weight. One process takes T seconds, and the
towers, each trained alone in one, Ta and Tb. By the formula M micro-batches take
max(Ta, Tb) + (T - Ta - Tb) / M and the messages of one. One thread for each rank.

`inside`: blocks of two equal branches, one on each of two ranks that both compute the
trunk. By the formula a step takes what one process does for the network with one of
the branches, and the messages. `data 2` are two replicas that share the same batch.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from contenders import Job, Round, compile_job, contenders, quiet_rounds

from gemsc.costs.hardware import DEFAULT_HARDWARE, read_hardware
from gemsc.plan import Plan

ALONE, PARTS = "one process", ("text", "image")
HEADER = (
    f"{'model':<10}{'M':>3}  {'runs on':<16}{'ms/step':>8}{'speedup':>9}{'formula':>9}"
)


def towers(options: argparse.Namespace) -> None:
    """Measure two towers as stages side by side, for each number of micro-batches."""
    width, depth = (64, 2) if options.quick else (256, 6)
    model = f"clip {width}"
    apart = ("image", "logits")  # where the second tower and the join begin
    mixed = (f"text.blocks.{2 * depth // 3}", f"image.blocks.{depth // 3}")
    splits: dict[str, dict[str, Any]] = {
        "3 side by side": {"ranks": 3, "cuts": apart},
        "2 side by side": {"ranks": 2, "cuts": apart, "placement": "0,1,0"},
        "3 in a row": {"ranks": 3, "cuts": mixed},
    }
    print(HEADER)
    for count in map(int, options.micro_batches.split(",")):
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            jobs: dict[str, tuple[str, Job]] = {}
            for name, choice in splits.items():
                place = Path(folder) / name.replace(" ", "-")
                words = {"micro_batches": count, "schedule": "1f1b", **choice}
                job = compile_job(model, directory=place, **words)
                jobs[name] = "gemsc", job
            jobs[ALONE] = "alone", job
            for part in PARTS:
                jobs[part] = "alone", Job(f"{model} {part}", 1, count, "", "")
            rounds, note = measure(jobs, options)
            sent = options.steps * seconds_of_messages(jobs["3 side by side"][1])
        for name in jobs:
            print(f"{model:<10}{count:>3}  {row(name, rounds, count, sent, options)}")
        print(f"{'':15}{note}", flush=True)


def row(
    name: str, rounds: list[Round], count: int, sent: float, options: argparse.Namespace
) -> str:
    """Return the seconds of a contender, over those of one process and the formula."""
    times = [lap[name].seconds for lap in rounds]
    text = f"{name:<16}{1e3 * statistics.median(times) / options.steps:8.0f}"
    if name not in PARTS:
        speedups = [lap[ALONE].seconds / lap[name].seconds for lap in rounds]
        shares = [formula(lap, count, sent) / lap[name].seconds for lap in rounds]
        text += f"{statistics.median(speedups):9.2f}{statistics.median(shares):9.2f}"
    return text


def formula(turns: Round, count: int, sent: float) -> float:
    """Return the seconds of towers side by side and of their join."""
    parts = [turns[part].seconds for part in PARTS]
    return max(parts) + (turns[ALONE].seconds - sum(parts)) / count + sent


def seconds_of_messages(job: Job) -> float:
    """Return what the longest message of a micro-batch takes, there and back."""
    plan = Plan.read(Path(job.directory) / "plan.toml")
    link = read_hardware(DEFAULT_HARDWARE).network.link(0, 1)
    return 2 * max(link.seconds(transfer.num_bytes) for transfer in plan.transfers)


def measure(
    jobs: dict[str, tuple[str, Job]], options: argparse.Namespace
) -> tuple[list[Round], str]:
    """Let all train in turn; return the rounds and a note on them."""
    with contenders(jobs) as started:

        def make() -> Round:
            return {group.name: group.run(options.steps) for group in started}

        return quiet_rounds(make, options.rounds, options.patience)


def inside(options: argparse.Namespace) -> None:
    """Measure branches inside a stage, for each number of micro-batches."""
    size = " 8" if options.quick else ""
    model, half = f"two branches{size}", f"one branch{size}"
    choices: dict[str, dict[str, Any]] = {
        "branches": {"ranks": 2, "branches": 2, "trunk": "whole"},
        "data 2": {"ranks": 2, "data": 2},
    }
    print(HEADER)
    for count in map(int, options.micro_batches.split(",")):
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            jobs: dict[str, tuple[str, Job]] = {}
            for name, choice in choices.items():
                place = Path(folder) / name.replace(" ", "-")
                words = {"micro_batches": count, "schedule": "1f1b", **choice}
                jobs[name] = "gemsc", compile_job(model, directory=place, **words)
            jobs[ALONE] = "alone", jobs["branches"][1]
            jobs[half] = "alone", Job(half, 1, count, "", "")
            rounds, note = measure(jobs, options)
            sent = options.steps * seconds_of_exchanges(jobs["branches"][1])
        for name in jobs:
            times = [lap[name].seconds for lap in rounds]
            text = f"{name:<16}{1e3 * statistics.median(times) / options.steps:8.0f}"
            speedups = [lap[ALONE].seconds / lap[name].seconds for lap in rounds]
            text += f"{statistics.median(speedups):9.2f}"
            if name == "branches":
                shares = [(e[half].seconds + sent) / e[name].seconds for e in rounds]
                text += f"{statistics.median(shares):9.2f}"
            print(f"{model:<14}{count:>3}  {text}")
        print(f"{'':15}{note}", flush=True)


def seconds_of_exchanges(job: Job) -> float:
    """Return what a rank's messages of a step take, one after the other."""
    traffic = Plan.read(Path(job.directory) / "plan.toml").traffic
    link = read_hardware(DEFAULT_HARDWARE).network.link(0, 1)
    messages, size = traffic["messages"], traffic["message_bytes"]
    return (messages * link.latency + size / link.bandwidth) / job.ranks


KINDS = {"towers": towers, "inside": inside}


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description="parallel branches on several ranks")
    parser.add_argument("kind", choices=KINDS, nargs="?", help="without it, each")
    parser.add_argument("--quick", action="store_true", help="tiny: does it run?")
    parser.add_argument("--micro-batches", default="1,2,4")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="in each turn")
    parser.add_argument(
        "--patience", type=float, default=120, help="seconds to wait for quiet rounds"
    )
    options = parser.parse_args()
    if options.quick:
        options.micro_batches, options.rounds, options.patience = "2", 2, 0
    for kind in [options.kind] if options.kind else KINDS:
        KINDS[kind](options)


if __name__ == "__main__":
    main()
