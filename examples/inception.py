"""A small Inception network: which of ten photographs is this crop from?

Each block has four branches side by side, joined along the channels (Szegedy et al.,
Going Deeper with Convolutions, 2014): `--ranks 2 --branches 2` shares them out.
"""

import torch
import torch.nn.functional as F
from resnet import Photographs
from torch import Tensor, nn
from torch.utils.data import Dataset

SIZE = 64


def conv(inputs: int, outputs: int, kernel: int) -> nn.Module:
    layer = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU())


class Block(nn.Module):
    def __init__(self, inputs: int, width: int):
        super().__init__()
        few = width // 4
        self.one = conv(inputs, width, 1)
        self.three = nn.Sequential(conv(inputs, width, 1), conv(width, 2 * width, 3))
        self.five = nn.Sequential(conv(inputs, few, 1), conv(few, 2 * few, 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(inputs, 2 * few, 1))

    def forward(self, x: Tensor) -> Tensor:  # to 4 * width channels
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1)


def model(width: int = 16) -> nn.Module:
    blocks: list[nn.Module] = [conv(3, 4 * width, 3)]
    for factor in (1, 2, 4):
        inputs = 4 * width * max(1, factor // 2)
        blocks += [nn.MaxPool2d(2), Block(inputs, factor * width)]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16 * width, 10))
    return nn.Sequential(*blocks, *head)


def example_inputs() -> tuple[Tensor]:
    return (torch.randn(4, 3, SIZE, SIZE),)


def example_target() -> Tensor:
    return torch.arange(4)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def metrics(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    return {"accuracy": (output.argmax(1) == target).float().mean()}


def optimizer(params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def dataset() -> Dataset:
    return Photographs(SIZE)
