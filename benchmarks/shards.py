"""Train a GPT-2 over two ranks as shards: gemsc and torch's parallelize_module.

python benchmarks/shards.py [--quick] [--models "gpt 256,gpt 512"] [--micro-batches 1,4]
                            [--trunks whole,batch,sequence] [--rounds 7]

Both cut heads, hidden features and words, with one thread for each rank, on the same
data; torch's residual stream is whole on every rank. `one process` is plain PyTorch
with one thread.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from contenders import compile_job
from pipeline import ALONE, HEADER, lines, measure

THEIRS = "torch shards"


def main() -> None:
    """Compile, measure, print."""
    parser = argparse.ArgumentParser(description="gemsc against parallelize_module")
    parser.add_argument("--quick", action="store_true", help="tiny: does it run?")
    parser.add_argument("--models", default="gpt 256,gpt 512")
    parser.add_argument("--micro-batches", default="1,4")
    parser.add_argument("--trunks", default="whole,batch,sequence")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="in each turn")
    parser.add_argument(
        "--patience", type=float, default=120, help="seconds to wait for quiet rounds"
    )
    options = parser.parse_args()
    if options.quick:
        options.models, options.micro_batches = "gpt 64", "2"
        options.rounds, options.patience = 2, 0
    print(HEADER, flush=True)
    trunks = options.trunks.split(",")
    for model in options.models.split(","):
        for count in map(int, options.micro_batches.split(",")):
            with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                jobs = {}
                for trunk in trunks:
                    place = Path(folder) / trunk
                    choice = {"shards": "2", "trunk": trunk}
                    job = compile_job(model, 2, count, "1f1b", place, **choice)
                    jobs[f"gemsc {trunk}"] = "gemsc", job
                jobs |= {ALONE: ("alone", job), THEIRS: ("shards", job)}
                figures = measure(jobs, options.rounds, options.steps, options.patience)
            ours = tuple(f"gemsc {trunk}" for trunk in trunks)
            print(lines(figures, ours, THEIRS), flush=True)


if __name__ == "__main__":
    main()
