"""Train a GPT-2 on two ranks with weights in parts: gemsc and torch's fully_shard.

python benchmarks/fsdp.py [--quick] [--models "gpt untied 256,gpt untied 512"]
                          [--micro-batches 1,2] [--stages 6] [--rounds 7]

Both are two replicas, with one thread each, on the same data. torch gathers the weights
of a block before it runs, gemsc those of a stage, of which each rank has `--stages`:
`--data 2 --schedule interleaved --placement looped --shard weights`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from contenders import compile_job
from pipeline import ALONE, HEADER, lines, measure

OURS = ("gemsc off", "gemsc optimizer", "gemsc gradients", "gemsc weights")
THEIRS = "torch FSDP2"


def main() -> None:
    """Compile, measure, print."""
    parser = argparse.ArgumentParser(description="gemsc against fully_shard")
    parser.add_argument("--quick", action="store_true", help="tiny: does it run?")
    parser.add_argument("--models", default="gpt untied 256,gpt untied 512")
    parser.add_argument("--micro-batches", default="1,2")
    parser.add_argument("--stages", type=int, default=6, help="of each rank")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="in each turn")
    parser.add_argument(
        "--patience", type=float, default=120, help="seconds to wait for quiet rounds"
    )
    options = parser.parse_args()
    if options.quick:
        options.models, options.micro_batches = "gpt untied 64", "1"
        options.rounds, options.patience = 2, 0
    print(HEADER, flush=True)
    for model in options.models.split(","):
        for count in map(int, options.micro_batches.split(",")):
            with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                jobs = {}
                for name in OURS:
                    shard = name.split()[1]
                    choice = {
                        "data": 2,
                        "placement": "looped",
                        "chunks": options.stages,
                        "shard": shard,
                    }
                    place = Path(folder) / shard
                    job = compile_job(model, 2, count, "interleaved", place, **choice)
                    jobs[name] = "gemsc", job
                jobs |= {ALONE: ("alone", job), THEIRS: ("fsdp", job)}
                figures = measure(jobs, options.rounds, options.steps, options.patience)
            print(lines(figures, OURS, THEIRS), flush=True)


if __name__ == "__main__":
    main()
