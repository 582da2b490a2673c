"""Compile seconds against the size of the graph, for 4 ranks.

python benchmarks/compile_time.py [--quick] [--repeats 3]

Two families of models grow: ResNet v2 in depth, and a densely connected network, whose
layers read all earlier ones. The slope is that of log(seconds) over log(size): 1 is
linear. Each figure is the least of some rounds: others who use the machine can only add
to it. At the end, what a user waits for: `gemsc compile` on two examples.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import cases  # noqa: F401  (makes the examples importable)
import torch
import torch.nn.functional as F
from densenet import DenseCNN
from resnet import ResNetV2
from torch import nn

import gemsc
from gemsc.ir.program import Program
from gemsc.passes.base import Pass

RANKS = 4
EXAMPLES = Path(__file__).parents[1] / "examples"
DEPTHS = {
    "ResNetV2": (20, 38, 56, 110, 164, 218),
    "DenseCNN": (8, 16, 24, 32, 44, 58),
}
QUICK_DEPTHS = {"ResNetV2": (11, 20), "DenseCNN": (4, 8)}


@dataclass
class Compilation:
    """One compilation: the size of its graph, and where its seconds went."""

    nodes: int = 0
    edges: int = 0  # uses of a value; those of DenseCNN grow with the square of nodes
    seconds: float = 0.0
    writing: float = 0.0  # the program directory, with its picture by Graphviz
    passes: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def __call__(self, step: Pass, program: Program, seconds: float) -> None:
        """Observe a pass."""
        self.passes[step.name] += seconds
        nodes = program.graph.nodes
        self.nodes = max(self.nodes, len(nodes))
        self.edges = max(self.edges, sum(len(n.all_input_nodes) for n in nodes))


def build(family: str, depth: int) -> nn.Module:
    """Return a model of a family."""
    if family == "ResNetV2":
        return ResNetV2(depth=depth)
    return DenseCNN(num_layers=depth)


def compile_once(family: str, depth: int) -> Compilation:
    """Compile for 1F1B and 4 micro-batches, and write the program."""
    model = build(family, depth)
    inputs, target = (torch.randn(2, 3, 32, 32),), torch.tensor([0, 1])
    compilation = Compilation()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        started = time.perf_counter()
        program = gemsc.compile(
            model,
            inputs,
            loss=F.cross_entropy,
            example_target=target,
            ranks=RANKS,
            after_each=compilation,
        )
        compiled = time.perf_counter()
        program.write(folder)
        compilation.seconds = time.perf_counter() - started
        compilation.writing = time.perf_counter() - compiled
    return compilation


def slope(points: list[tuple[int, float]]) -> float:
    """Return the slope of the straight line through log-log points (least squares)."""
    xs, ys = zip(*((math.log(x), math.log(y)) for x, y in points), strict=True)
    return statistics.linear_regression(xs, ys).slope


def sweep(family: str, depths: tuple[int, ...], repeats: int) -> None:
    """Print the curve of a family: the least of `repeats` rounds."""
    rounds = [[compile_once(family, d) for d in depths] for _ in range(repeats)]
    points = []
    for depth, runs in zip(depths, zip(*rounds, strict=True), strict=True):
        run = min(runs, key=lambda candidate: candidate.seconds)
        points.append((run.nodes, run.nodes + run.edges, run.seconds))
        name, seconds = max(run.passes.items(), key=lambda item: item[1])
        print(
            f"{family}({depth})".ljust(16)
            + f"{run.nodes:>7}{run.edges:>7}{run.seconds:10.2f}"
            f"{1e3 * run.seconds / run.nodes:10.2f}"
            f"{sum(run.passes.values()):11.2f}{run.writing:11.2f}"
            f"   {name} {seconds:.2f}",
            flush=True,
        )
    nodes = slope([(nodes, seconds) for nodes, _, seconds in points])
    both = slope([(size, seconds) for _, size, seconds in points])
    print(f"slope {nodes:.2f} over nodes, {both:.2f} over nodes and edges", flush=True)


def command_seconds(example: str) -> float:
    """Return the seconds of the command line, start of Python included."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        words = ["compile", str(EXAMPLES / example), "-o", folder]
        main = "from gemsc.cli import main; main()"
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, "-c", main, *words, "--ranks", str(RANKS)],
            check=True,
            timeout=300,
            stdout=subprocess.DEVNULL,
        )
        return time.perf_counter() - started


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="compile seconds against graph nodes")
    parser.add_argument("--quick", action="store_true", help="tiny: does it run?")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    repeats = 1 if options.quick else options.repeats
    compile_once("DenseCNN", 4)  # what is imported or built only once
    print(
        f"{'model':<16}{'nodes':>7}{'edges':>7}{'seconds':>10}"
        f"{'ms/node':>10}{'in passes':>11}{'in writing':>11}   slowest pass"
    )
    for family, depths in (QUICK_DEPTHS if options.quick else DEPTHS).items():
        sweep(family, depths, repeats)
    if not options.quick:
        for example in ("resnet110.py", "densenet.py"):
            seconds = min(command_seconds(example) for _ in range(repeats))
            print(f"gemsc compile examples/{example} --ranks 4: {seconds:.1f} s")


if __name__ == "__main__":
    main()
