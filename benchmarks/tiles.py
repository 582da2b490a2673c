"""Activation memory of each rank with pictures split over 1, 2 and 4 tiles, predicted.

python benchmarks/tiles.py [--sizes 1024,2048] [--models unet,resnet110v2]

One picture in a micro-batch, one micro-batch, all ranks one grid. The peak is that of
the fullest tile, as compilation counts it storage for storage on fake tensors:
pictures need not fit into this machine's memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from cases import masked_pictures
from resnet import ResNetV2
from torch import Tensor, nn
from unet_histology import model as unet

from gemsc.compiler import trace
from gemsc.options import CompileOptions
from gemsc.staging import schedule_stages

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
    "unet": Model(lambda: unet.UNet(base=8), masked, unet.loss),
}


def row(name: str, size: int) -> str:
    """Return the line of one model and size."""
    model = MODELS[name]
    inputs, target = model.sample(size)
    traced = trace(
        model.make(), inputs, loss=model.loss, example_target=target, check=False
    )
    peaks = []
    for count, grid in TILES.items():
        options = CompileOptions(
            ranks=count, tiles=tuple(filter(None, [grid])), micro_batches=1
        )
        done = schedule_stages(traced, options)
        peaks.append(max(done.timeline.peak_activation_bytes))
    cells = [f"{peaks[0] / 2**20:>12.1f}"]
    cells += [f"{p / 2**20:>12.1f}{p / peaks[0]:>8.3f}" for p in peaks[1:]]
    return f"{name:<14}{size:>6}" + "".join(cells)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--sizes", default="1024,2048")
    chosen = parser.parse_args()
    print(f"{'MiB':<14}{'size':>6}{'1 rank':>12}{'2 tiles':>12}{'of it':>8}"
          f"{'4 tiles':>12}{'of it':>8}")  # fmt: skip
    for name in chosen.models.split(","):
        for size in map(int, chosen.sizes.split(",")):
            print(row(name, size), flush=True)


if __name__ == "__main__":
    main()
