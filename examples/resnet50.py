"""ResNet-50: which of ten photographs is this crop from?"""

import torch
import torch.nn.functional as F
from resnet import Bottleneck, Photographs, ResNet
from torch import Tensor, nn
from torch.utils.data import Dataset

SIZE = 128


def model() -> nn.Module:
    return ResNet(Bottleneck, [3, 4, 6, 3])


def example_inputs() -> tuple[Tensor]:
    return (torch.randn(2, 3, SIZE, SIZE),)


def example_target() -> Tensor:
    return torch.tensor([0, 1])


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def metrics(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    return {"accuracy": (output.argmax(1) == target).float().mean()}


def optimizer(params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.002, momentum=0.9, weight_decay=1e-4)


def dataset() -> Dataset:
    return Photographs(SIZE)
