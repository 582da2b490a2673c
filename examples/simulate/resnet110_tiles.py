"""ResNet-110 v2 on one tile of 1024 x 1024 pixels at a time, to be simulated."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from resnet import ResNetV2


def model() -> nn.Module:
    return ResNetV2(depth=110, num_classes=2)


def example_inputs() -> tuple[Tensor]:
    return (torch.randn(1, 3, 1024, 1024),)


def example_target() -> Tensor:
    return torch.zeros(1, dtype=torch.long)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)
