"""pix2pix: colours a grey picture of stained tissue.

A U-Net colours it, a discriminator looks at patches of grey and colours together
(Isola et al., 2017), with spectral normalization (Miyato et al., 2018). The picture is
that of `examples/unet_histology`, and its bottom right quadrant is held out.

    gemsc compile examples/pix2pix/model.py --ranks 2 --micro-batches 4
"""

from functools import cache, partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from skimage import data
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import Dataset

import gemsc

CROP = 64
QUADRANT = 256


def halve(inputs: int, outputs: int) -> nn.Module:
    conv = nn.Conv2d(inputs, outputs, 4, stride=2, padding=1, bias=False)
    return nn.Sequential(
        conv, nn.InstanceNorm2d(outputs, affine=True), nn.LeakyReLU(0.2)
    )


def double(inputs: int, outputs: int) -> nn.Module:
    conv = nn.ConvTranspose2d(inputs, outputs, 4, stride=2, padding=1, bias=False)
    return nn.Sequential(conv, nn.InstanceNorm2d(outputs, affine=True), nn.ReLU())


class Generator(nn.Module):
    def __init__(self, base: int = 16, levels: int = 4):
        super().__init__()
        widths = [base * 2**level for level in range(levels + 1)]
        self.enter = nn.Conv2d(1, base, 3, padding=1)
        self.down = nn.ModuleList(halve(a, b) for a, b in pairwise(widths))
        self.up = nn.ModuleList(double(b, a) for a, b in reversed([*pairwise(widths)]))
        self.mix = nn.ModuleList(nn.Conv2d(2 * a, a, 1) for a in reversed(widths[:-1]))
        self.head = nn.Conv2d(base, 3, 3, padding=1)

    def forward(self, grey: Tensor) -> Tensor:
        skips = [self.enter(grey)]
        for down in self.down:
            skips.append(down(skips[-1]))
        x = skips.pop()
        for up, mix in zip(self.up, self.mix, strict=True):
            x = mix(torch.cat([skips.pop(), up(x)], dim=1))
        return torch.sigmoid(self.head(x))


class Pix2Pix(nn.Module):
    def __init__(self, base: int = 16):
        super().__init__()
        self.generator = Generator(base)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise((4, base, 2 * base, 4 * base)):
            conv = nn.Conv2d(inputs, outputs, 4, stride=2, padding=1)
            layers += [spectral_norm(conv), nn.LeakyReLU(0.2)]
        layers.append(spectral_norm(nn.Conv2d(4 * base, 1, 3, padding=1)))
        self.discriminator = nn.Sequential(*layers)

    def forward(self, grey: Tensor) -> Tensor:
        return self.generator(grey)


def judged(model: Pix2Pix, grey: Tensor, colours: Tensor, real: float) -> Tensor:
    """Return how far the discriminator is from calling all patches real, or none."""
    patches = model.discriminator(torch.cat((grey, colours), dim=1))
    return (patches - real).square().mean()


def d_loss(model: Pix2Pix, grey: Tensor, colours: Tensor) -> Tensor:
    with torch.no_grad():
        made = model(grey)
    real, wrong = judged(model, grey, colours, 1), judged(model, grey, made, 0)
    return (real + wrong) / 2


def g_loss(model: Pix2Pix, grey: Tensor, colours: Tensor) -> Tensor:
    made = model(grey)
    return judged(model, grey, made, 1) + 100 * F.l1_loss(made, colours)


adam = partial(torch.optim.Adam, lr=2e-4, betas=(0.5, 0.999))
phases = [
    gemsc.Phase("d", loss=d_loss, train="discriminator", optimizer=adam),
    gemsc.Phase("g", loss=g_loss, train="generator", optimizer=adam),
]


@cache
def picture() -> Tensor:
    """Return the tissue: 3 x 512 x 512, from 0 to 1."""
    return torch.from_numpy(data.immunohistochemistry()).permute(2, 0, 1).float() / 255


def crop(top: int, left: int) -> tuple[Tensor, Tensor]:
    colours = picture()[:, top : top + CROP, left : left + CROP]
    return colours.mean(0, keepdim=True), colours


class Crops(Dataset):
    """Random crops of the three training quadrants, flipped at random."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        along = int(torch.randint(2 * QUADRANT - CROP + 1, ()))
        inside = int(torch.randint(QUADRANT - CROP + 1, ()))
        corner = (along, inside) if torch.rand(()) < 0.5 else (inside, along)
        flips = [axis for axis in (1, 2) if torch.rand(()) < 0.5]
        grey, colours = crop(*corner)
        return grey.flip(flips), colours.flip(flips)


class HeldOut(Dataset):
    """The crops of the held-out quadrant, side by side."""

    def __len__(self) -> int:
        return (QUADRANT // CROP) ** 2

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row, column = divmod(index, QUADRANT // CROP)
        return crop(QUADRANT + row * CROP, QUADRANT + column * CROP)


def metrics(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    error = F.mse_loss(output, target)
    return {"psnr": -10 * torch.log10(error), "l1": F.l1_loss(output, target)}


def model() -> nn.Module:
    return Pix2Pix()


def example_inputs() -> tuple[Tensor]:
    return (torch.rand(2, 1, CROP, CROP),)


def example_target() -> Tensor:
    return torch.rand(2, 3, CROP, CROP)


dataset, eval_dataset = Crops, HeldOut
