"""A U-Net that finds the vessels in a photograph of a retina, all of it at once.

The photograph is scikit-image's: 1411 x 1411 pixels, which neither 2 nor 16 divides.
The target is computed from it: what is darker, in green, than its surroundings. A rank
that has a tile of the picture reads that tile only, with the pixels around it that its
first layer needs:

    gemsc compile examples/retina/model.py --ranks 4 --tiles 2x2 --micro-batches 1
"""

from functools import cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from skimage import data, filters
from torch import Tensor, nn
from torch.utils.data import Dataset

SIZE = 1411
Box = tuple[tuple[int, int], ...]  # rows and columns, each from and up to


class DoubleConv(nn.Sequential):
    def __init__(self, inputs: int, outputs: int):
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        )


class UNet(nn.Module):
    """Goes down by pooling and up by interpolation, so that any size will do."""

    def __init__(self, base: int = 4, levels: int = 3):
        super().__init__()
        widths = [base * 2**level for level in range(levels + 1)]
        self.enter = DoubleConv(3, base)
        self.down = nn.ModuleList(DoubleConv(a, b) for a, b in pairwise(widths))
        self.up = nn.ModuleList(
            DoubleConv(a + b, a) for a, b in reversed([*pairwise(widths)])
        )
        self.head = nn.Conv2d(base, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.enter(x)]
        for down in self.down:
            skips.append(down(F.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for up in self.up:
            skip = skips.pop()
            x = F.interpolate(x, skip.shape[2:], mode="bilinear", align_corners=False)
            x = up(torch.cat([skip, x], dim=1))
        return self.head(x)


@cache
def picture() -> tuple[Tensor, Tensor]:
    """Return the photograph (3 x 1411 x 1411) and its vessels (1 x 1411 x 1411)."""
    rgb = data.retina()
    green = rgb[..., 1] / 255
    around = filters.gaussian(green, sigma=12)
    vessels = (around - green > 0.02) & (around > 0.1)
    photograph = torch.from_numpy(rgb).permute(2, 0, 1).float() / 255
    mean, std = photograph.mean(), photograph.std()
    return (photograph - mean) / std, torch.from_numpy(vessels).float()[None]


class Retina(Dataset):
    """The photograph as it is and mirrored, as a whole or in parts.

    `shape` and `read` are what makes it a dataset for tiles.
    """

    shape = (SIZE, SIZE)

    def __init__(self, indices: list[int]):
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.read(index, ((0, SIZE), (0, SIZE)))

    def read(self, index: int, box: Box) -> tuple[Tensor, Tensor]:
        """Return a box of the photograph and of its vessels."""
        rows, columns = (slice(*interval) for interval in box)
        flips = [axis for axis in (1, 2) if self.indices[index] & axis]
        photograph, vessels = (whole.flip(flips) for whole in picture())
        return photograph[:, rows, columns], vessels[:, rows, columns]


def model() -> nn.Module:
    return UNet()


def example_inputs() -> tuple[Tensor]:
    return (torch.randn(1, 3, SIZE, SIZE),)


def example_target() -> Tensor:
    return torch.rand(1, 1, SIZE, SIZE).round()


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return binary cross entropy plus soft Dice, both meaned over the pictures."""
    guess = output.sigmoid()
    overlap = 2 * (guess * target).sum((1, 2, 3)) + 1
    dice = overlap / (guess.sum((1, 2, 3)) + target.sum((1, 2, 3)) + 1)
    return F.binary_cross_entropy_with_logits(output, target) + 1 - dice.mean()


def metrics(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    guess = (output > 0).float()
    both, total = (guess * target).sum(), (guess + target).sum()
    return {"dice": 2 * both / total.clamp(min=1)}


def optimizer(params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def dataset() -> Dataset:
    return Retina([0, 1, 2, 3] * 4)
