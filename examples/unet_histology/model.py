"""A U-Net that finds the brown (DAB) stain in a photograph of stained tissue.

The tissue is scikit-image's immunohistochemistry picture, 512 x 512 pixels. The target
is computed from it: colour deconvolution, then Otsu's threshold on the DAB channel.
The bottom right quadrant is held out: no training crop touches it.
"""

from functools import cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from skimage import color, data, filters
from torch import Tensor, nn
from torch.utils.data import Dataset

CROP = 128
QUADRANT = 256


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


class Down(nn.Module):
    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.pool = nn.MaxPool2d(2)
        self.conv = DoubleConv(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.pool(x))


class Up(nn.Module):
    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.grow = nn.ConvTranspose2d(inputs, outputs, 2, stride=2)
        self.conv = DoubleConv(2 * outputs, outputs)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.conv(torch.cat([skip, self.grow(x)], dim=1))


class UNet(nn.Module):
    def __init__(self, base: int = 8, levels: int = 4):
        super().__init__()
        widths = [base * 2**level for level in range(levels + 1)]
        self.enter = DoubleConv(3, base)
        self.down = nn.ModuleList(Down(a, b) for a, b in pairwise(widths))
        self.up = nn.ModuleList(Up(b, a) for a, b in reversed([*pairwise(widths)]))
        self.head = nn.Conv2d(base, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.enter(x)]
        for down in self.down:
            skips.append(down(skips[-1]))
        x = skips.pop()
        for up in self.up:
            x = up(x, skips.pop())
        return self.head(x)


@cache
def picture() -> tuple[Tensor, Tensor]:
    """Return the tissue (3 x 512 x 512, mean 0) and its stain (1 x 512 x 512, 0/1)."""
    rgb = data.immunohistochemistry()
    brown = color.rgb2hed(rgb)[..., 2]
    stain = torch.from_numpy(brown > filters.threshold_otsu(brown)).float()
    tissue = torch.from_numpy(rgb).permute(2, 0, 1).float() / 255
    return (tissue - tissue.mean()) / tissue.std(), stain[None]


def crop(top: int, left: int) -> tuple[Tensor, Tensor]:
    rows, columns = slice(top, top + CROP), slice(left, left + CROP)
    tissue, stain = picture()
    return tissue[:, rows, columns], stain[:, rows, columns]


def corner() -> tuple[int, int]:
    """Return the top left corner of a random crop that misses the held-out quadrant."""
    along = int(torch.randint(2 * QUADRANT - CROP + 1, ()))
    inside = int(torch.randint(QUADRANT - CROP + 1, ()))
    return (along, inside) if torch.rand(()) < 0.5 else (inside, along)


class Crops(Dataset):
    """Random crops, flipped at random, of the three training quadrants."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        flips = [axis for axis in (1, 2) if torch.rand(()) < 0.5]
        tissue, stain = crop(*corner())
        return tissue.flip(flips), stain.flip(flips)


def model() -> nn.Module:
    return UNet()


def example_inputs() -> tuple[Tensor]:
    return (torch.randn(2, 3, CROP, CROP),)


def example_target() -> Tensor:
    return torch.rand(2, 1, CROP, CROP).round()


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return binary cross entropy plus soft Dice, both meaned over the pictures."""
    guess = output.sigmoid()
    overlap = 2 * (guess * target).sum((1, 2, 3)) + 1
    dice = overlap / (guess.sum((1, 2, 3)) + target.sum((1, 2, 3)) + 1)
    return F.binary_cross_entropy_with_logits(output, target) + 1 - dice.mean()


def metrics(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Return how well guess and target overlap, all given pictures taken together."""
    guess = (output > 0).float()
    both, total = (guess * target).sum(), (guess + target).sum()
    return {
        "dice": 2 * both / total.clamp(min=1),
        "iou": both / (total - both).clamp(min=1),
    }


def optimizer(params) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=5e-3)


def dataset() -> Dataset:
    return Crops()


def eval_dataset() -> Dataset:
    """Return the held-out quadrant, cut into four tiles."""
    corners = (QUADRANT, QUADRANT + CROP)
    return [crop(top, left) for top in corners for left in corners]
