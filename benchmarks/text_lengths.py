"""Text of real lengths: batches of three shapes, and all padded to the longest.

    python benchmarks/text_lengths.py            # some minutes on two cores
    python benchmarks/text_lengths.py --quick

Trains the same small language model on the same lines of Python's library
(`examples/lines.py`) on two ranks, for one epoch each, in turn. Tokens are bytes of
lines: none of them is padding. By how much it should be faster is by the tokens that
are computed, and by the predicted steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gemsc.plan import Plan
from gemsc.user_model import load_user_model

GEMSC = Path(sys.executable).with_name("gemsc")
MODEL = Path(__file__).parents[1] / "examples" / "lines.py"
LENGTHS = (32, 64, 128)


@dataclass
class Way:
    """One way to pad: its program, and what its runs took."""

    name: str
    folder: Path
    tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens of lines a second."""
        return self.tokens / self.seconds


def gemsc(*words: object) -> None:
    """Run the command; end with what it says if it fails."""
    done = subprocess.run(
        [GEMSC, *map(str, words)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


def main() -> None:
    """Compile, train in turn, and print the rates."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    lines, rounds = (640, 1) if quick else (3200, 2)
    with tempfile.TemporaryDirectory(prefix="gemsc-lengths-") as name:
        ways = [
            Way("three shapes", Path(name, "three")),
            Way("the longest", Path(name, "one")),
        ]
        for way, lengths in zip(ways, (LENGTHS, LENGTHS[-1:]), strict=True):
            constants = "--set", f"LENGTHS={lengths}", "--set", f"LINES={lines}"
            options = "--ranks", 2, "--micro-batches", 4, *constants
            gemsc("compile", MODEL, *options, "--no-check", "-o", way.folder)
        data = load_user_model(str(MODEL), constants={"LINES": str(lines)})
        sizes = [len(line) for line, _ in data.make_dataset()]
        for number in range(rounds):
            for way in ways:
                run = way.folder / f"run{number}"
                gemsc("run", way.folder, "--save", run, "--checkpoint-every", "never")
                add(way, run, sizes)
        report(ways, sizes)


def add(way: Way, run: Path, sizes: list[int]) -> None:
    """Count the tokens and seconds of a run but for its first steps of each shape."""
    batch, seen = Plan.read(way.folder / "plan.toml").batch_size, set[str]()
    for line in (run / "log.jsonl").read_text().splitlines():
        step = json.loads(line)
        if step["event"] == "step" and step.get("shape", "128") in seen:
            way.tokens += batch * mean_length(step.get("shape"), sizes)
            way.seconds += step["seconds"]
        seen |= {step.get("shape", "128")} if step["event"] == "step" else set()


def mean_length(shape: str | None, sizes: list[int]) -> float:
    """Return the mean length of the lines that are in batches of a shape."""
    bounds = dict(zip(map(str, LENGTHS), (0, *LENGTHS), strict=False))
    low, high = (0, LENGTHS[-1]) if shape is None else (bounds[shape], int(shape))
    fitting = [size for size in sizes if low < size <= high]
    return sum(fitting) / len(fitting)


def report(ways: list[Way], sizes: list[int]) -> None:
    """Print the rates, and what their ratio should be."""
    three, one = ways
    padded = [min(length for length in LENGTHS if length >= size) for size in sizes]
    plan = Plan.read(three.folder / "plan.toml")
    longest = Plan.read(one.folder / "plan.toml")
    whole = longest.step_seconds + longest.ending_seconds
    steps = {int(shape.name): shape.step_seconds for shape in plan.shapes}
    predicted = whole / (sum(steps[size] for size in padded) / len(sizes))
    print(f"{len(sizes)} lines of {sum(sizes) / len(sizes):.1f} bytes")
    for way in ways:
        print(f"padded to {way.name:12}  {way.rate:8.0f} tokens/s")
    print(
        f"ratio {three.rate / one.rate:.2f}; by the tokens computed "
        f"{LENGTHS[-1] * len(sizes) / sum(padded):.2f}, predicted {predicted:.2f}"
    )


if __name__ == "__main__":
    main()
