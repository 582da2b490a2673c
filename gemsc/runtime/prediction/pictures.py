"""What pixels become for a model, and what its output becomes in a file.

Both can be said in the model's file: `predict_input(region)`, `predict_output(output)`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gemsc.errors import GemscError
from gemsc.slides.windows import Picture

KINDS = ("mask", "probabilities", "scores")
INPUT_HELP = "define predict_input(region) in the model's file: docs/whole-slides.md"
OUTPUT_HELP = "define predict_output(output) in the model's file, which returns a NumPy"
OUTPUT_HELP += " array of that size"


def as_input(region: NDArray[Any], picture: Picture) -> Tensor:
    """Return pixels from 0 to 1, as the model takes them; floats stay as they are.

    Raises:
        GemscError: the slide has other channels than the model takes.
    """
    if region.shape[-1] != picture.channels:
        raise GemscError(
            f"the picture has {region.shape[-1]} channels, the model takes "
            f"{picture.channels}",
            help=INPUT_HELP,
        )
    scaled = region.astype(np.float32)
    if region.dtype.kind in "iu":
        scaled /= np.iinfo(region.dtype).max
    if picture.is_channels_first:
        scaled = np.moveaxis(scaled, -1, 0)
    return torch.from_numpy(np.ascontiguousarray(scaled))


def as_picture(
    output: Any, size: tuple[int, ...], kind: str, threshold: float
) -> NDArray[Any]:
    """Return what is written of the output for a window or a volume of this size.

    Its last axis has the channels, if there are any. A mask has the class with the
    highest score; of a single channel, 1 where the score is above the threshold.

    Raises:
        GemscError: the output is no picture of this size.
    """
    if not isinstance(output, Tensor):
        what = type(output).__name__
        raise GemscError(f"the model returns a {what}: not a picture", help=OUTPUT_HELP)
    scores, dims = output, len(size)
    if scores.dim() == dims:
        scores = scores[None]
    is_last = scores.shape[:dims] == size and scores.shape[1:] != size
    if scores.dim() == dims + 1 and is_last:
        scores = scores.movedim(-1, 0)
    if scores.dim() != dims + 1 or scores.shape[1:] != size:
        raise GemscError(
            f"the model returns {list(output.shape)} for a picture of "
            f"{' x '.join(map(str, size))}: none of that size",
            help=OUTPUT_HELP,
        )
    if kind == "mask":
        if len(scores) == 1:
            return (scores[0] > threshold).numpy().astype(np.uint8)
        return scores.argmax(0).numpy().astype(np.min_scalar_type(len(scores) - 1))
    if kind == "probabilities":
        scores = scores.softmax(0) if len(scores) > 1 else scores.sigmoid()
    found = scores.movedim(0, -1).numpy()
    return found[..., 0] if len(scores) == 1 else found
