"""Small versions of the examples, for tests of many ranks against one process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import encoder
import networks
from amoebanet.model import AmoebaNet, Cell
from densenet import DenseCNN
from encoder import Encoder
from mlp import MLP
from pix2pix import model as pix2pix
from resnet import BasicBlock, Bottleneck, ResNet, ResNetV2
from unet_histology import model as unet

__all__ = [
    "MODELS",
    "AmoebaNet",
    "Case",
    "Cell",
    "ResNetV2",
    "float32_by_default",
    "pix2pix",
]

Sample = tuple[tuple[Tensor, ...], Tensor]


@contextmanager
def float32_by_default() -> Iterator[None]:
    """Make new tensors float32, whatever a test has set."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True, slots=True)
class Case:
    """A model with its loss and with as much data as wanted, the same at every call."""

    name: str
    make: Callable[[], nn.Module]
    sample: Callable[[int], Sample]
    loss: Callable[[Tensor, Tensor], Tensor]
    micro_batch_size: int = 2

    def build(self) -> nn.Module:
        """Return the model in float32, in training mode; the RNG is left as it was."""
        with torch.random.fork_rng(devices=[]), float32_by_default():
            torch.manual_seed(0)
            return self.make()

    def inputs(self, micro_batches: int, dtype: torch.dtype = torch.float32) -> Sample:
        """Return (inputs, target) of a batch; `dtype` is that of the float tensors."""
        with torch.random.fork_rng(devices=[]), float32_by_default():
            torch.manual_seed(1)
            inputs, target = self.sample(micro_batches * self.micro_batch_size)

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return tuple(map(cast, inputs)), cast(target)

    @property
    def example_inputs(self) -> tuple[Tensor, ...]:
        """The inputs of one micro-batch."""
        return self.inputs(1)[0]

    @property
    def example_target(self) -> Tensor:
        """The target of one micro-batch."""
        return self.inputs(1)[1]


def vectors(size: int) -> Callable[[int], Sample]:
    return lambda batch: ((torch.randn(batch, size),), torch.randint(2, (batch,)))


def pictures(size: int) -> Callable[[int], Sample]:
    shape = (3, size, size)
    return lambda batch: ((torch.randn(batch, *shape),), torch.randint(10, (batch,)))


def masked_pictures(batch: int) -> Sample:
    return (torch.randn(batch, 3, 32, 32),), torch.rand(batch, 1, 32, 32).round()


def texts(batch: int) -> Sample:
    """Return texts of 8 to 16 bytes, four of them to be found in each."""
    lengths = torch.randint(8, 17, (batch, 1))
    real = torch.arange(16) < lengths
    tokens = torch.randint(256, (batch, 16)).where(real, encoder.PADDING)
    hidden = torch.arange(16) % 2 == 0
    hidden = (hidden & (torch.arange(16) < 8)).expand(batch, -1)
    target = tokens.where(hidden, encoder.IGNORED)
    return (tokens.masked_fill(hidden, encoder.HIDDEN), real), target


CASES = (
    Case(
        "mlp", lambda: MLP(inputs=12, width=16, depth=8), vectors(12), F.cross_entropy
    ),
    # 64 pixels: of 32, layer4 would leave BatchNorm two values a channel, whose
    # gradient is only rounding error
    Case(
        "resnet18",
        lambda: ResNet(BasicBlock, [2, 2, 2, 2], width=8),
        pictures(64),
        F.cross_entropy,
    ),
    Case(  # where it is not about the model
        "resnet10",
        lambda: ResNet(BasicBlock, [1, 1, 1, 1], width=8),
        pictures(64),
        F.cross_entropy,
    ),
    Case(
        "resnet50",
        lambda: ResNet(Bottleneck, [3, 4, 6, 3], width=8),
        pictures(64),
        F.cross_entropy,
    ),
    Case(
        "resnet110v2",
        lambda: ResNetV2(depth=110, width=4),
        pictures(8),
        F.cross_entropy,
    ),
    Case("unet", lambda: unet.UNet(base=4), masked_pictures, unet.loss),
    Case(
        "densecnn",
        lambda: DenseCNN(num_layers=12, growth=4),
        pictures(16),
        F.cross_entropy,
    ),
    Case(
        "encoder",
        lambda: Encoder(width=16, num_layers=4, num_heads=2, length=16, dropout=0.0),
        texts,
        encoder.loss,
    ),
    Case(
        "tiled",
        networks.Tiled,
        lambda batch: (
            (torch.randn(batch, *networks.PICTURE.shape[1:]),),
            torch.randint(10, (batch,)),
        ),
        F.cross_entropy,
    ),
)

MODELS = {case.name: case for case in CASES}
