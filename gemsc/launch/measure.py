"""Measure a program: start it for a few steps; return the median one, or the load."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from gemsc.errors import GemscError
from gemsc.launch.start import start
from gemsc.plan import Plan

# kind, stage, replica, micro-batch, start, end: seconds from the begin of the step;
# -1 where there is no such thing
Mark = tuple[str, int, int, int, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a program reaches and takes on this machine.

    samples_per_second: of all ranks together.
    cores: of the CPU in use on average, by all ranks.
    gpu_used: the share of its time that the busiest GPU runs kernels, None: not known.
    peak_bytes: the memory of the rank that takes most.
    """

    samples_per_second: float
    cores: float
    gpu_used: float | None
    peak_bytes: int


def measure_load(directory: Path, num_steps: int) -> Load:
    """Let a program train for some rounds of steps, and return what the median took.

    Raises:
        GemscError: as `measure`.
    """
    plan = trainable(directory)
    with tempfile.TemporaryDirectory(prefix="gemsc-load-") as name:
        _start(directory, "--time-into", name, num_steps)
        ranks = [
            json.loads((Path(name) / f"load{rank}.json").read_text())
            for rank in range(plan.ranks)
        ]
    rounds = [max(row) for row in zip(*(r["seconds"] for r in ranks), strict=True)]
    used = [rank["gpu_used"] for rank in ranks if rank["gpu_used"] is not None]
    return Load(
        samples_per_second=num_steps * plan.batch_size / median(rounds),
        cores=sum(rank["cpu_seconds"] for rank in ranks) / sum(rounds),
        gpu_used=max(used, default=None),
        peak_bytes=max(rank["peak_bytes"] for rank in ranks),
    )


def measure(directory: Path, num_steps: int, device: str = "auto") -> list[list[Mark]]:
    """Return, for each rank, what it did and when in the step of median length.

    `device` is that of `gemsc run`: cpu, cuda, or what there is.

    Raises:
        GemscError: the program cannot train or has no source, its steps have phases, or
            a rank failed.
    """
    plan = trainable(directory)
    if plan.phases:
        raise GemscError(
            "--measured draws the times of one update, but a step has several phases",
            help="leave out --measured to see the prediction",
        )
    with tempfile.TemporaryDirectory(prefix="gemsc-times-") as name:
        _start(directory, "--record-into", name, num_steps, device)
        steps = _read(Path(name), plan.ranks)
    steps.sort(key=lambda rows: max(mark[5] for row in rows for mark in row))
    return steps[(len(steps) - 1) // 2]


def trainable(directory: Path) -> Plan:
    """Return the plan of a program that trains on its example inputs.

    Raises:
        GemscError: it has no loss, or its source is not in a file.
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
    return plan


def _start(
    directory: Path, option: str, folder: str, num_steps: int, device: str = "auto"
) -> None:
    words = [option, folder, "--steps", str(num_steps), "--device", device]
    code = start(directory, words)
    if code != 0:
        raise GemscError(
            f"the ranks ended with exit code {code}", help="see the report above"
        )


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
