"""Predicted against measured seconds of stages, and the balance that follows.

python benchmarks/time_model.py [--hardware my.toml] [--quick] [--only resnet50]

Five networks at three sizes each, cut into 2 to 4 stages; one thread. Measured are
medians of some runs of each stage, forward and backward, at three times: the least
counts, since other work on a machine only adds to it. A stage is measured again
if other processes took more than a tenth of a core meanwhile. The networks play no part
in the calibration, whose operators have random shapes.

balance: the slowest stage (measured) of the cuts chosen by prediction, over that of the
cuts chosen by measuring each block; both are measured in turn, and the median of some
pairs counts.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import cases  # noqa: F401  (makes the examples importable)
import torch
import torch.nn.functional as F
from resnet import Bottleneck, ResNet
from torch import Tensor, nn

from gemsc.base.plain_forward import with_threads
from gemsc.compiler import trace
from gemsc.costs.hardware import read_hardware
from gemsc.costs.profile import BlockTimes, time_nodes
from gemsc.ir.program import Program, Stage
from gemsc.launch.launch import launch
from gemsc.passes.balance_stages import BalanceStages
from gemsc.passes.manager import Runs
from gemsc.passes.time_blocks import TimeBlocks

MOMENTS = 3  # in which each case is measured
BUSY = 0.1  # cores that others may take while something is measured


class Vgg(nn.Sequential):
    """Convolutions of 3 x 3 in five groups, then three linear layers."""

    def __init__(self, width: int, depths: Sequence[int] = (2, 2, 3, 3, 3)) -> None:
        layers: list[nn.Module] = []
        channels = 3
        for level, depth in enumerate(depths):
            wide = width * min(8, 2**level)
            for _ in range(depth):
                layers += [nn.Conv2d(channels, wide, 3, padding=1), nn.ReLU()]
                channels = wide
            layers.append(nn.MaxPool2d(2))
        layers += [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 1024)]
        layers += [nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)]
        super().__init__(*layers)


class UNet(nn.Module):
    """Levels of two convolutions with BatchNorm, pooled, and back with skips."""

    def __init__(self, dims: int, width: int, levels: int = 4) -> None:
        super().__init__()
        conv = (nn.Conv2d, nn.Conv3d)[dims - 2]
        up = (nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 2]
        norm = (nn.BatchNorm2d, nn.BatchNorm3d)[dims - 2]
        self.pool = (nn.MaxPool2d, nn.MaxPool3d)[dims - 2](2)

        def level(before: int, after: int) -> nn.Module:
            layers = []
            for channels in (before, after):
                layers += [conv(channels, after, 3, padding=1), norm(after), nn.ReLU()]
            return nn.Sequential(*layers)

        widths = [width * 2**i for i in range(levels)]
        self.down = nn.ModuleList(
            level(a, b) for a, b in zip([1, *widths], widths, strict=False)
        )
        pairs = list(zip(widths[1:], widths, strict=False))[::-1]
        self.ups = nn.ModuleList(up(a, b, 2, stride=2) for a, b in pairs)
        self.back = nn.ModuleList(level(2 * b, b) for _, b in pairs)
        self.last = conv(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return one channel of the same size."""
        skips = []
        for index, level in enumerate(self.down):
            x = level(self.pool(x) if index else x)
            skips.append(x)
        skips.pop()
        for up, level in zip(self.ups, self.back, strict=True):
            x = level(torch.cat([up(x), skips.pop()], 1))
        return self.last(x)


class Transformer(nn.Module):
    """Token embedding and encoder layers, as in torch.nn, without dropout."""

    def __init__(self, width: int, depth: int, words: int = 8000) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 100)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of 100 classes."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


