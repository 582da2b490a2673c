"""A 3D network that tells from a density field how much structure it has at each scale.

The fields are synthetic: Gaussian random fields of 128 x 128 x 128 voxels in a periodic
box, with the power spectrum

    P(k) = A k^n exp(-(k R)^2),   k = |wave vector| in units of 2 pi / box,

R = 2 voxels, and A such that each field has variance 1. The spectral index n is drawn
from -3 to 0 for each field, and is what the network has to find: with small n large
structures dominate. The recipe: white noise is Fourier transformed, multiplied by
sqrt(P(k)), transformed back and normalised. No two samples are alike, none is stored.

    gemsc compile examples/cosmology/model.py --ranks 8 --tiles 2x2x2 --micro-batches 1
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

SIZE = 128
LOWEST, HIGHEST = -3.0, 0.0  # of the spectral index
SMOOTHING = 2.0  # R, in voxels


def density_field(index: float, size: int, generator: torch.Generator) -> Tensor:
    """Return a field [1, size, size, size] of mean 0 and variance 1."""
    noise = torch.randn(size, size, size, generator=generator)
    full, half = torch.fft.fftfreq(size) * size, torch.fft.rfftfreq(size) * size
    squares = full[:, None, None] ** 2 + full[:, None] ** 2 + half**2
    k = squares.sqrt()
    k[0, 0, 0] = 1.0
    amplitude = k ** (index / 2) * torch.exp(
        -0.5 * (k * 2 * torch.pi / size * SMOOTHING) ** 2
    )
    amplitude[0, 0, 0] = 0.0  # no mean
    field = torch.fft.irfftn(torch.fft.rfftn(noise) * amplitude, s=noise.shape)
    return (field / field.std())[None]


class Fields(Dataset):
    """Density fields, each with the index of its spectrum, scaled to 0 to 1."""

    def __init__(self, size: int, first: int = 0):
        self.size = size
        self.first = first

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.first + index)
        share = torch.rand(1, generator=generator)
        spectral_index = LOWEST + (HIGHEST - LOWEST) * float(share)
        return density_field(spectral_index, SIZE, generator), share


class CosmoNet(nn.Module):
    """Convolutions and pooling down to 8 voxels a side, then the mean of all."""

    def __init__(self, width: int = 4):
        super().__init__()
        widths = [1, *(width * 2**level for level in range(4))]
        self.levels = nn.ModuleList(
            nn.Sequential(
                nn.Conv3d(inputs, outputs, 3, padding=1, bias=False),
                nn.BatchNorm3d(outputs),
                nn.ReLU(),
                nn.AvgPool3d(2),
            )
            for inputs, outputs in pairwise(widths)
        )
        self.hidden = nn.Linear(widths[-1], 32)
        self.guess = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        for level in self.levels:
            x = level(x)
        return self.guess(torch.relu(self.hidden(x.mean((2, 3, 4)))))


def model() -> nn.Module:
    return CosmoNet()


def example_inputs() -> tuple[Tensor]:
    return (torch.randn(1, 1, SIZE, SIZE, SIZE),)


def example_target() -> Tensor:
    return torch.rand(1, 1)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def metrics(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Return how often the guess is within a tenth of the range."""
    return {"near": ((output - target).abs() < 0.1).float().mean()}


def optimizer(params) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=5e-3)


def dataset() -> Dataset:
    return Fields(64)


def eval_dataset() -> Dataset:
    return Fields(16, first=10_000)
