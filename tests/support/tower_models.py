"""Small networks with two towers, which run side by side as stages."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from clip import Clip, contrastive, texts_and_images
from models import Case, Sample
from torch import Tensor, nn

__all__ = ["TOWER_MODELS", "layer"]

WIDTH = 16
SAMPLES = 4  # of a micro-batch


def layer(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.LayerNorm(outputs), nn.ReLU())


class InTurn(nn.Module):
    """Layers of two towers in turn; what both need comes first, the loss is light."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Linear(8, WIDTH)
        self.left = nn.ModuleList(layer(WIDTH, WIDTH) for _ in range(6))
        self.right = nn.ModuleList(layer(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.shift(x.tanh()).chunk(2)
        for left, right in zip(self.left, self.right, strict=True):
            a, b = left(a), right(b)
        return F.cosine_similarity(a, b).repeat(2)


class Siamese(nn.Module):
    """One encoder for both of a pair: towers with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        layers = (layer(WIDTH, WIDTH) for _ in range(3))
        self.encoder = nn.Sequential(layer(8, WIDTH), *layers)

    def forward(self, pairs: Tensor) -> Tensor:
        a, b = self.encoder(pairs[:, 0]), self.encoder(pairs[:, 1])
        return (a - b).square().sum(1)


def double(inputs: int, outputs: int) -> nn.Sequential:
    """Return the two convolutions of a level."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class Encoder(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        sizes = (channels, 4, 8, 16)
        self.levels = nn.ModuleList(double(a, b) for a, b in pairwise(sizes))

    def forward(self, x: Tensor) -> list[Tensor]:
        outputs = []
        for level in self.levels:
            x = level(x if not outputs else F.max_pool2d(x, 2))
            outputs.append(x)
        return outputs


class TwoEncoders(nn.Module):
    """A U-Net with an encoder for colours and one for depth."""

    def __init__(self) -> None:
        super().__init__()
        self.colour, self.depth = Encoder(3), Encoder(1)
        self.middle = double(32, 16)
        self.up2, self.up1 = double(32, 8), double(16, 4)
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, colour: Tensor, depth: Tensor) -> Tensor:
        c1, c2, c3 = self.colour(colour)
        d1, d2, d3 = self.depth(depth.log1p())
        x = self.middle(torch.cat([c3, d3], 1))
        x = self.up2(torch.cat([F.interpolate(x, scale_factor=2), c2, d2], 1))
        x = self.up1(torch.cat([F.interpolate(x, scale_factor=2), c1, d1], 1))
        return self.head(x)


def rows(batch: int) -> Sample:
    return (torch.randn(batch, 8),), torch.randn(batch)


def pairs(batch: int) -> Sample:
    return (torch.randn(batch, 2, 8),), torch.rand(batch)


def colours_and_depths(batch: int) -> Sample:
    shape = (batch, 1, 16, 16)
    return (torch.rand(batch, 3, 16, 16), torch.rand(shape)), torch.rand(shape)


CASES = (
    Case("clip", Clip, texts_and_images, contrastive, SAMPLES),
    Case("in turn", InTurn, rows, F.mse_loss, SAMPLES),
    Case("siamese", Siamese, pairs, F.mse_loss, SAMPLES),
    Case("two encoders", TwoEncoders, colours_and_depths, F.mse_loss, SAMPLES),
)
TOWER_MODELS = {case.name: case for case in CASES}
