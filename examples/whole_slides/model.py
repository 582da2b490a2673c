"""A U-Net that finds the brown (DAB) stain in a whole slide, 16,384 x 16,384 pixels.

It trains on pieces of 2048 x 2048 pixels, for which one process needs 2.7 GB. They are
read from the file when they are needed, by each rank the part that it computes. The
target is computed from the pixels: colour deconvolution, then a threshold on the DAB
channel. The right quarter of the slide is held out: no training piece touches it.

    python examples/whole_slides/make_slide.py -o slide.tiff
    gemsc compile examples/whole_slides/model.py --ranks 4 --tiles 2x2 \
        --device-memory 2GiB --micro-batches 2 -o build/slides
"""

from functools import cache
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from skimage import color
from torch import Tensor, nn
from torch.utils.data import Dataset

from gemsc import Slide

SLIDE = "slide.tiff"  # from the folder in which gemsc is started
PIECE = 2048  # pixels
PIECES = 24  # of an epoch
BASE = 8  # channels of the finest level
THRESHOLD = 0.062  # of the DAB channel: Otsu's, of the original photograph
MEAN, STD = (0.70, 0.63, 0.56), (0.15, 0.20, 0.25)  # of its channels

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
    def __init__(self, levels: int = 3):
        super().__init__()
        widths = [BASE * 2**level for level in range(levels + 1)]
        self.enter = DoubleConv(3, BASE)
        self.down = nn.ModuleList(DoubleConv(a, b) for a, b in pairwise(widths))
        pairs = [*reversed([*pairwise(widths)])]
        self.grow = nn.ModuleList(
            nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in pairs
        )
        self.up = nn.ModuleList(DoubleConv(2 * a, a) for a, _ in pairs)
        self.head = nn.Conv2d(BASE, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.enter(x)]
        for down in self.down:
            skips.append(down(F.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for grow, up in zip(self.grow, self.up, strict=True):
            x = up(torch.cat([skips.pop(), grow(x)], dim=1))
        return self.head(x)


@cache
def slide() -> Slide:
    """Open the slide, once in each process."""
    return Slide(SLIDE)


def stain(region: np.ndarray) -> Tensor:
    """Return 1 where pixels are brown, 0 elsewhere: the target."""
    brown = color.rgb2hed(region.astype(np.float32) / 255)[..., 2]
    return torch.from_numpy(brown > THRESHOLD).float()


def predict_input(region: np.ndarray) -> Tensor:
    """Return what the network takes for some pixels, in training and in prediction."""
    scaled = torch.from_numpy(region).float() / 255
    return ((scaled - torch.tensor(MEAN)) / torch.tensor(STD)).permute(2, 0, 1)


class Pieces(Dataset):
    """Pieces of a part of the slide, from anywhere in it, flipped at random.

    `shape` and `read` are what makes it a dataset for tiles: a rank reads its part of a
    piece. `columns` are those of the slide from which pieces come, as shares of it.
    """

    shape = (PIECE, PIECE)

    def __init__(self, count: int, columns: tuple[float, float]):
        self.count = count
        self.columns = columns

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.read(index, ((0, PIECE), (0, PIECE)))

    def read(self, index: int, box: Box) -> tuple[Tensor, Tensor]:
        height, width, _ = slide().shape
        first, last = (int(width * share) for share in self.columns)
        top = int(torch.randint(height - PIECE + 1, ()))
        left = int(torch.randint(first, last - PIECE + 1, ()))
        flipped = [bool(torch.rand(()) < 0.5) for _ in box]
        (top, bottom), (left, right) = (
            (corner + PIECE - stop, corner + PIECE - start)
            if is_flipped
            else (corner + start, corner + stop)
            for corner, is_flipped, (start, stop) in zip(
                (top, left), flipped, box, strict=True
            )
        )
        region = slide().read((top, bottom), (left, right))
        axes = [axis for axis, is_flipped in enumerate(flipped, 1) if is_flipped]
        return predict_input(region).flip(axes), stain(region)[None].flip(axes)


def model() -> nn.Module:
    return UNet()


def example_inputs() -> tuple[Tensor]:
    return (torch.zeros(1, 3, PIECE, PIECE),)


def example_target() -> Tensor:
    return torch.zeros(1, 1, PIECE, PIECE)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return binary cross entropy plus soft Dice, both meaned over the pieces."""
    guess = output.sigmoid()
    overlap = 2 * (guess * target).sum((1, 2, 3)) + 1
    dice = overlap / (guess.sum((1, 2, 3)) + target.sum((1, 2, 3)) + 1)
    return F.binary_cross_entropy_with_logits(output, target) + 1 - dice.mean()


def optimizer(params) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-2)


def dataset() -> Dataset:
    return Pieces(PIECES, (0.0, 0.75))


def eval_dataset() -> Dataset:
    return Pieces(4, (0.75, 1.0))