class Layer(nn.Module):
    """Attention and two linear layers, each with a norm before and a sum after."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


@dataclass(frozen=True)
class Case:
    """A network at one size."""

    name: str
    stages: int
    make: Callable[[], nn.Module]
    input: Callable[[], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    target: Callable[[Tensor], Tensor]


def classes(output: Tensor) -> Tensor:
    """Return targets for cross entropy."""
    return torch.randint(10, output.shape[:1])


def resnet(stages: int, batch: int, size: int) -> Case:
    """Return a ResNet-50 for pictures of `size` x `size`."""
    return Case(
        f"resnet50 {batch}x{size}",
        stages,
        lambda: ResNet(Bottleneck, [3, 4, 6, 3]),
        lambda: torch.randn(batch, 3, size, size),
        F.cross_entropy,
        classes,
    )


def vgg(stages: int, width: int, batch: int, size: int) -> Case:
    """Return a VGG-16 whose first group has `width` channels."""
    return Case(
        f"vgg-{width} {batch}x{size}",
        stages,
        lambda: Vgg(width),
        lambda: torch.randn(batch, 3, size, size),
        F.cross_entropy,
        classes,
    )


def unet(stages: int, dims: int, width: int, batch: int, size: int) -> Case:
    """Return a U-Net for pictures or volumes."""
    return Case(
        f"unet{dims}d-{width} {batch}x{size}",
        stages,
        lambda: UNet(dims, width),
        lambda: torch.randn(batch, 1, *[size] * dims),
        F.mse_loss,
        torch.randn_like,
    )


def encoder(stages: int, width: int, depth: int, batch: int, length: int) -> Case:
    """Return a transformer encoder."""
    return Case(
        f"encoder-{width} {batch}x{length}",
        stages,
        lambda: Transformer(width, depth),
        lambda: torch.randint(8000, (batch, length)),
        F.cross_entropy,
        classes,
    )


CASES = (
    resnet(2, 8, 64),
    resnet(3, 4, 128),
    resnet(4, 2, 224),
    vgg(2, 16, 8, 64),
    vgg(3, 32, 4, 96),
    vgg(4, 64, 2, 128),
    unet(2, 2, 16, 4, 96),
    unet(3, 2, 32, 2, 128),
    unet(4, 2, 32, 4, 192),
    unet(2, 3, 8, 2, 24),
    unet(3, 3, 16, 1, 32),
    unet(4, 3, 16, 1, 48),
    encoder(2, 128, 4, 8, 64),
    encoder(3, 256, 6, 8, 128),
    encoder(4, 512, 4, 4, 256),
)
QUICK = (resnet(2, 2, 32), unet(2, 3, 4, 1, 16), encoder(2, 64, 2, 2, 16))


def others(interval: Callable[[], object]) -> float:
    """Run something; return how many cores other processes used meanwhile."""
    before, cpu, wall = _busy_seconds(), time.process_time(), time.perf_counter()
    interval()
    wall = time.perf_counter() - wall
    return (_busy_seconds() - before - time.process_time() + cpu) / wall


def _busy_seconds() -> float:
    with open("/proc/stat", encoding="ascii") as stat:
        user, nice, system, _, _, irq, soft = map(int, stat.readline().split()[1:8])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Bench:
    """One case, ready to be measured."""

    program: Program
    inputs: tuple[Tensor, ...]
    target: Tensor
    rounds: int

    def measure(self, groups: Sequence[Stage], tries: int = 3) -> list[BlockTimes]:
        """Return the times of stages, in a moment without others if there is one."""
        times: list[BlockTimes] = []

        def run() -> None:
            args = self.program, groups, self.inputs, self.target
            times[:] = time_nodes(*args, rounds=self.rounds)

        for _ in range(tries):
            if others(run) < BUSY:
                break
        return times

    def stages(self, program: Program, count: int) -> tuple[Stage, ...]:
        """Return the cuts that the compiler chooses for what it knows."""
        done = Runs()(program, BalanceStages(num_stages=count))
        return done.require_stages()


def slowest(times: Sequence[BlockTimes]) -> float:
    """Return the seconds of the slowest stage."""
    return max(t.forward + t.backward for t in times)


def in_program(stages: Sequence[Stage], program: Program) -> list[Stage]:
    """Return the same cuts of another graph of the same blocks."""
    blocks = program.blocks or ()
    return [
        replace(stage, blocks=tuple(blocks[b.index] for b in stage.blocks))
        for stage in stages
    ]


def prepare(case: Case, hardware: str, rounds: int) -> Bench:
    """Return the case, traced, its seconds predicted."""
    torch.manual_seed(0)
    model, x = case.make(), case.input()
    with torch.no_grad():
        target = case.target(model(x))
    machine = read_hardware(hardware)
    feed = {"loss": case.loss, "example_target": target, "check": False}
    program = trace(model, (x,), hardware=machine, **feed).program
    return Bench(program, (x,), target, rounds)


def less(moments: Sequence[Sequence[BlockTimes]]) -> list[BlockTimes]:
    """Return the least times of each stage."""
    return [
        BlockTimes(min(t.forward for t in times), min(t.backward for t in times))
        for times in zip(*moments, strict=True)
    ]


def show_errors(
    case: Case, stages: Sequence[Stage], measured: Sequence[BlockTimes]
) -> list[float]:
    """Print and return the errors of the predictions."""
    errors = []
    for stage, times in zip(stages, measured, strict=True):
        pairs = (
            ("forward", stage.total("forward_seconds"), times.forward),
            ("backward", stage.total("backward_seconds"), times.backward),
        )
        text = ""
        for name, said, took in pairs:
            errors.append(said / took - 1)
            text += (
                f"  {name} {1e3 * said:8.1f} {1e3 * took:8.1f} ms {errors[-1]:+6.1%}"
            )
        print(f"{case.name:<20} stage {stage.index}{text}", flush=True)
    return errors


def loss_of_balance(bench: Bench, stages: Sequence[Stage], pairs: int = 5) -> float:
    """Return how much slower the slowest stage is than if the blocks are measured."""
    time_blocks = TimeBlocks(bench.inputs, bench.target, rounds=bench.rounds)
    timed = Runs()(bench.program, time_blocks)
    best = in_program(bench.stages(timed, len(stages)), bench.program)
    if [len(s.blocks) for s in best] == [len(s.blocks) for s in stages]:
        return 0.0
    ratios = [
        slowest(bench.measure(stages)) / slowest(bench.measure(best))
        for _ in range(pairs)
    ]
    return statistics.median(ratios) - 1


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="predicted against measured seconds")
    parser.add_argument("--hardware", default="", help="name or file; default shipped")
    parser.add_argument("--only", default="", help="cases whose names begin so")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="tiny: does it run?")
    options = parser.parse_args()
    chosen = QUICK if options.quick else CASES
    errors: list[float] = []
    balances: list[float] = []
    with with_threads(1):
        rounds = 1 if options.quick else options.rounds
        cases = [case for case in chosen if case.name.startswith(options.only)]
        benches = [prepare(case, options.hardware, rounds) for case in cases]
        cuts = [
            bench.stages(bench.program, case.stages)
            for case, bench in zip(cases, benches, strict=True)
        ]
        moments = [
            [bench.measure(cut) for bench, cut in zip(benches, cuts, strict=True)]
            for _ in range(MOMENTS)
        ]
        for case, bench, cut, *times in zip(
            cases, benches, cuts, *moments, strict=True
        ):
            errors += show_errors(case, cut, less(times))
            balances.append(loss_of_balance(bench, cut))
            print(
                f"{case.name:<20} balance: {balances[-1]:+.1%} slower than by profiling"
            )
    sizes = [abs(error) for error in errors]
    bias = math.exp(statistics.fmean(math.log1p(error) for error in errors)) - 1
    print(
        f"{len(errors)} stage times: median error {statistics.median(sizes):.1%}, "
        f"worst {max(sizes):.1%}, mean {bias:+.1%}; balance at worst "
        f"{max(balances):+.1%}"
    )


if __name__ == "__main__":
    if "GLIBC_TUNABLES" in os.environ:
        main()
    else:  # with the ranks' setting of malloc
        sys.exit(launch(1, [sys.executable, *sys.argv]))
