"""What the checks train: models in a size for a GPU and in a tiny one for a CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import encoder
from encoder import Encoder
from resnet import Bottleneck, ResNet

import gemsc
from gemsc.compiler import CompiledProgram

from .lines import Place

__all__ = ["SUBJECTS", "Sample", "Subject", "compiled", "sgd", "unet"]

Sample = tuple[tuple[Tensor, ...], Tensor]
LEARNING_RATE = 0.01


@dataclass(frozen=True)
class Subject:
    """A model, samples of it, and its loss; `batch` samples fill a GPU, `tiny` run."""

    make: Callable[[bool], nn.Module]
    sample: Callable[[int, bool], Sample]
    loss: Callable[[Tensor, Tensor], Tensor]
    batch: int
    tiny: int = 2

    def build(self, place: Place) -> nn.Module:
        """Return the model, with the same weights every time."""
        torch.manual_seed(0)
        return self.make(place.is_tiny)

    def data(self, place: Place, batches: int = 1) -> Sample:
        """Return (inputs, target) of some batches, on the CPU."""
        torch.manual_seed(1)
        return self.sample(batches * self.size(place), place.is_tiny)

    def size(self, place: Place) -> int:
        """Return the samples of a micro-batch."""
        return self.tiny if place.is_tiny else self.batch


class Double(nn.Sequential):
    """Two convolutions with norms."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        )


class UNet(nn.Module):
    """The U-Net of the examples, which needs no scikit-image here."""

    def __init__(self, base: int, levels: int = 4) -> None:
        super().__init__()
        widths = [base * 2**level for level in range(levels + 1)]
        self.enter = Double(3, base)
        self.down = nn.ModuleList(Double(a, b) for a, b in pairwise(widths))
        pairs = [*reversed([*pairwise(widths)])]
        self.grow = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairs)
        self.up = nn.ModuleList(Double(2 * a, a) for a, _ in pairs)
        self.head = nn.Conv2d(base, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a logit for each pixel."""
        skips = [self.enter(x)]
        for down in self.down:
            skips.append(down(F.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for grow, up in zip(self.grow, self.up, strict=True):
            x = up(torch.cat([skips.pop(), grow(x)], 1))
        return self.head(x)


def unet(side: int, base: int, batch: int = 1) -> Subject:
    """Return a U-Net on pictures of side x side, the same in both sizes."""

    def sample(count: int, is_tiny: bool) -> Sample:
        mask = torch.rand(count, 1, side, side).round()
        return (torch.randn(count, 3, side, side),), mask

    loss = F.binary_cross_entropy_with_logits
    return Subject(lambda is_tiny: UNet(base), sample, loss, batch, batch)


def _resnet(is_tiny: bool) -> nn.Module:
    return ResNet(Bottleneck, [1, 1, 1, 1] if is_tiny else [3, 4, 6, 3])


def _classified(count: int, is_tiny: bool) -> Sample:
    side = 32 if is_tiny else 224
    return (torch.randn(count, 3, side, side),), torch.randint(10, (count,))


def _unet(is_tiny: bool) -> nn.Module:
    return UNet(4 if is_tiny else 32)


def _masked(count: int, is_tiny: bool) -> Sample:
    side = 32 if is_tiny else 512
    return unet(side, 1).sample(count, is_tiny)


def _encoder(is_tiny: bool) -> nn.Module:
    width, layers, length = (32, 2, 16) if is_tiny else (768, 12, 256)
    heads = max(4, width // 64)
    return Encoder(width, layers, heads, length, dropout=0.0)


def _texts(count: int, is_tiny: bool) -> Sample:
    length = 16 if is_tiny else 256
    real = torch.arange(length) < torch.randint(length // 2, length + 1, (count, 1))
    tokens = torch.randint(256, (count, length)).where(real, encoder.PADDING)
    target = torch.full((count, length), encoder.IGNORED)
    target[:, :6] = tokens[:, :6]
    return (tokens, real), target


def _hidden_bytes(output: Tensor, target: Tensor) -> Tensor:
    total, count = encoder.loss(output, target)
    return total / count


SUBJECTS = {
    "resnet50": Subject(_resnet, _classified, F.cross_entropy, 32),
    "unet": Subject(_unet, _masked, F.binary_cross_entropy_with_logits, 4),
    "encoder": Subject(_encoder, _texts, _hidden_bytes, 16),
}


def sgd(named: Any) -> torch.optim.Optimizer:
    """Return plain SGD: no state."""
    return torch.optim.SGD(named, lr=LEARNING_RATE)


def compiled(
    subject: Subject, place: Place, folder: Path, **choices: Any
) -> CompiledProgram:
    """Compile a subject into a folder."""
    inputs, target = subject.data(place)
    program = gemsc.compile(
        subject.build(place),
        inputs,
        loss=subject.loss,
        example_target=target,
        optimizer=sgd,
        check=False,
        hardware=place.hardware,
        **choices,
    )
    program.write(folder)
    return program
