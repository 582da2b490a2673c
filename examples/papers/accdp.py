"""AccDP: several processes on one GPU, ResNet-18 on images of 256 x 256, simulated.

python examples/papers/accdp.py

`SAMPLES` are those of a process in one step.
"""

import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from resnet import BasicBlock, ResNet

SAMPLES = int(os.environ.get("SAMPLES", "2"))


def model() -> nn.Module:
    return ResNet(BasicBlock, [2, 2, 2, 2], num_classes=1000)


def example_inputs() -> tuple[Tensor]:
    return (torch.randn(SAMPLES, 3, 256, 256),)


def example_target() -> Tensor:
    return torch.zeros(SAMPLES, dtype=torch.long)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


if __name__ == "__main__":
    from compare import main

    main(__file__)
