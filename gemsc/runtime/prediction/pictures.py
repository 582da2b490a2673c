"""What pixels become for a model, and what its output becomes in a file.

Both can be said in the model's file: `predict_input(region)`, `predict_output(output)`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gemsc.errors import GemscError
from gemsc.messages.message import Input

__all__ = ["INPUT_HELP", "KINDS", "Picture", "as_input", "as_picture", "picture_among"]

KINDS = ("mask", "probabilities", "scores")
INPUT_HELP = "define predict_input(region) in the model's file: docs/whole-slides.md"
OUTPUT_HELP = "define predict_output(output) in the model's file, which returns a NumPy"
OUTPUT_HELP += " array of that height and width"


@dataclass(frozen=True)
class Picture:
    """What a model takes of each window: its height, width, channels and their axis."""

    size: tuple[int, int]
    channels: int
    is_channels_first: bool


def picture_among(inputs: Iterable[Input]) -> Picture | None:
    """Return the first input that is a picture, None where there is none."""
    for item in inputs:
        if item.path[0] == "input" and len(item.shape) == 4:
            _, *axes = item.shape
            if axes[0] <= axes[2]:
                return Picture((axes[1], axes[2]), axes[0], True)
            return Picture((axes[0], axes[1]), axes[2], False)
    return None


def as_input(region: NDArray[Any], picture: Picture) -> Tensor:
    """Return pixels from 0 to 1, as the model takes them; floats stay as they are.

    Raises:
        GemscError: the slide has other channels than the model takes.
    """
    if region.shape[2] != picture.channels:
        raise GemscError(
            f"the slide has {region.shape[2]} channels, the model takes "
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
    output: Any, size: tuple[int, int], kind: str, threshold: float
) -> NDArray[Any]:
    """Return what is written of the output for one window: height, width(, channels).

    A mask has the class with the highest score; of a single channel, 1 where the score
    is above the threshold.

    Raises:
        GemscError: the output is no picture of this size.
    """
    if not isinstance(output, Tensor):
        what = type(output).__name__
        raise GemscError(f"the model returns a {what}: no picture", help=OUTPUT_HELP)
    scores = output
    if scores.dim() == 2:
        scores = scores[None]
    if scores.dim() == 3 and scores.shape[:2] == size and scores.shape[1:] != size:
        scores = scores.movedim(-1, 0)
    if scores.dim() != 3 or scores.shape[1:] != size:
        raise GemscError(
            f"the model returns {list(output.shape)} for a window of "
            f"{size[0]} x {size[1]} pixels: no picture of that size",
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
