"""Memory of a rank of a GPT-2 on shards: predicted, measured, and by the formula.

python benchmarks/shard_memory.py [--quick]

A row gives the predicted peak of the fullest rank, AdamW's state included, and how far
that is from what two steps on threads take; then the activations of one block,
predicted, measured, and by the formula, in units of the bytes of batch x length x
width: 4 + 12 / p over p shards, 2 + 14 / p where values between the regions are split
by tokens.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from cases import words
from gpt import Gpt, cross_entropy
from memory import MICRO_BATCHES, Model, adamw, measure, traced

from gemsc.compiler import Traced, lower
from gemsc.options import CompileOptions
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.training.verification import metered
from gemsc.runtime.transport.local import run_local
from gemsc.runtime.transport.transport import Transport

WIDTH, LENGTH, WORDS = 64, 128, 512
DEPTHS = 2, 6
ROWS = ((1, "whole"), (2, "whole"), (4, "whole"), (2, "sequence"), (4, "sequence"))
WHOLE = {"whole": 4, "sequence": 2}  # of a block's 16 values: what every rank keeps


@dataclass(frozen=True)
class Measured:
    """The peak of the fullest rank in bytes; activations predicted and measured."""

    peak: int
    error: float
    activations: tuple[int, int]


def small_gpt(depth: int) -> Model:
    """Return a GPT-2 with a micro-batch of 4 texts."""
    return Model(
        lambda: Gpt(WIDTH, 8, depth, WORDS, LENGTH),
        lambda batch: words(batch, LENGTH, WORDS),
        cross_entropy,
        adamw,
        4,
    )


def measured(model: Model, graph: Traced, shards: int, trunk: str) -> Measured:
    """Compile for so many shards and train on threads."""
    options = CompileOptions(ranks=shards, micro_batches=MICRO_BATCHES)
    if shards > 1:
        options = replace(options, shards=(str(shards),), trunk=trunk)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        program = lower(graph, options)
        program.write(folder)
        highest = max(measure(model, Path(folder), shards))
        kept = max(activations(model, Path(folder), shards))
    plan = program.plan
    (peak,), (predicted,) = plan.peak_bytes, plan.activation_bytes
    return Measured(peak, peak / highest - 1, (predicted, kept))


def activations(model: Model, directory: Path, ranks: int) -> list[int]:
    """Train a step on threads; return what each rank kept for backwards at most."""
    inputs, target = model.sample(model.size * MICRO_BATCHES)

    def work(transport: Transport) -> int:
        trainer = Trainer(directory, transport, device=torch.device("cpu"))
        meter = metered(trainer.worker)
        trainer.step(inputs, target)
        return meter.peak_bytes

    return run_local(ranks, work, timeout=600)


def row(models: list[Model], graphs: list[Traced], shards: int, trunk: str) -> str:
    """Return the figures of the deepest model, and of a block by their difference."""
    pairs = zip(models, graphs, strict=True)
    few, many = (measured(model, graph, shards, trunk) for model, graph in pairs)
    unit = 4 * models[0].size * LENGTH * WIDTH * (DEPTHS[1] - DEPTHS[0])
    predicted, real = (
        (more - less) / unit
        for less, more in zip(few.activations, many.activations, strict=True)
    )
    formula = WHOLE[trunk] + (16 - WHOLE[trunk]) / shards
    peak = f"{many.peak / 2**20:>9.2f}{100 * many.error:>+8.2f}%"
    return (
        f"{shards:>6}  {trunk:<12}{peak}   "
        f"{predicted:<19.2f}{real:>9.2f}{formula:>9.2f}"
    )


def main() -> None:
    """Compile, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two rows only")
    options = parser.parse_args()
    print(
        f"{'shards  trunk':<20}{'peak MiB':>9}{'error':>9}   "
        f"{'a block: predicted':<19}{'measured':>9}{'formula':>9}"
    )
    models = [small_gpt(depth) for depth in DEPTHS]
    graphs = [traced(model) for model in models]
    for shards, trunk in ROWS[:2] if options.quick else ROWS:
        print(row(models, graphs, shards, trunk), flush=True)


if __name__ == "__main__":
    main()
