"""Hy-Fi: pictures of 1024 x 1024 pixels in tiles on up to 2,048 GPUs, simulated.

python examples/papers/hyfi.py

`NETWORK` is amoebanet, AmoebaNet-D of 18 cells and 416 filters, or resnet110.
"""

import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from amoebanet.model import AmoebaNet
from resnet import ResNetV2

NETWORK = os.environ.get("NETWORK", "resnet110")
SIZE = int(os.environ.get("SIZE", "1024"))


def model() -> nn.Module:
    if NETWORK == "amoebanet":
        return AmoebaNet(num_cells=18, width=416, stem_cells=1)
    return ResNetV2(depth=110)


def example_inputs() -> tuple[Tensor]:
    return (torch.randn(1, 3, SIZE, SIZE),)


def example_target() -> Tensor:
    return torch.zeros(1, dtype=torch.long)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


if __name__ == "__main__":
    from compare import main

    main(__file__)
