"""Activation memory of each rank with pictures split over 1, 2 and 4 tiles.

python benchmarks/tiles.py [--sizes 1024,2048] [--models unet,resnet110v2]

One picture in a micro-batch, one micro-batch, all ranks one grid. The peak is that of
the peak-memory tile, as compilation counts it storage for storage on fake tensors:
pictures need not fit into this machine's memory. Where all tiles together need at most
`--measure` GiB, a training step is made as well, on threads, and what is alive is
counted: in brackets, relative to what was predicted.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from cases import masked_pictures
from resnet import ResNetV2
from torch import Tensor, nn
from unet_histology import model as unet

from gemsc.codegen.package import write_directory
from gemsc.compiler import lower, trace
from gemsc.options import CompileOptions
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.training.verification import metered
from gemsc.runtime.transport.local import run_local
from gemsc.runtime.transport.transport import Transport

TILES = {1: "", 2: "2x1", 4: "2x2"}


@dataclass(frozen=True)
class Model:
    """A model, one sample of a size, and its loss."""

    make: Callable[[], nn.Module]
    sample: Callable[[int], tuple[tuple[Tensor, ...], Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]


def labelled(size: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return a picture and its class."""
    return (torch.randn(1, 3, size, size),), torch.tensor([0])


def masked(size: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return a picture and its mask."""
    (_,), mask = masked_pictures(1)
    shape = (*mask.shape[:-2], size, size)
    return (torch.randn(1, 3, size, size),), torch.zeros(shape, dtype=mask.dtype)


MODELS = {
    "resnet110v2": Model(lambda: ResNetV2(110), labelled, F.cross_entropy),
    "of half width": Model(lambda: ResNetV2(110, width=8), labelled, F.cross_entropy),
    "unet": Model(lambda: unet.UNet(base=8), masked, unet.loss),
}


def row(name: str, size: int, largest: float) -> str:
    """Return the line of one model and size; measured up to the `largest` bytes."""
    model = MODELS[name]
    inputs, target = model.sample(size)
    traced = trace(
        model.make(), inputs, loss=model.loss, example_target=target, check=False
    )
    cells, whole = [], 0
    for count, grid in TILES.items():
        options = CompileOptions(
            ranks=count, tiles=tuple(filter(None, [grid])), micro_batches=1
        )
        program = lower(traced, options)
        peak = max(program.plan.activation_bytes)
        whole = whole or peak
        text = f"{peak / 2**20:>12.1f}"
        if count > 1:
            text += f"{peak / whole:>8.3f}"
        if whole <= largest:
            with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                write_directory(program.compilation, Path(folder))
                actual = measured(Path(folder), count, (inputs, target))
            text += f" ({actual / peak:.3f})"
        cells.append(text)
    return f"{name:<14}{size:>6}" + "".join(cells)


def measured(
    directory: Path, ranks: int, sample: tuple[tuple[Tensor, ...], Tensor]
) -> int:
    """Return the activations alive at most on any rank in a training step."""

    def work(transport: Transport) -> int:
        trainer = Trainer(directory, transport, device=torch.device("cpu"))
        meter = metered(trainer.worker)
        trainer.step(*sample)
        return meter.peak_bytes

    torch.set_num_threads(1)
    return max(run_local(ranks, work, timeout=600))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--sizes", default="1024,2048")
    parser.add_argument(
        "--measure", type=float, default=0.0, help="GiB of all tiles, at most"
    )
    chosen = parser.parse_args()
    print(f"{'MiB':<14}{'size':>6}{'1 rank':>12}{'2 tiles':>12}{'of it':>8}"
          f"{'4 tiles':>12}{'of it':>8}")  # fmt: skip
    for name in chosen.models.split(","):
        for size in map(int, chosen.sizes.split(",")):
            print(row(name, size, chosen.measure * 2**30), flush=True)


if __name__ == "__main__":
    main()
