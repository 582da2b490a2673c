"""The split that gemsc chooses against splits by hand, on two ranks, in turn.

python benchmarks/splits.py [--quick] [--models unet,resnet50]

All run 1F1B with the same micro-batches; `equal` has half of the blocks on each rank,
`hand 1` to `hand 10` are cut at ten places from early to late. `auto` also chooses the
schedule. Times are relative to `chosen`, gemsc's cut for 1F1B, in the same round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from cases import CASES
from contenders import Job, Round, contenders, quiet_rounds

import gemsc
from gemsc.compiler import lower, trace
from gemsc.plan import Plan

HAND_SPLITS = 10
GROUP = 5  # contenders that live at the same time, beside `chosen`
HEADER = (
    f"{'model':<10}{'split':<10}{'blocks':>9}  {'schedule':<15}{'ms/step':>8}"
    f"{'measured':>10}{'predicted':>10}"
)


def compile_splits(
    model: str, micro_batches: int, hand_splits: int, folder: Path
) -> dict[str, tuple[Job, Plan]]:
    """Return a job and its plan for each split."""
    case = CASES[model]
    inputs, target = case.data(case.batch // micro_batches)
    traced = trace(case.build(), inputs, loss=case.loss, example_target=target)
    count = len(traced.program.blocks or ())
    places = {
        max(1, min(count - 1, round(count * (i + 1) / (hand_splits + 1))))
        for i in range(hand_splits)
    }
    choices: dict[str, dict[str, object]] = {
        "chosen": {},
        "auto": {"schedule": "auto", "placement": "auto", "balance": "auto"},
        "equal": {"blocks": (count // 2, count - count // 2)},
    }
    for index, place in enumerate(sorted(places)):
        choices[f"hand {index + 1}"] = {"blocks": (place, count - place)}
    splits = {}
    for name, choice in choices.items():
        options = gemsc.CompileOptions(ranks=2, micro_batches=micro_batches, **choice)
        program = lower(traced, options)
        directory = folder / name.replace(" ", "-")
        program.write(directory)
        plan = program.plan
        job = Job(model, 2, micro_batches, plan.schedule, str(directory))
        splits[name] = (job, plan)
    return splits


def measure(
    splits: dict[str, tuple[Job, Plan]], options: argparse.Namespace
) -> dict[str, tuple[float, float]]:
    """Return seconds of a step, and that over the seconds of `chosen`, by split."""
    others = [name for name in splits if name != "chosen"]
    figures: dict[str, tuple[float, float]] = {}
    for start in range(0, len(others), GROUP):
        names = ["chosen", *others[start : start + GROUP]]
        jobs = {name: ("gemsc", splits[name][0]) for name in names}
        with contenders(jobs) as started:

            def make(groups: list = started) -> Round:
                return {group.name: group.run(options.steps) for group in groups}

            rounds, note = quiet_rounds(make, options.rounds, options.patience)
        print(f"{'':10}{note}", flush=True)
        for name in names:
            seconds = statistics.median(r[name].seconds for r in rounds)
            ratio = statistics.median(
                r[name].seconds / r["chosen"].seconds for r in rounds
            )
            figures.setdefault(name, (seconds / options.steps, ratio))
    return figures


def report(
    model: str,
    splits: dict[str, tuple[Job, Plan]],
    figures: dict[str, tuple[float, float]],
) -> None:
    """Print the table's rows."""
    chosen = splits["chosen"][1].step_seconds
    for name, (_, plan) in splits.items():
        seconds, ratio = figures[name]
        blocks = "+".join(str(len(stage.blocks)) for stage in plan.stages)
        print(
            f"{model:<10}{name:<10}{blocks:>9}  {plan.schedule:<15}"
            f"{1e3 * seconds:8.0f}{ratio:10.2f}{plan.step_seconds / chosen:10.2f}"
        )
    best = min(ratio for name, (_, ratio) in figures.items() if name[:4] == "hand")
    print(f"{'':10}chosen over the best hand split: {1 / best:.3f}")


def main() -> None:
    """Compile, measure, print."""
    parser = argparse.ArgumentParser(description="chosen splits against splits by hand")
    parser.add_argument("--quick", action="store_true", help="tiny: does it run?")
    parser.add_argument("--models", default="unet,resnet50")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="in each turn")
    parser.add_argument("--patience", type=float, default=60)
    options = parser.parse_args()
    if options.quick:
        options.models, options.rounds = "mlp", 1
        options.steps, options.patience = 1, 0
    print(HEADER, flush=True)
    for model in options.models.split(","):
        with tempfile.TemporaryDirectory(prefix="bench-") as name:
            hand = 2 if options.quick else HAND_SPLITS
            splits = compile_splits(model, options.micro_batches, hand, Path(name))
            figures = measure(splits, options)
        report(model, splits, figures)


if __name__ == "__main__":
    main()
