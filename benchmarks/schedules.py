"""All schedules on the same model, data and micro-batches, in turn.

python benchmarks/schedules.py [--quick] [--ranks 2] [--models unet,resnet110]

Times are shown as ratios to `basic` (one micro-batch at a time through all stages),
measured beside what the compiler predicted; activations are the predicted peak of the
peak-memory rank. With more ranks than cores only CPU seconds and memory mean anything.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cases import CASES
from contenders import Job, Round, contenders, quiet_rounds

import gemsc
from gemsc.compiler import lower, trace
from gemsc.errors import GemscError
from gemsc.plan import Plan

VARIANTS = {
    "basic": {"schedule": "basic"},
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "1f1b folded": {"schedule": "1f1b", "placement": "folded"},
    "zb-h1": {"schedule": "zb-h1"},
    "zb-v": {"schedule": "zb-v"},
    "v-half": {"schedule": "v-half"},
    "interleaved": {"schedule": "interleaved"},
    "master": {"schedule": "master"},
    "bidirectional": {"schedule": "bidirectional"},
    "chimera": {"schedule": "chimera"},
}
HEADER = (
    f"{'model':<11}{'N':>2}  {'schedule':<14}{'ms/step':>9}{'basic / it':>11}"
    f"{'predicted':>10}{'CPU ms/sample':>14}{'activations MiB':>16}"
)


@dataclass(frozen=True)
class Variant:
    """A compiled schedule."""

    name: str
    job: Job
    plan: Plan


def compile_variants(
    model: str, ranks: int, micro_batches: int, folder: Path
) -> list[Variant]:
    """Compile one model under every schedule that fits the number of ranks."""
    case = CASES[model]
    inputs, target = case.data(case.batch // micro_batches)
    traced = trace(case.build(), inputs, loss=case.loss, example_target=target)
    variants = []
    for name, choices in VARIANTS.items():
        options = gemsc.CompileOptions(
            ranks=ranks, micro_batches=micro_batches, **choices
        )
        directory = folder / name.replace(" ", "-")
        try:
            program = lower(traced, options)
        except GemscError as error:
            print(f"{model:<11}{ranks:>2}  {name:<14} left out: {error.message}")
            continue
        program.write(directory)
        job = Job(model, ranks, micro_batches, choices["schedule"], str(directory))
        variants.append(Variant(name, job, program.plan))
    return variants


def lines(variants: list[Variant], rounds: list[Round], steps: int, note: str) -> str:
    """Return the table's rows."""
    rows = []
    basic = next(v.plan for v in variants if v.name == "basic")
    for variant in variants:
        turns = [lap[variant.name] for lap in rounds]
        samples = CASES[variant.job.case].batch * steps
        ratios = [lap["basic"].seconds / lap[variant.name].seconds for lap in rounds]
        cpu = statistics.median(turn.cpu_seconds / samples for turn in turns)
        rows.append(
            f"{variant.job.case:<11}{variant.job.ranks:>2}  {variant.name:<14}"
            f"{1e3 * statistics.median(t.seconds for t in turns) / steps:9.0f}"
            f"{statistics.median(ratios):11.2f}"
            f"{basic.step_seconds / variant.plan.step_seconds:10.2f}"
            f"{1e3 * cpu:14.2f}"
            f"{max(variant.plan.activation_bytes) / 2**20:16.1f}"
        )
    ranks = variants[0].job.ranks
    rows.append(
        f"{'':15}equal stages: basic / master = 6N/(4N+2) = "
        f"{6 * ranks / (4 * ranks + 2):.2f}; {note}"
    )
    return "\n".join(rows)


def main() -> None:
    """Compile, measure, print."""
    parser = argparse.ArgumentParser(description="all schedules side by side")
    parser.add_argument("--quick", action="store_true", help="tiny: does it run?")
    parser.add_argument("--models", default="unet,resnet110")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="in each turn")
    parser.add_argument("--patience", type=float, default=120)
    options = parser.parse_args()
    if options.quick:
        options.models, options.micro_batches = "mlp", 4
        options.rounds, options.steps, options.patience = 1, 1, 0
    print(HEADER, flush=True)
    for model in options.models.split(","):
        with tempfile.TemporaryDirectory(prefix="bench-") as name:
            variants = compile_variants(
                model, options.ranks, options.micro_batches, Path(name)
            )
            jobs = {v.name: ("gemsc", v.job) for v in variants}
            with contenders(jobs) as started:

                def make(groups: list = started) -> Round:
                    return {group.name: group.run(options.steps) for group in groups}

                rounds, note = quiet_rounds(make, options.rounds, options.patience)
        print(lines(variants, rounds, options.steps, note), flush=True)


if __name__ == "__main__":
    main()
