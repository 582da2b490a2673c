"""Memory of each rank, predicted against measured by counting live storages.

python benchmarks/memory.py [--quick] [--models unet,resnet50] [--recompute all]
                            [--shard-optimizer]

Each program trains three steps on threads of this process. Counted is every tensor that
is alive on a rank; what a library takes inside of an operation is not. The table shows
the predicted peak of the peak-memory rank and the worst error of any rank. With
--shard-optimizer only schedules whose replicas share the optimizer's state are run.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from cases import CASES, masked_pictures, pictures, texts, vectors
from densenet import DenseCNN
from encoder import Encoder
from mlp import MLP
from peak_tensors import peak_of_steps
from resnet import BasicBlock, ResNet
from torch import Tensor, nn
from unet_histology import model as unet

from gemsc.base.elementwise import OptimizerFactory
from gemsc.compiler import Traced, lower, trace
from gemsc.options import CompileOptions
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.transport.local import run_local
from gemsc.runtime.transport.transport import Transport

RANKS = (2, 4)
SCHEDULES = ("gpipe", "1f1b", "master")
MICRO_BATCHES = 4


@dataclass(frozen=True)
class Model:
    """A model with one micro-batch of `size` samples, and its optimizer."""

    make: Callable[[], nn.Module]
    sample: Callable[[int], tuple[tuple[Tensor, ...], Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: OptimizerFactory
    size: int = 2


def sgd(parameters: object) -> torch.optim.Optimizer:
    """Plain SGD: no state."""
    return torch.optim.SGD(parameters, lr=0.01)


def momentum(parameters: object) -> torch.optim.Optimizer:
    """SGD with momentum: one copy of the weights."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def adamw(parameters: object) -> torch.optim.Optimizer:
    """AdamW: two copies of the weights."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def vgg() -> nn.Module:
    """Return 3 x 3 convolutions in rows, a pool after each row, then a classifier."""
    layers: list[nn.Module] = []
    channels = 3
    for width, depth in ((32, 2), (64, 2), (128, 3)):
        for _ in range(depth):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    head = [nn.Flatten(), nn.Linear(128 * 8 * 8, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(*layers, *head)


def volumes() -> nn.Module:
    """Return 3-D convolutions with group norm and SiLU."""
    layers: list[nn.Module] = []
    channels = 1
    for width, stride in ((16, 1), (16, 1), (32, 2), (32, 1), (64, 2), (64, 1)):
        layers += [
            nn.Conv3d(channels, width, 3, stride, padding=1),
            nn.GroupNorm(4, width),
            nn.SiLU(),
        ]
        channels = width
    pool = [nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*layers, *pool)


def volume_sample(batch: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return volumes of 24 x 24 x 24 and their classes."""
    return (torch.randn(batch, 1, 24, 24, 24),), torch.randint(10, (batch,))


def small_unet() -> nn.Module:
    """Return the U-Net of the examples with 8 channels."""
    return unet.UNet(base=8)


MODELS = {
    "mlp": Model(
        lambda: MLP(inputs=256, width=512, depth=8), vectors, F.cross_entropy, adamw, 16
    ),
    "wide mlp": Model(
        lambda: MLP(inputs=256, width=128, depth=12), vectors, F.cross_entropy, sgd, 256
    ),
    "vgg": Model(vgg, pictures(64), F.cross_entropy, momentum),
    "resnet18": Model(
        lambda: ResNet(BasicBlock, [2, 2, 2, 2], width=32),
        pictures(64),
        F.cross_entropy,
        momentum,
    ),
    "resnet50": Model(
        CASES["resnet50"].make, pictures(64), F.cross_entropy, momentum, 4
    ),
    "resnet20v2": Model(CASES["resnet20v2"].make, pictures(64), F.cross_entropy, adamw),
    "resnet110v2": Model(
        CASES["resnet110"].make, pictures(32), F.cross_entropy, sgd, 4
    ),
    "densenet": Model(
        lambda: DenseCNN(num_layers=12, growth=12), pictures(32), F.cross_entropy, adamw
    ),
    "unet 8": Model(small_unet, masked_pictures, unet.loss, momentum),
    "unet 16": Model(CASES["unet"].make, masked_pictures, unet.loss, adamw),
    "3-d convolutions": Model(volumes, volume_sample, F.cross_entropy, adamw),
    "encoder": Model(
        lambda: Encoder(dropout=0.0), texts, CASES["encoder"].loss, adamw, 8
    ),
}


def traced(model: Model) -> Traced:
    """Trace a model with its optimizer."""
    torch.manual_seed(0)
    inputs, target = model.sample(model.size)
    return trace(
        model.make(),
        inputs,
        loss=model.loss,
        example_target=target,
        optimizer=model.optimizer,
        check=False,
    )


def measure(model: Model, directory: Path, ranks: int) -> list[int]:
    """Train on threads; return the most bytes that each rank held."""
    inputs, target = model.sample(model.size * MICRO_BATCHES)

    def work(transport: Transport) -> int:
        trainer = Trainer(
            directory,
            transport,
            optimizer=model.optimizer,
            device=torch.device("cpu"),
        )
        return peak_of_steps(trainer, inputs, target)

    return run_local(ranks, work, timeout=600)


def main() -> None:
    """Compile, run, print a row for each model."""
    parser = argparse.ArgumentParser(description="predicted and measured memory")
    parser.add_argument("--quick", action="store_true", help="tiny: does it run?")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--recompute", default="", help="names, or all")
    parser.add_argument("--shard-optimizer", action="store_true")
    options = parser.parse_args()
    names = ["wide mlp"] if options.quick else options.models.split(",")
    recompute = tuple(filter(None, options.recompute.split(",")))
    schedules = ("chimera", "master") if options.shard_optimizer else SCHEDULES
    cases = [(ranks, schedule) for ranks in RANKS for schedule in schedules]
    head = " ".join(f"{f'{ranks} {schedule}':>16}" for ranks, schedule in cases)
    print(f"{'predicted MiB, worst error':<28}{head}")
    errors = []
    for name in names:
        model = MODELS[name]
        graph = traced(model)
        cells = []
        for ranks, schedule in cases:
            choice = CompileOptions(
                ranks=ranks,
                schedule=schedule,
                micro_batches=MICRO_BATCHES,
                recompute=recompute,
                shard="optimizer" if options.shard_optimizer else "off",
            )
            with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                program = lower(graph, choice)
                program.write(folder)
                measured = measure(model, Path(folder), ranks)
            predicted = program.plan.peak_bytes
            pairs = zip(predicted, measured, strict=True)
            worst = max((p / m - 1 for p, m in pairs), key=abs)
            errors.append(abs(worst))
            cells.append(f"{max(predicted) / 2**20:7.2f} {100 * worst:+7.2f}%")
        print(f"{name:<28}" + " ".join(f"{c:>16}" for c in cells), flush=True)
    under = sum(error < 0.02 for error in errors)
    print(f"worst error {100 * max(errors):.2f} %; {under} of {len(errors)} under 2 %")


if __name__ == "__main__":
    main()
