"""ResNet-1001 v2 on crops of 32 x 32: a thousand layers, to be simulated."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from resnet import ResNetV2

BATCH = 8  # of one micro-batch


def model() -> nn.Module:
    return ResNetV2(depth=1001)


def example_inputs() -> tuple[Tensor]:
    return (torch.randn(BATCH, 3, 32, 32),)


def example_target() -> Tensor:
    return torch.zeros(BATCH, dtype=torch.long)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)
