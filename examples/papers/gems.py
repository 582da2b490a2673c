"""GEMS: a thousand layers on 1,024 GPUs, and tiles of 1024 x 1024 pixels, simulated.

python examples/papers/gems.py

`NETWORK` is resnet1k, ResNet-1001 v2 on crops of 32 x 32 pixels, or resnet110,
ResNet-110 v2 on one tile at a time.
"""

import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from resnet import ResNetV2

DEPTH, CLASSES, BATCH, SIZE = {
    "resnet1k": (1001, 10, 8, 32),
    "resnet110": (110, 2, 1, 1024),
}[os.environ.get("NETWORK", "resnet1k")]


def model() -> nn.Module:
    return ResNetV2(DEPTH, CLASSES)


def example_inputs() -> tuple[Tensor]:
    return (torch.randn(BATCH, 3, SIZE, SIZE),)


def example_target() -> Tensor:
    return torch.zeros(BATCH, dtype=torch.long)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


if __name__ == "__main__":
    from compare import main

    main(__file__)
