"""Train the Keras U-Net that `gemsc import unet.keras -o unet` has written to unet/.

The data are those of ../unet_histology, as a TensorFlow user has them: pictures are
(height, width, 3) with bytes from 0 to 255. The bottom right quadrant is held out.
"""

from functools import cache

import torch
from skimage import color, data, filters
from torch import Tensor
from torch.utils.data import Dataset

# of the Keras file: the network and its weights, and what it was compiled with
from unet.model import example_inputs, loss, model, optimizer

__all__ = ["example_inputs", "loss", "model", "optimizer"]

CROP = example_inputs()[0].shape[1]
QUADRANT = 256


@cache
def picture() -> tuple[Tensor, Tensor]:
    """Return the tissue (512 x 512 x 3) and its stain (512 x 512 x 1, 0 or 1)."""
    rgb = data.immunohistochemistry()
    brown = color.rgb2hed(rgb)[..., 2]
    stain = torch.from_numpy(brown > filters.threshold_otsu(brown)).float()
    return torch.from_numpy(rgb).float(), stain[..., None]


def crop(top: int, left: int) -> tuple[Tensor, Tensor]:
    rows, columns = slice(top, top + CROP), slice(left, left + CROP)
    tissue, stain = picture()
    return tissue[rows, columns], stain[rows, columns]


class Crops(Dataset):
    """Random crops of the three training quadrants."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        along = int(torch.randint(2 * QUADRANT - CROP + 1, ()))
        inside = int(torch.randint(QUADRANT - CROP + 1, ()))
        return crop(along, inside) if index % 2 else crop(inside, along)


def dataset() -> Dataset:
    return Crops()


def eval_dataset() -> list[tuple[Tensor, Tensor]]:
    """Return the held-out quadrant, cut into squares."""
    corners = range(QUADRANT, 2 * QUADRANT, CROP)
    return [crop(top, left) for top in corners for left in corners]


def metrics(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Return how well guess and target overlap, all given pictures taken together."""
    guess = (output > 0.5).float()
    both, total = (guess * target).sum(), (guess + target).sum()
    return {"dice": 2 * both / total.clamp(min=1)}
