"""AmoebaNet-D, a network that evolution found, on crops of photographs.

Real et al., Regularized Evolution for Image Classifier Architecture Search, 2019. Each
cell adds up pairs of operations on earlier states, and joins what is left over; it also
sees the cell before the last one.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).parents[1]))

from resnet import Photographs

SIZE = 64


class ConvNorm(nn.Sequential):
    """ReLU, convolution, batch normalization."""

    def __init__(self, inputs: int, outputs: int, kernel, stride=1, padding=0):
        super().__init__(
            nn.ReLU(),
            nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False),
            nn.BatchNorm2d(outputs),
        )


class HalfSize(nn.Module):
    """Every second pixel, of the rows and columns from 0 on and from 1 on."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.even = nn.Conv2d(inputs, outputs // 2, 1, bias=False)
        self.odd = nn.Conv2d(inputs, outputs - outputs // 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        shifted = F.pad(x, (0, 1, 0, 1))[:, :, 1:, 1:]
        parts = self.even(F.avg_pool2d(x, 1, 2)), self.odd(F.avg_pool2d(shifted, 1, 2))
        return self.norm(torch.cat(parts, 1))


def none(channels: int, stride: int) -> nn.Module:
    return nn.Identity() if stride == 1 else HalfSize(channels, channels)


def conv_1x1(channels: int, stride: int) -> nn.Module:
    return ConvNorm(channels, channels, 1, stride)


def conv_3x3(channels: int, stride: int) -> nn.Module:
    narrow = channels // 4
    return nn.Sequential(
        ConvNorm(channels, narrow, 1),
        ConvNorm(narrow, narrow, 3, stride, padding=1),
        ConvNorm(narrow, channels, 1),
    )


def conv_1x7_7x1(channels: int, stride: int) -> nn.Module:
    narrow = channels // 4
    return nn.Sequential(
        ConvNorm(channels, narrow, 1),
        ConvNorm(narrow, narrow, (1, 7), (1, stride), padding=(0, 3)),
        ConvNorm(narrow, narrow, (7, 1), (stride, 1), padding=(3, 0)),
        ConvNorm(narrow, channels, 1),
    )


def max_pool_2x2(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(2, stride)


def max_pool_3x3(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(3, stride, padding=1)


def avg_pool_3x3(channels: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


Operation = tuple[int, Callable[[int, int], nn.Module]]  # on which state, what
NORMAL: tuple[Operation, ...] = (
    *((1, conv_1x1), (1, max_pool_3x3)),
    *((1, none), (0, conv_1x7_7x1)),
    *((0, conv_1x1), (0, conv_1x7_7x1)),
    *((2, max_pool_3x3), (2, none)),
    *((1, avg_pool_3x3), (5, conv_1x1)),
)
NORMAL_JOINS = (0, 3, 4, 6)
REDUCTION: tuple[Operation, ...] = (
    *((0, max_pool_2x2), (0, max_pool_3x3)),
    *((2, none), (1, conv_3x3)),
    *((2, conv_1x7_7x1), (2, max_pool_3x3)),
    *((3, none), (1, max_pool_2x2)),
    *((2, avg_pool_3x3), (3, conv_1x1)),
)
REDUCTION_JOINS = (4, 5, 6)


class Cell(nn.Module):
    """One cell; `halved` says that the cell before it made the picture smaller."""

    def __init__(
        self, before: int, last: int, channels: int, *, reduces: bool, halved: bool
    ):
        super().__init__()
        operations = REDUCTION if reduces else NORMAL
        self.joins = REDUCTION_JOINS if reduces else NORMAL_JOINS
        self.states = tuple(state for state, _ in operations)
        self.enter_last = ConvNorm(last, channels, 1)
        self.enter_before = (
            HalfSize(before, channels) if halved else ConvNorm(before, channels, 1)
        )
        self.operations = nn.ModuleList(
            make(channels, 2 if reduces and state < 2 else 1)
            for state, make in operations
        )
        self.outputs = channels * len(self.joins)

    def forward(self, before: Tensor, last: Tensor) -> Tensor:
        states = [self.enter_last(last), self.enter_before(before)]
        for index in range(0, len(self.operations), 2):
            left, right = self.states[index : index + 2]
            states.append(
                self.operations[index](states[left])
                + self.operations[index + 1](states[right])
            )
        return torch.cat([states[index] for index in self.joins], 1)


class AmoebaNet(nn.Module):
    """`num_cells` normal cells in three groups, each behind a reduction.

    On large pictures, `stem_cells` more reductions come first: with one, 18 cells and
    a width of 416 it is the network of Huang et al., GPipe, 2019, Table 1.
    """

    def __init__(
        self,
        num_cells: int = 3,
        width: int = 32,
        num_classes: int = 10,
        stem_cells: int = 0,
    ):
        super().__init__()
        channels = width // 4
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        before = last = channels
        halved = False
        self.cells = nn.ModuleList()
        group = (True, *(False,) * (num_cells // 3))
        for reduces in (*(True,) * stem_cells, *group * 3):
            channels *= 2 if reduces else 1
            cell = Cell(before, last, channels, reduces=reduces, halved=halved)
            self.cells.append(cell)
            before, last, halved = last, cell.outputs, reduces
        self.classifier = nn.Linear(last, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        before = last = self.stem(x)
        for cell in self.cells:
            before, last = last, cell(before, last)
        return self.classifier(F.relu(last).mean((2, 3)))


def model() -> nn.Module:
    return AmoebaNet()


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
