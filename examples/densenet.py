"""A densely connected network: every layer sees all earlier features of its block.

Huang et al., Densely Connected Convolutional Networks, 2017.
"""

import torch
import torch.nn.functional as F
from resnet import Photographs
from torch import Tensor, nn
from torch.utils.data import Dataset

SIZE = 32


class DenseBlock(nn.Module):
    def __init__(self, num_layers: int, inputs: int, growth: int):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(inputs + index * growth),
                nn.ReLU(),
                nn.Conv2d(inputs + index * growth, growth, 3, padding=1, bias=False),
            )
            for index in range(num_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, dim=1)))
        return torch.cat(features, dim=1)


class DenseCNN(nn.Module):
    """As many dense layers as asked for, shared out evenly over three blocks."""

    def __init__(self, num_layers: int = 58, growth: int = 12, num_classes: int = 10):
        super().__init__()
        width = 2 * growth
        stages: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False)]
        for block in range(3):
            if block > 0:  # between blocks: half the features, half the picture
                stages.append(
                    nn.Sequential(
                        nn.BatchNorm2d(width),
                        nn.ReLU(),
                        nn.Conv2d(width, width // 2, 1, bias=False),
                        nn.AvgPool2d(2),
                    )
                )
                width //= 2
            layers = (num_layers + block) // 3
            stages.append(DenseBlock(layers, width, growth))
            width += layers * growth
        self.features = nn.Sequential(*stages, nn.BatchNorm2d(width), nn.ReLU())
        self.classifier = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


def model() -> nn.Module:
    return DenseCNN(num_layers=58)


def example_inputs() -> tuple[Tensor]:
    return (torch.randn(2, 3, SIZE, SIZE),)


def example_target() -> Tensor:
    return torch.tensor([0, 1])


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def metrics(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    return {"accuracy": (output.argmax(1) == target).float().mean()}


def optimizer(params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.02, momentum=0.9, weight_decay=1e-4)


def dataset() -> Dataset:
    return Photographs(SIZE)
