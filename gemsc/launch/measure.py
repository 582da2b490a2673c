"""Measure a program: start it for a few steps and return the median one."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from gemsc.errors import GemscError
from gemsc.launch.start import start
from gemsc.plan import Plan

__all__ = ["Mark", "measure"]

# kind, stage, replica, micro-batch, start, end: seconds from the begin of the step;
# -1 where there is no such thing
Mark = tuple[str, int, int, int, float, float]


def measure(directory: Path, num_steps: int) -> list[list[Mark]]:
    """Return, for each rank, what it did and when in the step of median length.

    Raises:
        GemscError: the program cannot train or has no source, or a rank failed.
    """
    plan = Plan.read(directory / "plan.toml")
    if not any("B" in row for row in plan.order):
        raise GemscError(
            f"{directory} cannot train: it was compiled without a loss",
            help="add loss(output, target) to the model's file and compile again",
        )
    if not plan.spec:
        raise GemscError(
            f"{directory} was compiled from Python: its inputs are not in a file",
            help="compile it from a file with model() and example_inputs()",
        )
    with tempfile.TemporaryDirectory(prefix="gemsc-times-") as name:
        code = start(directory, ["--record-into", name, "--steps", str(num_steps)])
        if code != 0:
            raise GemscError(
                f"the ranks ended with exit code {code}", help="see the report above"
            )
        steps = _read(Path(name), plan.ranks)
    steps.sort(key=lambda rows: max(mark[5] for row in rows for mark in row))
    return steps[(len(steps) - 1) // 2]


def _read(folder: Path, num_ranks: int) -> list[list[list[Mark]]]:
    """Return the marks by step and rank."""
    ranks = [
        json.loads((folder / f"times{rank}.json").read_text())["steps"]
        for rank in range(num_ranks)
    ]
    return [
        [
            [
                (kind, stage, replica, micro_batch, start / 1e9, end / 1e9)
                for kind, stage, replica, micro_batch, start, end in rows[step]
            ]
            for rows in ranks
        ]
        for step in range(len(ranks[0]))
    ]
