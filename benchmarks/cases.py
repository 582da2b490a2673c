"""The models that the benchmarks run, with as much data as wanted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))  # clip

import encoder
from clip import Clip, Image, Text, contrastive, texts_and_images
from encoder import Encoder
from gpt import Gpt, cross_entropy, words
from mlp import MLP
from resnet import Bottleneck, ResNet, ResNetV2
from unet_histology import model as unet

__all__ = ["CASES", "Case"]

WIDTH = 48  # channels of `TwoBranches`

Sample = tuple[tuple[Tensor, ...], Tensor]


@dataclass(frozen=True)
class Case:
    """A model, its loss, its data and the size of its batch: the same at every call."""

    make: Callable[[], nn.Module]
    sample: Callable[[int], Sample]
    loss: Callable[[Tensor, Tensor], Tensor]
    batch: int

    def build(self) -> nn.Module:
        """Return the model, with the same weights every time."""
        torch.manual_seed(0)
        return self.make()

    def data(self, size: int) -> Sample:
        """Return (inputs, target) of `size` samples."""
        torch.manual_seed(1)
        return self.sample(size)


def vectors(batch: int) -> Sample:
    return (torch.randn(batch, 256),), torch.randint(2, (batch,))


def pictures(size: int) -> Callable[[int], Sample]:
    shape = (3, size, size)
    return lambda batch: ((torch.randn(batch, *shape),), torch.randint(10, (batch,)))


def masked_pictures(batch: int, size: int = 128) -> Sample:
    mask = torch.rand(batch, 1, size, size).round()
    return (torch.randn(batch, 3, size, size),), mask


HIDDEN = 6  # bytes of each text: a batch's mean is the mean of its micro-batches'


def hidden_bytes(output: Tensor, target: Tensor) -> Tensor:
    total, count = encoder.loss(output, target)
    return total / count


def texts(batch: int) -> Sample:
    length = encoder.LENGTH
    real = torch.arange(length) < torch.randint(length // 2, length + 1, (batch, 1))
    tokens = torch.randint(256, (batch, length)).where(real, encoder.PADDING)
    target = torch.full((batch, length), encoder.IGNORED)
    target[:, :HIDDEN] = tokens[:, :HIDDEN]
    return (tokens, real), target


class TwoBranches(nn.Module):
    """Blocks of two equal branches between light trunks; of one, for comparison."""

    def __init__(self, branches: int, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.branches = nn.ModuleList(
            nn.ModuleList(self.branch() for _ in range(branches)) for _ in range(depth)
        )
        self.joins = nn.ModuleList(nn.Conv2d(2 * WIDTH, WIDTH, 1) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 10)

    @staticmethod
    def branch() -> nn.Module:
        convolutions = (nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(3))
        return nn.Sequential(*(nn.Sequential(c, nn.ReLU()) for c in convolutions))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for branches, join in zip(self.branches, self.joins, strict=True):
            outputs = [branch(x) for branch in branches]
            x = x + join(torch.cat([outputs[0], outputs[-1]], 1))
        return self.head(x.mean((2, 3)))


def gpt(width: int, *, tied: bool = True) -> Case:
    """Return a GPT-2 of 4 layers, with 8 heads and 4096 words."""

    def make() -> Gpt:
        model = Gpt(width, 8, 4, 4096, 128)
        if not tied:
            model.head.weight = nn.Parameter(model.words.weight.detach().clone())
        return model

    return Case(
        make,
        lambda batch: words(batch, 128, 4096),
        cross_entropy,
        4,
    )


def clip(width: int, depth: int, batch: int) -> dict[str, Case]:
    """Return a CLIP of texts of 64 words and images of 64 patches, and its parts."""

    def sample(size: int) -> Sample:
        return texts_and_images(size, 4096, 64, 64)

    def texts_alone(size: int) -> Sample:
        (tokens, _), _ = sample(size)
        return (tokens,), torch.randn(size, width)

    def images_alone(size: int) -> Sample:
        (_, images), _ = sample(size)
        return (images,), torch.randn(size, width)

    name = f"clip {width}"
    return {
        name: Case(lambda: Clip(width, depth, 4096, 64, 8), sample, contrastive, batch),
        f"{name} text": Case(
            lambda: Text(width, depth, 4096, 64), texts_alone, F.mse_loss, batch
        ),
        f"{name} image": Case(
            lambda: Image(width, depth, 8), images_alone, F.mse_loss, batch
        ),
    }


CASES = {
    "mlp": Case(
        lambda: MLP(inputs=256, width=512, depth=8), vectors, F.cross_entropy, 64
    ),
    "resnet20v2": Case(lambda: ResNetV2(depth=20), pictures(64), F.cross_entropy, 8),
    "resnet110": Case(
        lambda: ResNetV2(depth=110, width=8), pictures(32), F.cross_entropy, 16
    ),
    "resnet50": Case(
        lambda: ResNet(Bottleneck, [3, 4, 6, 3]), pictures(64), F.cross_entropy, 8
    ),
    "resnet20v2 512": Case(
        lambda: ResNetV2(depth=20), pictures(512), F.cross_entropy, 1
    ),
    "unet 512": Case(
        lambda: unet.UNet(base=8), lambda n: masked_pictures(n, 512), unet.loss, 1
    ),
    "unet wide 512": Case(
        lambda: unet.UNet(base=32), lambda n: masked_pictures(n, 512), unet.loss, 1
    ),
    "unet": Case(lambda: unet.UNet(base=16), masked_pictures, unet.loss, 8),
    # no dropout: then all contenders compute the same numbers, which is checked
    "encoder": Case(lambda: Encoder(dropout=0.0), texts, hidden_bytes, 32),
    "two branches": Case(lambda: TwoBranches(2), pictures(32), F.cross_entropy, 16),
    "one branch": Case(lambda: TwoBranches(1), pictures(32), F.cross_entropy, 16),
    "two branches 8": Case(lambda: TwoBranches(2), pictures(8), F.cross_entropy, 4),
    "one branch 8": Case(lambda: TwoBranches(1), pictures(8), F.cross_entropy, 4),
    "gpt 64": gpt(64),
    "gpt 256": gpt(256),
    "gpt 512": gpt(512),
    "gpt untied 64": gpt(64, tied=False),
    "gpt untied 256": gpt(256, tied=False),
    "gpt untied 512": gpt(512, tied=False),
    **clip(64, 2, 4),
    **clip(256, 6, 16),
}
